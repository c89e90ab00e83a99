"""What takes part in PyTorch's own tools for more than one machine."""

from hf_trainweights.checkpoint.sharded.reader import TrainWeightsReader
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter

__all__ = ["TrainWeightsReader", "TrainWeightsWriter"]
