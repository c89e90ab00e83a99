"""What lies in a checkpoint directory, listed once before anything in it changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.run.completeness import STATE_NAME, TRAINER_STATE_NAME
from hf_trainweights.checkpoint.whole.plain_weights import weight_files
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files.digests import digest_files
from hf_trainweights.files.torch_zip import is_torch_file

_SHARDED_STATE = ("pytorch_model_fsdp_*", "optimizer_[0-9]*", "global_step*", "*.distcp", "zero_to_fp32.py")

_MODEL_CONFIGS = ("config.json", "adapter_config.json")
_PROGRESS_NAMES = (STATE_NAME, TRAINER_STATE_NAME, MANIFEST_NAME)


@dataclass(frozen=True)
class Inventory:
    """The files of a checkpoint directory that hold training state.

    Args:
        path: The directory.
        weight_files: Those of one family, the one that loaders open first at the head, indices before their shards.
        other_files: Other files of torch.save, sorted.
    """

    path: Path
    weight_files: tuple[Path, ...]
    other_files: tuple[Path, ...]

    def require_training_state(self) -> None:
        """Check that these are not the files of a finished model; ConfigError: there is nothing that a resume needs."""
        state_files = [file for file in self.other_files if file.name != "training_args.bin"]
        is_model = any((self.path / name).is_file() for name in _MODEL_CONFIGS)
        if is_model and not (state_files or any((self.path / name).is_file() for name in _PROGRESS_NAMES)):
            next_step = (
                "To store its weights as a checkpoint's all the same, which from_pretrained reads with hf_trainweights "
                "alone, pass weights_only=True, on the command line --weights-only."
            )
            found = f"a model ({self.weight_files[0].name}) and no training state" if self.weight_files else "no state"
            raise ConfigError(str(self.path), "a training checkpoint", found, next_step)

    def replaced_by(self, weights_name: str) -> list[Path]:
        """List the files that a new weights file makes wrong or idle."""
        # Digests of a quantized model's weight files go with these; the manifest has those of the new ones.
        return [file for file in self.weight_files if file.name != weights_name] + digest_files(self.path)


def take_inventory(path: Path) -> Inventory:
    """List the files of a checkpoint directory; ConfigError: there is no checkpoint.

    UnsupportedError: a sharded one that no DCP wrote, of DeepSpeed or of FSDP with LOCAL_STATE_DICT.
    """
    weights = weight_files(path) if path.is_dir() else []
    torch_files = sorted(file for file in path.iterdir() if is_torch_file(file)) if path.is_dir() else []
    if not (weights or torch_files):
        found = "a directory without any" if path.is_dir() else "no directory"
        next_step = "Pass one checkpoint, e.g. out/checkpoint-500, not the run."
        raise ConfigError(str(path), "a directory with weights or other torch files", found, next_step)
    for pattern in _SHARDED_STATE:
        found = next(path.glob(pattern), None)
        if found is not None:
            next_step = "Leave it as it is, or have the Trainer save a full one, or with FSDP's SHARDED_STATE_DICT."
            raise UnsupportedError(str(path), "a checkpoint in whole files", found.name, next_step)
    return Inventory(path, tuple(weights), tuple(file for file in torch_files if file not in weights))
