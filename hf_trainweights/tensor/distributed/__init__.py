"""A quantized weight among several ranks: cutting it, gathering it, and checking that all ranks have the same one."""
