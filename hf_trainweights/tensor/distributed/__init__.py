"""A quantized weight among several ranks: how it is cut, gathered and agreed on."""
