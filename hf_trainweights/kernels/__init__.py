"""Products with quantized weights that do not hold a whole float weight in memory.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. What the op does not serve is dequantized and multiplied in blocks.
"""

from hf_trainweights.kernels.stored import linear, prepare_few_rows, slowness

__all__ = ["linear", "prepare_few_rows", "slowness"]
