"""The quantized weight: the tensor subclass, its ops and products, its names in a file, and modules that hold it."""

from hf_trainweights.tensor import ops as _ops  # noqa: F401  (registers handlers of ops)
from hf_trainweights.tensor import products as _products  # noqa: F401  (likewise)
from hf_trainweights.tensor.distributed import sharded_ops as _sharded_ops  # noqa: F401  (and those for several ranks)
