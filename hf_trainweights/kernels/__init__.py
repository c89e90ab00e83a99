"""Products with quantized weights that do not hold a whole float weight in memory.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it as one op, and
PyTorch's dispatcher chooses the implementation by device. If there is no kernel for a weight, it is dequantized and
multiplied in blocks.
"""

from hf_trainweights.kernels.experts import multiply_experts
from hf_trainweights.kernels.stored import linear, prepare_few_rows, slowness

__all__ = ["linear", "multiply_experts", "prepare_few_rows", "slowness"]
