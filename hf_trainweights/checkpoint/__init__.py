"""Training state at rest: the verbs for a plain PyTorch loop, and what reads their files back."""

from hf_trainweights.checkpoint.discovery import latest as latest
from hf_trainweights.checkpoint.manager import CheckpointManager as CheckpointManager
from hf_trainweights.checkpoint.manifest import verify_checkpoint as verify_checkpoint
from hf_trainweights.checkpoint.state import build_checkpoint as build_checkpoint
from hf_trainweights.checkpoint.state import load_checkpoint as load_checkpoint
from hf_trainweights.checkpoint.state import restore_checkpoint as restore_checkpoint
from hf_trainweights.checkpoint.state import save_checkpoint as save_checkpoint
from hf_trainweights.checkpoint.versions import VersionedModelSaver as VersionedModelSaver
