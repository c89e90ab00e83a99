"""What a file says about its base is checked before anything is opened."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from bases import COMMIT, REPOSITORY

from hf_trainweights.checkpoint.encoded.structure import Base
from hf_trainweights.errors import CorruptFileError

FILES = {"model.safetensors": "0" * 64}
OF_THE_HUB = {"files": FILES, "repository": REPOSITORY, "commit": COMMIT}
LOCAL = {"files": FILES, "path": "/models/mine"}


@pytest.mark.parametrize("value", [OF_THE_HUB, LOCAL, {**OF_THE_HUB, "repository": "gpt2"}])
def test_a_base_is_itself_again_through_json(value: dict[str, Any]) -> None:
    assert Base.from_dict("base", value).to_dict() == value


def test_the_digest_is_that_of_the_text_that_sha256sum_prints() -> None:
    base = Base({"b.bin": "1" * 64, "a.bin": "0" * 64}, path="/models")
    assert base.sha256 == hashlib.sha256(f"{'0' * 64}  a.bin\n{'1' * 64}  b.bin\n".encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"repository": "../../etc"},
        {"repository": "a/../b"},
        {"repository": "/etc/passwd"},
        {"repository": "a/b/c"},
        {"repository": "..", "commit": COMMIT},
        {"repository": "a..b/c"},
        {"repository": ".hidden/c"},
        {"repository": "a\\b"},
        {"repository": "a\n"},
        {"repository": 3},
        {"commit": "main"},
        {"commit": "../" + COMMIT},
        {"commit": COMMIT + "\n"},
        {"commit": None},
        {"commit": ["x"]},
        {"path": "/etc"},
        {"path": None, "repository": None, "commit": None},
        {"files": {}},
        {"files": ["model.safetensors"]},
        {"files": {"/etc/model.bin": "0" * 64}},
        {"files": {"../model.bin": "0" * 64}},
        {"files": {"sub/model.bin": "0" * 64}},
        {"files": {"C:model.bin": "0" * 64}},
        {"files": {"passwd": "0" * 64}},
        {"files": {"model.bin": "0" * 63}},
        {"files": {"model.bin": 0}},
        {"unknown": 1},
    ],
    ids=repr,
)
def test_a_base_that_leads_elsewhere_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptFileError, match="the base"):
        Base.from_dict("the base", {**OF_THE_HUB, **change})


@pytest.mark.parametrize("value", [None, "gpt2", [], {**LOCAL, "path": 3}, {**LOCAL, "repository": "gpt2"}], ids=repr)
def test_what_is_no_base_is_refused(value: object) -> None:
    with pytest.raises(CorruptFileError, match="the base"):
        Base.from_dict("the base", value)
