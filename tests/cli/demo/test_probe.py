"""The input for every variant of a model: windows of held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_trainweights_cli.demo.corpus import Corpus
from hf_trainweights_cli.demo.probe import make_probe
from hf_trainweights_cli.demo.run import Result


@pytest.mark.slow
def test_windows_start_with_the_begin_of_text_token_where_there_is_one(
    result: Result, out: Path, corpus: Corpus, tmp_path: Path
) -> None:
    plain = make_probe(str(out / "model"), corpus, max_windows=3, device_map="cpu").windows
    AutoTokenizer.from_pretrained(out / "model", bos_token="<|endoftext|>").save_pretrained(tmp_path)
    with_bos = make_probe(str(tmp_path), corpus, max_windows=3, device_map="cpu").windows
    assert with_bos[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(with_bos[:, 1:], plain)
