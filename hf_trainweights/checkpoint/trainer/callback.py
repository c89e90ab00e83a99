"""TrainWeightsCheckpointCallback: compresses each checkpoint of a Trainer in place, right after it is saved.

One background thread compresses one checkpoint at a time. It reads files, never live tensors. It starts with the next
training step, so other callbacks still see the Trainer's own files. The callback waits for it before the Trainer may
save, rotate or load a checkpoint again, because rotation deletes directories even if someone writes in them. If the
Trainer's files use other names for weights than the modules do, they are replaced at once, while training waits.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_trainweights.checkpoint.directory import collect_garbage, find_checkpoints, layout_of, register_checkpoint
from hf_trainweights.checkpoint.loop.module_state import unwrapped_name
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, total_rounding
from hf_trainweights.checkpoint.planning.optimizers import class_name
from hf_trainweights.checkpoint.planning.policy import ModeName, Policy
from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names
from hf_trainweights.checkpoint.run.base import RunBase
from hf_trainweights.checkpoint.run.checkpoints import (
    checkpoint_directories,
    converted_weights_problem,
    mark_run,
    size_bytes,
    verify_checkpoint,
)
from hf_trainweights.checkpoint.run.file_checks import progress_problem
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, RewriteJob, require_count
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.checkpoint.whole.rewriting import replace_weights
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.models.host.module_names import converted_names, renamed_tensors
from hf_trainweights.models.host.ranks import Sharding, sharding_of

_logger = logging.get_logger(__name__)


class Backlog:
    """The checkpoints of a run that wait for compression. `str()` of it summarizes the finished ones.

    A checkpoint that cannot be compressed is still an intact, plain one. So an error costs the run only disk space: one
    warning is logged, and the checkpoint is tried again together with the next one. `on_error` is `"warn"` for this, or
    `"raise"` to end the training; ConfigError: it is neither.
    """

    def __init__(self, on_error: str):
        if on_error not in ("warn", "raise"):
            raise ConfigError("on_error", "warn or raise", repr(on_error), "Choose one of these.")
        self.speaks = True  # whether this rank logs; only one does
        self._on_error = on_error
        self._waiting: list[RewriteJob] = []
        self._failed: dict[Path, RewriteJob] = {}
        self._stayed: dict[Path, str] = {}
        self._outcomes: list[tuple[Path, Exception | str]] = []
        self._thread: threading.Thread | None = None
        self._sizes: list[tuple[int, int]] = []  # bytes of each compressed checkpoint, before and after
        self._largest_weight_error = 0.0

    def add(self, job: RewriteJob) -> None:
        """Add a checkpoint, and again those that stayed plain; `make_small` skips those that were removed since."""
        self._failed.pop(job.path, None)
        self._waiting += [*self._failed.values(), job]
        self._failed.clear()

    def start(self) -> None:
        """Start the background thread, if any checkpoint waits."""
        if self._waiting and self._thread is None:
            # Not a daemon: the interpreter waits for a checkpoint that is being written.
            self._thread = threading.Thread(target=self._work, name="trainweights-checkpoint", daemon=False)
            self._thread.start()

    def finish(self) -> None:
        """Wait for the background thread; if it was not started, compress the waiting checkpoints in this thread.

        Raises the first error that `blame` raises. All failed checkpoints are tried again with the next one.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            self._work()
        else:
            thread.join()
        outcomes, self._outcomes = self._outcomes, []
        for directory, outcome in outcomes:
            message = f"{directory.name} stays as it is, plain, and gets another try at the next save:"
            if isinstance(outcome, Exception):
                self.blame(directory, outcome, message)
            elif directory.is_dir():
                self._stay(directory, message, outcome)

    def blame(self, directory: Path, error: Exception, message: str) -> None:
        """Raise the error of a checkpoint, or log it once after `message`, which states its consequence.

        The error is raised if `on_error` is "raise", if no checkpoint of the run is intact, or if the memory is full.
        The error of a checkpoint that was removed is ignored, because someone removed it on purpose.
        """
        if isinstance(error, MemoryError):
            raise error
        if not directory.is_dir():
            return
        if self._on_error == "raise" or all(checkpoint.problem for checkpoint in find_checkpoints(directory.parent)):
            raise error
        self._stay(directory, message, str(error))

    def make_small(self, job: RewriteJob) -> str | None:
        """Compress a checkpoint, a sharded one on all ranks, and count it; return why the disk is too full, or None.

        CorruptFileError: a file is damaged, and nothing has changed. Other TrainWeightsError: every file is intact.
        """
        path = job.path
        if not path.is_dir():
            return None
        manifest = path / MANIFEST_NAME
        if manifest.exists() and not verify_checkpoint(path).intact:
            manifest.unlink()  # from an earlier run, whose checkpoint of this step the Trainer has just overwritten
        layout, before_bytes = layout_of(path), size_bytes(path)
        if not manifest.exists():
            problem = progress_problem(path) or layout.missing_problem()
            if problem:
                next_step = "The other checkpoints do not need this one; remove it, or restore the file from a copy."
                raise CorruptFileError(str(path), "a whole checkpoint", problem, next_step)
        needed, free = layout.rewriting_bytes(), shutil.disk_usage(path).free
        if free < needed:
            return f"rewriting it takes {needed // 10**6} MB of free disk space, there are {free // 10**6} MB"
        weight_error = total_rounding(layout.compress(job)).get("weight", 0.0)
        after_bytes = size_bytes(path)
        if before_bytes != after_bytes:  # else it was compressed and counted before, at a push or before a resume
            self._sizes.append((before_bytes, after_bytes))
            self._largest_weight_error = max(self._largest_weight_error, weight_error)
        return None

    def __str__(self) -> str:
        sentences: list[str] = []
        if self._sizes:
            before, after = map(sum, zip(*self._sizes, strict=True))
            sizes = f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB ({before / max(1, after):.2f}x)"
            error = f"off by at most {self._largest_weight_error:.3g}" if self._largest_weight_error else "exact"
            sentences.append(f"{len(self._sizes)} checkpoints made small: {sizes}, weights {error}")
        # Checkpoints that were removed, or compressed at a later try, are not listed.
        plain = [path for path in self._stayed if path.is_dir() and not (path / MANIFEST_NAME).exists()]
        if plain:
            names = ", ".join(path.name for path in plain)
            sentences.append(f"{len(plain)} stayed plain, {names}; reason of the last: {self._stayed[plain[-1]]}")
        return "; ".join(sentences)

    def _work(self) -> None:
        while self._waiting:
            job = self._waiting.pop(0)
            outcome: Exception | str | None
            try:
                outcome = job.ranks.decide(partial(self.make_small, job))
            except Exception as error:
                outcome = error
            if outcome:
                self._failed[job.path] = job
                self._outcomes.append((job.path, outcome))

    def _stay(self, directory: Path, message: str, reason: str) -> None:
        if self.speaks and self._stayed.get(directory) != reason:
            _logger.warning("%s %s", message, reason)
        self._stayed[directory] = reason


class TrainWeightsCheckpointCallback(TrainerCallback):
    """Keeps a Trainer's checkpoints small; an unmodified Trainer resumes from them.

    A checkpoint that is the best one when it is saved keeps its weights exact in every mode. If `push_to_hub` is set,
    weights stay plain safetensors, so that readers of the upload need only Transformers. Under FSDP with
    SHARDED_STATE_DICT and under DeepSpeed every rank compresses the files that it has written. Checkpoints of a
    hyperparameter search are left as they are. Callbacks that request saves have to be registered before this one, so
    that it sees the request. The Trainer calls the methods with its arguments, its state, its control object and, among
    others, model and optimizer.

    Args:
        mode: `"lossless"`, `"near-lossless"` or `"compact"`; see `hf_trainweights.checkpoint.planning.policy.Policy`.
        rules: Exceptions from the mode; see there.
        anchor_every: The most checkpoints whose weights are stored as differences to one earlier one, at least 1.
        anchor: Weights outside the run that its first checkpoint is stored against: `"base"` for the weights that
            `from_pretrained` loaded the model from (for an adapter: its base model), or a directory or file.
        keep_base: Keep those weights in the run, linked or copied, so that its checkpoints need no file outside.
        on_error: The reaction to a checkpoint that cannot be compressed. `"warn"`: it stays plain and is tried again at
            the next save; the training ends only if no checkpoint of the run is intact. `"raise"`: the training ends.

    Raises:
        ConfigError: An option is wrong.
        Exception: Any method may raise an error of the background thread that ends the training; see `on_error`.

    Examples:
        >>> TrainWeightsCheckpointCallback(mode="near-lossless", rules={"re:.*embed.*": "lossless"}).policy.mode
        'near-lossless'
    """

    def __init__(
        self,
        mode: ModeName = "lossless",
        rules: Mapping[str, Any] | None = None,
        anchor_every: int = ANCHOR_EVERY_SAVES,
        on_error: str = "warn",
        anchor: str | Path | None = None,
        keep_base: bool = False,
    ):
        self.policy = Policy(mode, rules or {})
        self.anchor_every = require_count("anchor_every", anchor_every)
        self._base = RunBase(anchor, keep_base)
        self._backlog = Backlog(on_error)
        self._said: set[str] = set()
        self._ranks = Ranks()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Register the checkpoints of the run, so that they are readable after a move: files record old anchor paths.

        Raises:
            ConfigError: The model's base is not found.
        """
        self._base.find(kwargs["model"])
        for directory in checkpoint_directories(args.output_dir or ""):
            register_checkpoint(directory)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Remove leftovers of a killed run, mark the run if its files rename weights, and check the resumed checkpoint.

        Raises:
            ConfigError: A rule fits no name in the model, its base is not found, or the Trainer has resumed from a
                checkpoint that leaves some weights at their starting values.
            UnsupportedError: The checkpoints will be sharded, and there is an `anchor`.
            SaveError: The mark cannot be written.
        """
        sharding = self._sharding(args, state)
        if sharding is Sharding.OTHER:
            return
        self._backlog.speaks = state.is_world_process_zero
        self._ranks = all_ranks() if sharding is Sharding.SHARDED else Ranks()
        self._base.require_whole_files(sharding is Sharding.SHARDED)
        self._base.find(model)
        module = extract_model_from_parallel(model)
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self.policy.require_used(_names_in_files(tensors))
        # Under FSDP the files that the Trainer resumes from have the modules' names.
        names = converted_names(module) if sharding is Sharding.NONE else set()
        if args.should_save:
            try:
                collect_garbage(args.output_dir or "")
            except OSError as error:
                _logger.warning("What an earlier run has left in %s stays: %s", args.output_dir, error)
            if names:
                mark_run(args.output_dir or "", min(names))
        directory = _checkpoint_of(args, state)
        problem = converted_weights_problem(directory, names) if names and state.global_step > 0 else None
        if problem:
            next_step = "Pass resume_from_checkpoint=latest(output_dir), which passes such a checkpoint over."
            raise ConfigError("resume_from_checkpoint", "a whole checkpoint", f"{directory}: {problem}", next_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to compress the last checkpoint."""
        self._backlog.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint if another is about to be saved."""
        if control.should_save or control.should_training_stop:
            self._backlog.finish()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint if the evaluation decides whether another is saved."""
        if args.save_strategy == SaveStrategy.BEST:
            self._backlog.finish()

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compress the checkpoint before it is uploaded; `on_save` then has nothing left to do."""
        if self._sharding(args, state) is Sharding.SHARDED:  # a push is reported to one rank only
            return
        self._add(args, state, **kwargs)
        self._backlog.finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the checkpoint to the backlog; it is compressed from the next step on, or at once if training ends."""
        self._add(args, state, **kwargs)
        # The Trainer sends no event between the last save and the loading of the best model.
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._backlog.finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the last checkpoint, and log one line about sizes and about checkpoints that stayed plain."""
        self._backlog.finish()
        summary = str(self._backlog)
        if summary and self._backlog.speaks:
            _logger.warning("%s", summary)

    def _add(self, args: TrainingArguments, state: TrainerState, *, model: nn.Module, optimizer: Any, **_: Any) -> None:
        self._backlog.finish()
        directory, sharding = _checkpoint_of(args, state), self._sharding(args, state)
        if sharding is Sharding.SHARDED:  # all ranks must do the same, so the disk is not looked at
            if args.push_to_hub:
                self._say_once("Sharded checkpoints that are pushed stay as the Trainer wrote them.")
                return
        elif not args.should_save or not directory.is_dir() or sharding is Sharding.OTHER:
            return
        module, names, renamed = extract_model_from_parallel(model), {}, {}
        try:
            if sharding is Sharding.NONE:  # states that were gathered from several ranks have names already
                names = optimizer_parameter_names(module, optimizer)
                renamed = renamed_tensors(module)
                self._replace_converted_weights(module, directory, keep=args.push_to_hub)
        except Exception as error:
            self._backlog.blame(directory, error, f"{directory.name} stays as the Trainer wrote it:")
            return
        is_best = Path(state.best_model_checkpoint or "").name == directory.name
        policy = Policy(self.policy.mode, self.policy.rules_of_exact_weights if is_best else self.policy.rules)
        job = RewriteJob(
            directory,
            policy,
            self.anchor_every,
            self._base.choice,
            ranks=self._ranks,
            keep_weights=bool(args.push_to_hub),
            buffers=_names_in_files(module.named_buffers(remove_duplicate=False)),
            optimizer_names=names,
            optimizer_class=class_name(optimizer),
            renamed=renamed,
            metrics=_newest_metrics(state),
        )
        self._backlog.add(job)

    def _replace_converted_weights(self, module: nn.Module, directory: Path, *, keep: bool) -> None:
        """Replace the weight files if they have other names than the modules; `keep` them if they are pushed.

        Training waits, because the next step changes the weights. Until then `latest` passes the checkpoint over.
        """
        if not converted_names(module):
            return
        problem = "Transformers saves some weights of this model under names that a Trainer cannot load back."
        rewritten = "The checkpoints are rewritten under the modules' own names."
        pushed = "What is pushed keeps them, so a Trainer cannot resume from these checkpoints."
        self._say_once(f"{problem} {pushed if keep else rewritten}")
        if keep:
            return
        weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        replace_weights(directory, weights)

    def _sharding(self, args: TrainingArguments, state: TrainerState) -> Sharding:
        # Only the Trainer knows the directory of a trial; checkpoints right in the output directory are another run's.
        sharding = Sharding.OTHER if state.is_hyper_param_search else sharding_of(args)
        if sharding is Sharding.OTHER:
            kinds = "Checkpoints of FSDP other than DCP and of a hyperparameter search"
            self._say_once(f"{kinds} are left as the Trainer wrote them.")
        return sharding

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _logger.warning("%s", message)


def _checkpoint_of(args: Any, state: Any) -> Path:
    """Return the absolute path of the step's checkpoint, which stays right if the working directory changes."""
    return Path(args.output_dir or "").absolute() / f"checkpoint-{state.global_step}"


def _newest_metrics(state: Any) -> dict[str, float]:
    """Return the newest logged value of each metric."""
    logged = (metric for entry in state.log_history for metric in entry.items())
    return {name: float(value) for name, value in logged if isinstance(value, int | float)}


def _names_in_files(tensors: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names that weights or buffers may have in a checkpoint: without wrappers, and their own.

    FSDP leaves wrappers out of the names. The names have `_orig_mod` if a user has compiled the model before.
    """
    return [name for own_name, _ in tensors for name in (unwrapped_name(own_name), own_name)]
