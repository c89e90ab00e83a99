import random

import numpy as np
import torch
from checkpoint.loops import seed
from torch import nn
from trees import fingerprint

from hf_trainweights.checkpoint.loop.progress import rng_state, set_rng_state
from hf_trainweights.checkpoint.loop.training_state import build_checkpoint, restore_checkpoint


def test_random_numbers_go_on_where_they_were():
    seed()
    state = rng_state()
    drawn = [torch.rand(3), random.gauss(0, 1), np.random.standard_normal()]
    set_rng_state(state)
    again = [torch.rand(3), random.gauss(0, 1), np.random.standard_normal()]
    assert fingerprint(drawn) == fingerprint(again)


def test_random_numbers_may_be_left_alone():
    model = nn.Linear(2, 2)
    checkpoint = build_checkpoint(model)
    before = rng_state()
    torch.rand(1)
    drawn = torch.get_rng_state()
    restore_checkpoint(checkpoint, model, rng=False)
    assert torch.equal(torch.get_rng_state(), drawn)
    restore_checkpoint(checkpoint, model)
    assert torch.equal(torch.get_rng_state(), before["torch"])
