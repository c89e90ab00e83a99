"""The quantized weight: the tensor subclass, its ops and products, its names in a file, and modules that hold it."""

from hf_trainweights.tensor import ops as _ops  # noqa: F401  (registers what ops do with a quantized weight)
