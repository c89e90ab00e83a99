"""`CheckpointManager`: saves a training loop, and resumes it exactly at the step where it stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from hf_trainweights.checkpoint.directory import collect_garbage, latest, remove_checkpoint
from hf_trainweights.checkpoint.loop.module_state import load_module_state
from hf_trainweights.checkpoint.loop.progress import Boundary, Pass, Progress, state_from_bytes
from hf_trainweights.checkpoint.loop.training_state import (
    build_checkpoint,
    give_checkpoint,
    load_verified,
    save_training_state,
)
from hf_trainweights.checkpoint.planning.policy import ModeName, Policy
from hf_trainweights.checkpoint.run.base import RunBase
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, checkpoint_step
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, require_count
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.atomic import make_directories, save_errors

_SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM


class CheckpointManager:
    """Saves a training loop to `root/checkpoint-<step>` and restores it from the newest intact checkpoint.

    A step is one batch. A checkpoint is due every `every_steps` steps. It is written right after the next
    `optimizer.step()`, also one that a GradScaler skips. So with gradient accumulation no gradient is half summed in
    it. Another one is written when the `with` block ends without an exception, and on SIGTERM, after which the process
    exits with status 143. A step counts as done when the loop asks for the next one, or is left by `break` after
    `optimizer.step()`. A loop that accumulates gradients and is left by `break` between two `optimizer.step()` is saved
    as it was after the first of them; that is exact if its scheduler steps with the optimizer.

    Resuming is exact, and batches come in the same order: the random number generators are set to their states at the
    beginning of the pass, the batches that were consumed are skipped, and then the generators are set to their states
    at the save. They are Python's, numpy's and torch's on CPU and CUDA; those of MPS and XPU are not saved.

    A loop over several passes calls `steps` once for each, one after the other. After a resume, completed passes yield
    no batch, but the loop repeats its work between them, such as a scheduler's step or adding a group of parameters. So
    optimizer, scheduler and scaler are restored only when the first incomplete pass begins, or at the end of the block
    if all passes are complete. The model has the weights of the checkpoint from the first call on. A DataLoader with
    `persistent_workers` starts new workers for each pass.

    If `torch.distributed` is initialized, as for DDP, every rank runs the same loop with the same arguments. The first
    rank writes and removes checkpoints for all ranks. Each rank gets the states of its own random number generators and
    its own position in its loader back. A run resumes on as many ranks as it was saved on.

    Args:
        root: Directory of this run alone; it is created. One process writes to it at a time.
        mode: A mode of `Policy`: "lossless", "near-lossless" or "compact".
        rules: Rules of `Policy`: exceptions from the mode.
        every_steps: Steps between two checkpoints, at least 1.
        keep_last: How many checkpoints to keep, at least 1; None keeps all.
        anchor_every: The most checkpoints whose weights are stored against the same anchor, at least 1.
        anchor: Weights outside the run that its first checkpoint is stored against: `"base"` for the weights that
            `from_pretrained` loaded the model from, or a directory or file of weights.
        keep_base: Keep those weights in the run, linked or copied, so that its checkpoints need no file outside.

    Raises:
        ConfigError: An option is wrong, or there are no weights at `anchor`.
        SaveError: `root` cannot be created, when the `with` block begins.

    Examples:
        >>> import os, tempfile
        >>> root, model = tempfile.mkdtemp(), nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with CheckpointManager(root, every_steps=2, keep_last=3) as manager:
        ...     for step, batch in manager.steps(torch.ones(5, 2), model, optimizer):
        ...         loss = model(batch).mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         manager.log(loss=loss)
        >>> sorted(os.listdir(root))
        ['checkpoint-2', 'checkpoint-4', 'checkpoint-5']
    """

    def __init__(
        self,
        root: str | Path,
        *,
        mode: ModeName = "lossless",
        rules: Mapping[str, Any] | None = None,
        every_steps: int = 100,
        keep_last: int | None = 3,
        anchor_every: int = ANCHOR_EVERY_SAVES,
        anchor: str | Path | None = None,
        keep_base: bool = False,
    ):
        self._root = Path(root).absolute()
        self._policy = Policy(mode, rules or {})
        self._every_steps = require_count("every_steps", every_steps)
        self._keep_last = None if keep_last is None else require_count("keep_last", keep_last)
        self._anchor_every = require_count("anchor_every", anchor_every)
        self._base = RunBase(anchor, keep_base)
        self._metrics: dict[str, Any] = {}
        self._objects: tuple[Any, ...] = ()  # model, optimizer, scheduler, scaler
        self._pass: Pass | None = None
        self._checkpoint: dict[str, Any] | None = None  # to be restored; None once it is
        self._progress = Progress()
        self._ranks = Ranks()
        self._saved_step: int | None = None
        self._optimizer_stepped = False
        self._accumulates = False  # whether there was a batch without an optimizer's step
        self._boundary: Boundary | None = None  # the state after the last optimizer's step, in a loop that accumulates
        self._is_half_summed = False
        self._entered = False
        self._terminated = False
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        self._ranks = all_ranks()
        self._ranks.decide(self._prepare)
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._pass is not None:
                self._pass.close("the `with` block has ended")
            if kind is None:
                self._restore()
                self._save_last()
        finally:
            self._entered = False
            handler, self._previous_handler = self._previous_handler, None
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)
        if kind is None and self._terminated:
            raise SystemExit(_SIGTERM_EXIT_STATUS)

    def log(self, **metrics: Any) -> None:
        """Set metrics for the manifest of the next checkpoint; the last value of a name counts.

        Args:
            **metrics: Real numbers or tensors of one. A tensor is read when the checkpoint is written, so logging
                does not wait for an accelerator.

        Raises:
            ConfigError: A value is of another type.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                self._metrics[name] = value.detach().clone()
            elif isinstance(value, Real):
                self._metrics[name] = value
            else:
                raise ConfigError(name, "a number or a tensor of one element", repr(value)[:80], "Log one of these.")

    def steps(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield `(step, batch)` for one pass over a loader; the first call restores from the newest checkpoint.

        Args:
            loader: A DataLoader or another iterable that gives the same batches for the same random numbers.
            model: The model; it is saved and restored, as are the next three objects.
            optimizer: A checkpoint is written only after its `step()`; if there is none, after any batch.
            scheduler: An object with `state_dict`.
            scaler: A GradScaler.

        Returns:
            An iterator. Steps count from 1, through all passes. After a resume consumed batches are left out.

        Raises:
            ConfigError: The manager's `with` block is not entered, the model's base is not found, or the checkpoint
                does not fit this loader. The iterator raises it, too, if it is used after a later call has ended it.
            CorruptFileError: The model is not the one that was saved.
            UnsupportedError: The loader has `persistent_workers`, but is of a kind that cannot start new workers.
            SaveError: A checkpoint cannot be written; earlier ones are untouched.
        """
        if not self._entered:
            raise ConfigError("CheckpointManager.steps", "a call inside its `with` block", "one outside", "Enter it.")
        if self._pass is not None:
            self._pass.close("a later call of `steps` has begun another one")
        is_first = not self._objects
        self._objects = (model, optimizer, scheduler, scaler)
        if is_first:
            self._base.find(model)
            self._read_checkpoint()
        if not self._progress.passes_to_skip:
            self._restore()
        elif is_first and self._checkpoint is not None:
            # The loop may evaluate the model after a completed pass, which takes its weights. It may also add layers
            # between passes; then the state does not fit yet.
            with contextlib.suppress(CorruptFileError):
                load_module_state(model, self._checkpoint["model"])
            _mark_stepped(optimizer)
        self._pass = Pass(self._one_pass(loader))
        return self._pass

    def _one_pass(self, loader: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        progress = self._progress
        if progress.passes_to_skip:
            progress.passes_to_skip -= 1
            return
        self._is_half_summed = False
        _, optimizer, _, scaler = self._objects
        hook = self._on_optimizer_step
        with optimizer_step_hook(optimizer, hook) as is_watched, scaler_update_hook(scaler, hook):
            for batch in progress.batches(loader):
                self._optimizer_stepped = not is_watched
                try:
                    yield progress.step + 1, batch
                except GeneratorExit:
                    if self._optimizer_stepped:
                        progress.count_batch()
                    self._is_half_summed = self._accumulates and not self._optimizer_stepped
                    raise
                progress.count_batch()
                self._accumulates |= not self._optimizer_stepped
                if self._optimizer_stepped:
                    self._at_boundary()
        progress.count_pass()

    def _at_boundary(self) -> None:
        """Save if a checkpoint is due; called right after an optimizer's step, when no gradient is half summed."""
        self._boundary = Boundary.of(self._progress, self._objects[0]) if self._accumulates else None
        self._terminated = self._ranks.any(self._terminated)
        if self._terminated:
            self._save_if_new()
            raise SystemExit(_SIGTERM_EXIT_STATUS)
        if self._progress.step // self._every_steps > (self._saved_step or 0) // self._every_steps:
            self._save_if_new()

    def _prepare(self) -> None:
        with save_errors(self._root, "No checkpoint can be written there."):
            make_directories(self._root)
        collect_garbage(self._root)

    def _read_checkpoint(self) -> None:
        path = self._ranks.decide(lambda: latest(self._root))
        if path is None:
            return
        checkpoint = load_verified(Path(path))
        progress = Progress.resumed(path, checkpoint, self._ranks)
        self._checkpoint = {**checkpoint, "rng": progress.rng}
        self._progress, self._saved_step = progress, progress.step
        # If a process was killed after its last save, old checkpoints are still there, and no other save may follow.
        # All ranks meet first, so that none is still reading when the first rank removes checkpoints.
        self._ranks.gather(lambda: None)
        self._ranks.decide(lambda: self._remove_old(Path(path)))

    def _restore(self) -> None:
        """Load the state of the checkpoint into the objects, unless that was done already."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            give_checkpoint(checkpoint, *self._objects)

    def _save_last(self) -> None:
        """Save at the end of the loop; if a gradient is half summed, save the state before its batches."""
        if not self._is_half_summed:
            self._save_if_new()
        elif self._boundary is not None:
            self._save_if_new(self._boundary)
        elif self._progress.step > (self._saved_step or 0):
            reason = "the loop was left within the first gradient that it accumulated"
            newest = f"The newest one is of step {self._saved_step}" if self._saved_step else "There is none yet"
            warnings.warn(f"No checkpoint of step {self._progress.step}: {reason}. {newest}.", stacklevel=3)

    def _save_if_new(self, boundary: Boundary | None = None) -> None:
        """Save the present state, or the earlier state of a boundary, unless its step was saved already."""
        step = boundary.step if boundary else self._progress.step
        if not self._objects or step == (self._saved_step or 0):
            return
        states = self._ranks.gather(lambda: boundary.state if boundary else self._progress.state_bytes())
        self._ranks.decide(lambda: self._write(step, [*map(state_from_bytes, states)], boundary))
        self._saved_step = step

    def _write(self, step: int, states: Sequence[Mapping[str, Any]], boundary: Boundary | None) -> None:
        """Save this rank's model, optimizer, scheduler and scaler, and the progress of all ranks."""
        other_ranks = {"ranks": [*states[1:]]} if len(states) > 1 else {}
        extra = {"position": states[0]["position"], **other_ranks}
        checkpoint = build_checkpoint(*self._objects, step=step, extra=extra)
        if boundary:
            checkpoint["rng"] = states[0]["rng"]
            model = checkpoint["model"]
            model |= {name: buffer for name, buffer in boundary.buffers.items() if name in model}
        path = self._root / f"checkpoint-{step}"
        if path.is_dir() and not path.is_symlink():  # it is damaged, as `latest` passed it over
            remove_checkpoint(path)
        save_training_state(
            checkpoint,
            path,
            self._policy,
            anchor_every=self._anchor_every,
            base=self._base.choice,
            metrics={name: value if isinstance(value, int) else float(value) for name, value in self._metrics.items()},
        )
        self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        if self._keep_last is None:
            return
        # A checkpoint of a later step is damaged, else `latest` had chosen it. It is replaced when its step comes.
        directories = checkpoint_directories(self._root)
        older = [path for path in directories if checkpoint_step(path) < checkpoint_step(newest)]
        for path in older[self._keep_last - 1 :]:
            remove_checkpoint(path)

    def _on_optimizer_step(self, *_: Any) -> None:
        self._optimizer_stepped = True

    def _on_sigterm(self, *_: Any) -> None:
        self._terminated = True


def _mark_stepped(optimizer: Any) -> None:
    """Mark an optimizer as stepped, as it was in completed passes, so that its scheduler does not warn."""
    for owner in (optimizer, getattr(optimizer, "optimizer", None)):
        if owner is not None:
            owner._opt_called = True


@contextlib.contextmanager
def optimizer_step_hook(optimizer: Any, hook: Callable[..., None]) -> Iterator[bool]:
    """Call a hook after every `optimizer.step()` in a block; yield whether it, or the one that it wraps, has hooks."""
    register = getattr(getattr(optimizer, "optimizer", optimizer), "register_step_post_hook", None)
    with register(hook) if register else contextlib.nullcontext():  # a handle removes its hook when its block ends
        yield register is not None


@contextlib.contextmanager
def scaler_update_hook(scaler: Any, hook: Callable[[], None]) -> Iterator[None]:
    """Call a hook after every `scaler.update()` in a block, if there is a scaler.

    A GradScaler that finds an infinite gradient skips `optimizer.step()` and calls only `update`. It supports no hooks,
    so the method of this object is replaced until the block ends.
    """
    update = getattr(scaler, "update", None)
    if update is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        hook()

    scaler.update = watched
    try:
        yield
    finally:
        scaler.update = update
