import torch

from hf_trainweights.checkpoint.codecs.coding.rank1 import log_means


def test_means_do_not_depend_on_the_order_of_summation():
    # A mean of just above half a unit, and large logarithms that cancel.
    row = torch.tensor([2.0**120, 2.0**-120] * 16 + [1 + 2**-6 + 2**-16] * 8 + [1 + 2**-6] * 8 + [1.0] * 16)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.stack([row[torch.randperm(64, generator=generator)] for _ in range(64)])
    assert len(log_means(matrix)[0].unique()) == 1
