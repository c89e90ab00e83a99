"""Points the Hub's client, as it is installed, at a Hub on this machine, for one test at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.hf_api
import pytest
import transformers.utils.hub
from hub.server import TOKEN, LocalHub, serving
from huggingface_hub import constants
from huggingface_hub.utils import close_session


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Yield a Hub without repositories; the client knows its address and a token that may write."""
    with serving(tmp_path / "xet") as hub:
        connect(hub.url, tmp_path / "home", monkeypatch)
        yield hub
    close_session()


@pytest.fixture
def xet_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Yield a Hub that takes weights through Xet only, as the real one does."""
    pytest.importorskip("hf_xet")
    with serving(tmp_path / "xet", xet=True) as hub:
        connect(hub.url, tmp_path / "home", monkeypatch)
        yield hub
    close_session()


def connect(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what the client read from its environment when it was imported, and forget its connections."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # PEFT asks the environment
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_CACHE": str(home / "cache"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    close_session()
