"""TrainWeightsCheckpointCallback: makes each checkpoint of a Trainer small where it lies, right after it is saved.

The work is done in one background thread that reads files, never live tensors, one checkpoint at a time. It is waited
for before the Trainer may save, rotate or load a checkpoint again, because rotation deletes directories without asking
whether anyone writes in them. The thread reads the Trainer's own files; where these name weights otherwise than the
modules do, the weights are first written once more, plainly, while training waits.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from hf_trainweights.checkpoint.compression import (
    BackgroundCall,
    Compression,
    Savings,
    drop_stale_manifest,
    rewriting_bytes,
    size_bytes,
    stored_weight_names,
)
from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories
from hf_trainweights.checkpoint.directory.save_job import ANCHOR_EVERY_SAVES
from hf_trainweights.checkpoint.directory.weights_aside import set_weights_aside
from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory
from hf_trainweights.checkpoint.optimizer_state import optimizer_parameter_names
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.models.host.checkpoints import names_not_saved
from hf_trainweights.models.host.models import tied_names

_logger = logging.get_logger(__name__)


class TrainWeightsCheckpointCallback(TrainerCallback):
    """Keeps a Trainer's checkpoints small; an unmodified Trainer resumes from them.

    The checkpoint that is the best when it is saved keeps its weights exact in every mode. With `push_to_hub` weights
    stay plain safetensors, so that what is uploaded needs nothing but Transformers. Sharded FSDP and DeepSpeed
    checkpoints are left as they are.

    Args:
        mode: `"lossless"`, `"near-lossless"` or `"compact"`; see `hf_trainweights.checkpoint.planning.policy.Policy`.
        rules: Exceptions from the mode, likewise.
        anchor_every: The most checkpoints whose weights are stored as differences to one earlier one.

    Raises:
        ConfigError: Mode or rules are wrong.

    Example:
        >>> TrainWeightsCheckpointCallback(mode="near-lossless", rules={"re:.*embed.*": "lossless"}).policy.mode
        'near-lossless'
    """

    def __init__(
        self,
        mode: str = "lossless",
        rules: Mapping[str, Any] | None = None,
        anchor_every: int = ANCHOR_EVERY_SAVES,
    ):
        self.policy = Policy(mode, rules or {})
        self.anchor_every = anchor_every
        self._job: BackgroundCall | None = None
        self._savings = Savings()
        self._said: set[str] = set()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make the checkpoints of a moved run readable: their files record where their anchors were.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: What it is going to do.
        """
        for directory in checkpoint_directories(args.output_dir or ""):
            register_anchor_directory(directory)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint if another is about to be saved.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: What it is going to do.

        Raises:
            Exception: Whatever went wrong in the background.
        """
        if control.should_save or control.should_training_stop:
            self._wait()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint if another is about to be saved; see `on_step_end`."""
        self.on_step_end(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint where the evaluation decides whether another is saved; see `on_step_end`."""
        if args.save_strategy == SaveStrategy.BEST:
            self._wait()

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the checkpoint small before it is uploaded; `on_save` then finds nothing left to do.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: What it is going to do.
            kwargs: Model and optimizer, among others.

        Raises:
            TrainWeightsError: The checkpoint could not be rewritten; every file in it is whole.
        """
        self._wait()
        self._start(args, state, foreground=True, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the checkpoint small: in the background, or at once where the Trainer is about to stop.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: What it is going to do.
            kwargs: Model and optimizer, among others.

        Raises:
            TrainWeightsError: The last checkpoint could not be rewritten; every file in it is whole.
        """
        self._wait()
        # No event lies between the last save and the loading of the best model.
        last = control.should_training_stop or state.global_step >= state.max_steps
        self._start(args, state, foreground=last, **kwargs)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint and say in one line what was saved.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: What it is going to do.

        Raises:
            Exception: Whatever went wrong in the background.
        """
        self._wait()
        if self._savings.checkpoints:
            _logger.warning("%s", self._savings)

    def _start(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *,
        foreground: bool,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        directory = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not args.should_save or not directory.is_dir() or not self._is_supported(args):
            return
        if not self._has_room(directory):
            return
        drop_stale_manifest(directory)
        module = extract_model_from_parallel(model) if model is not None else None
        weights = self._live_weights(module, directory) if not args.push_to_hub else None
        best = state.best_model_checkpoint and Path(state.best_model_checkpoint).name == directory.name
        compression = Compression(
            directory,
            plain_bytes=size_bytes(directory),
            # Written here, while training waits: the next step changes them.
            aside=set_weights_aside(directory, weights) if weights is not None else None,
            options={
                "mode": self.policy.mode,
                "rules": {"weight": "lossless", **self.policy.rules} if best else self.policy.rules,
                "keep_weights": bool(args.push_to_hub),
                "buffers": [name for name, _ in module.named_buffers()] if module is not None else None,
                "optimizer_names": optimizer_parameter_names(module, optimizer) if module is not None else {},
                "metrics": _metrics(state),
                "anchor_every": self.anchor_every,
            },
        )
        self._job = BackgroundCall(lambda: compression.run(self._savings))
        if foreground:
            self._job.run()
            self._wait()
        else:
            self._job.start()

    def _wait(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _is_supported(self, args: TrainingArguments) -> bool:
        sharded = bool(getattr(args, "fsdp", None)) or bool(getattr(args, "deepspeed", None))
        if sharded:
            self._say_once("FSDP and DeepSpeed checkpoints are left as the Trainer wrote them.")
        return not sharded

    def _has_room(self, directory: Path) -> bool:
        """Return whether there is room to rewrite the files; without it the checkpoint stays plain."""
        needed = rewriting_bytes(directory)
        free = shutil.disk_usage(directory).free
        if free < needed:
            _logger.warning(
                "%s stays as it is: rewriting it takes %d MB of free disk space, there are %d MB.",
                directory,
                needed // 10**6,
                free // 10**6,
            )
        return free >= needed

    def _live_weights(self, module: nn.Module | None, directory: Path) -> dict[str, Tensor] | None:
        """Return the model's weights under its own names where the file has other names, else None."""
        stored = stored_weight_names(directory)
        if module is None or stored is None or not isinstance(module, PreTrainedModel):
            return None
        if getattr(module, "hf_quantizer", None) is not None:
            return None
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        missing = state.keys() - stored - names_not_saved(module)
        if stored <= state.keys() and missing <= tied_names(module).keys():
            return None
        self._say_once(
            "This model's files name its weights otherwise than its modules do, so its checkpoints get weights under "
            "the modules' names: a Trainer resumes from these exactly."
        )
        return state

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _logger.warning("%s", message)


def _metrics(state: TrainerState) -> dict[str, float]:
    """Return the newest number of every name that the Trainer logged."""
    merged: dict[str, Any] = {}
    for entry in state.log_history:
        merged |= entry
    return {name: float(value) for name, value in merged.items() if isinstance(value, int | float)}
