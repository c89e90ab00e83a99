"""Small training checkpoints: saved and loaded by a plain PyTorch loop, or compressed in existing directories."""

from typing import TYPE_CHECKING

from hf_trainweights.lazy import lazy as _lazy

if TYPE_CHECKING:
    from hf_trainweights.checkpoint.codecs import register_codec
    from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor
    from hf_trainweights.checkpoint.directory import (
        collect_garbage,
        compress_directory,
        find_checkpoints,
        latest,
        restore_directory,
    )
    from hf_trainweights.checkpoint.encoded.reader import register_base
    from hf_trainweights.checkpoint.loop.manager import CheckpointManager
    from hf_trainweights.checkpoint.loop.training_state import (
        build_checkpoint,
        load_checkpoint,
        restore_checkpoint,
        save_checkpoint,
    )
    from hf_trainweights.checkpoint.planning.policy import Policy
    from hf_trainweights.checkpoint.planning.update_rules import StateRole, UpdateRule, register_update_rule
    from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
    from hf_trainweights.checkpoint.versions import VersionedModelSaver

__all__ = [
    "CheckpointManager",
    "Codec",
    "EncodedTensor",
    "Policy",
    "StateRole",
    "UpdateRule",
    "VersionedModelSaver",
    "build_checkpoint",
    "collect_garbage",
    "compress_directory",
    "find_checkpoints",
    "latest",
    "load_checkpoint",
    "register_base",
    "register_codec",
    "register_update_rule",
    "restore_checkpoint",
    "restore_directory",
    "save_checkpoint",
    "verify_checkpoint",
]

# These modules are imported on first use, because a program that only loads a model does not need them.
__getattr__ = _lazy(
    __name__,
    {
        "CheckpointManager": "loop.manager",
        "Codec": "codecs.base",
        "EncodedTensor": "codecs.base",
        "Policy": "planning.policy",
        "StateRole": "planning.update_rules",
        "UpdateRule": "planning.update_rules",
        "VersionedModelSaver": "versions",
        "build_checkpoint": "loop.training_state",
        "collect_garbage": "directory",
        "compress_directory": "directory",
        "find_checkpoints": "directory",
        "latest": "directory",
        "load_checkpoint": "loop.training_state",
        "register_base": "encoded.reader",
        "register_codec": "codecs",
        "register_update_rule": "planning.update_rules",
        "restore_checkpoint": "loop.training_state",
        "restore_directory": "directory",
        "save_checkpoint": "loop.training_state",
        "verify_checkpoint": "run.checkpoints",
    },
)


def __dir__() -> list[str]:
    return __all__
