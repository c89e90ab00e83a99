"""A source that cannot be asked for is none of GGUF files: the caller says what is missing."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from hf_trainweights.imports.gguf.sources import find_gguf


def test_without_a_network_and_a_cached_copy_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise HfHubHTTPError.__bases__[0]("no network")

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "list_repo_files", fail)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert find_gguf("nowhere", None) is None
