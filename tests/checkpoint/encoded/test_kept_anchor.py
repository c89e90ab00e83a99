"""An anchor that is kept open is the one that was asked for, whatever other threads ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_trainweights.checkpoint.encoded import decoder


def test_an_anchor_is_that_which_was_asked_for_while_another_thread_asks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    wanted, other = (SimpleNamespace(sha256=name, files=[path]) for name in ("wanted", "other"))
    monkeypatch.setattr(decoder, "_last_anchor", (wanted, [path.stat()]))

    def meanwhile(*_: object) -> bool:
        decoder._last_anchor = (other, [path.stat()])
        return True

    monkeypatch.setattr(decoder, "_is_unchanged", meanwhile)
    monkeypatch.setattr(decoder, "find_anchor", lambda *_: path)
    assert decoder.open_anchor({"sha256": "wanted", "path": str(path)}) is wanted
