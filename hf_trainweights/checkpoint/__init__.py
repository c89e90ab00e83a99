"""Training state at rest: the verbs for a plain PyTorch loop, and what reads their files back."""

from hf_trainweights.checkpoint.directory.discovery import latest
from hf_trainweights.checkpoint.directory.manifest import verify_checkpoint
from hf_trainweights.checkpoint.manager import CheckpointManager
from hf_trainweights.checkpoint.training_state import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from hf_trainweights.checkpoint.versions import VersionedModelSaver

__all__ = [
    "CheckpointManager",
    "VersionedModelSaver",
    "build_checkpoint",
    "latest",
    "load_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
