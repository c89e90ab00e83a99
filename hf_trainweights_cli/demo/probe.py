"""Makes the input that the demo gives to its model in every format: held-out text and a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_trainweights_cli.demo.corpus import Corpus
from hf_trainweights_cli.demo.float_model import load_tokenizer

PROMPT = "class Error(Exception):\n    def __init__(self"

_WINDOW_TOKENS = 128


@dataclass(frozen=True)
class Probe:
    """The input for the model in every format: `windows` are held-out text, int64 `[windows, tokens]`."""

    tokenizer: PreTrainedTokenizerBase
    windows: Tensor
    device_map: str


def make_probe(source: str, corpus: Corpus, max_windows: int, device_map: str) -> Probe:
    """Take windows evenly from the held-out text; put a begin-of-text token before each if the tokenizer has one."""
    tokenizer = load_tokenizer(source)
    tokens = torch.tensor(tokenizer("".join(corpus.held_out), add_special_tokens=False)["input_ids"])
    windows = tokens[: len(tokens) // _WINDOW_TOKENS * _WINDOW_TOKENS].view(-1, _WINDOW_TOKENS)
    windows = windows[:: -(-len(windows) // max_windows)]
    if tokenizer.bos_token_id is not None:
        windows = F.pad(windows, (1, 0), value=tokenizer.bos_token_id)
    return Probe(tokenizer, windows, device_map)
