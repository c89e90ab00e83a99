"""The parts of this package that work with PyTorch's own tools for several machines."""

from hf_trainweights.checkpoint.dcp.reader import TrainWeightsReader
from hf_trainweights.checkpoint.directory import latest_on_all_ranks
from hf_trainweights.checkpoint.sharded.conversion import restore_as_dcp, restore_as_model
from hf_trainweights.checkpoint.sharded.model_state import ModelState
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter
from hf_trainweights.tensor.distributed.agreement import check_shardable

__all__ = [
    "ModelState",
    "TrainWeightsReader",
    "TrainWeightsWriter",
    "check_shardable",
    "latest_on_all_ranks",
    "restore_as_dcp",
    "restore_as_model",
]
