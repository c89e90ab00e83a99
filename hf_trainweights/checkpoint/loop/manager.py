"""`CheckpointManager`: saves a training loop, and resumes it exactly where it stopped."""

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
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, checkpoint_step
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, RunBase, require_count
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.atomic import make_directories, save_errors

_SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM


class CheckpointManager:
    """Saves a training loop to `root/checkpoint-<step>` and restores it from the newest one that is whole.

    A step is one batch. A checkpoint is due every `every_steps` of them and is written right after the next
    `optimizer.step()`, also one that a GradScaler skips, so with gradient accumulation no gradient is half summed in
    it. One more is written when the `with` block ends without an exception, and on SIGTERM, after which the process
    exits with status 143. A step counts as done when the loop asks for the next one, or is left by `break` after
    `optimizer.step()`. A loop that accumulates gradients and is left by `break` between two `optimizer.step()` is saved
    as it was after the first of them; that is exact if its scheduler steps with the optimizer.

    Resuming is exact: batches come in the same order, because the random number generators are put back to where they
    were when the pass over the loader began, its consumed batches are skipped, and they are then set as they were at
    the save. They are Python's, numpy's and torch's on CPU and CUDA; those of MPS and XPU are not saved.

    A loop over several passes calls `steps` once for each, one after the other. Passes that are done yield nothing. The
    loop repeats its work between them, such as a scheduler's step or adding a group of parameters. So optimizer,
    scheduler and scaler are restored when the first pass begins that is not done, over all of that. The model has the
    weights of the checkpoint from the first call on. A loop whose passes are all done has the rest when it leaves the
    block. A DataLoader with `persistent_workers` starts new workers for each pass.

    Where `torch.distributed` is initialized, as for DDP, every rank runs the same loop with the same arguments. The
    first rank writes and removes checkpoints for all of them; each rank gets its own random number generators and its
    own place in its loader back. A run resumes on as many ranks as it was saved on.

    Args:
        root: Directory of this run alone; it is created. One process writes to it at a time.
        mode: A mode of `Policy`: "lossless", "near-lossless" or "compact".
        rules: Rules of `Policy`, for what should be stored otherwise.
        every_steps: Steps between two checkpoints, at least 1.
        keep_last: How many checkpoints to keep, at least 1; None keeps all.
        anchor_every: The most checkpoints whose weights are stored against the same anchor, at least 1.
        anchor: Weights outside the run that its first checkpoint is stored against: `"base"` for those that the model
            was loaded from by `from_pretrained`, or a directory or file of weights.
        keep_base: Keep those weights in the run, linked or copied, so that it needs nothing outside.

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
        self._parts: tuple[Any, ...] = ()  # model, optimizer, scheduler, scaler
        self._pass: Pass | None = None
        self._checkpoint: dict[str, Any] | None = None  # the one to be restored, until it is
        self._progress = Progress()
        self._ranks = Ranks()
        self._saved_step: int | None = None
        self._optimizer_stepped = False
        self._accumulates = False  # whether some batch has gone by without an optimizer's step
        self._boundary: Boundary | None = None  # the last optimizer's step, as long as there are batches after it
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
        """Remember values for the manifest of the next checkpoint; the last value of a name counts.

        Args:
            **metrics: Real numbers or tensors of one. A tensor is read when the checkpoint is written, so logging
                does not wait for an accelerator.

        Raises:
            ConfigError: A value is neither.
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
            model: Saved and restored, as the following.
            optimizer: One whose `step()` marks where a checkpoint may be written; without it, anywhere.
            scheduler: With `state_dict`.
            scaler: A GradScaler.

        Returns:
            An iterator. Steps count from 1, through all passes. Batches that were consumed before are left out.

        Raises:
            ConfigError: The manager's `with` block is not entered, the model's base is not found, or a resume cannot go
                on from the checkpoint with this loader. Also when a pass goes on that a later call has ended.
            CorruptFileError: The model is not the one that was saved.
            UnsupportedError: The loader has `persistent_workers`, and it is of a kind that cannot start new ones.
            SaveError: A checkpoint cannot be written; earlier ones are untouched.
        """
        if not self._entered:
            raise ConfigError("CheckpointManager.steps", "a call inside its `with` block", "one outside", "Enter it.")
        if self._pass is not None:
            self._pass.close("a later call of `steps` has begun another one")
        first = not self._parts
        self._parts = (model, optimizer, scheduler, scaler)
        if first:
            self._base.find(model)
            self._read_checkpoint()
        if not self._progress.passes_to_skip:
            self._restore()
        elif first and self._checkpoint is not None:
            # The loop may evaluate the model after a pass that is done; it may also have layers to add before they fit.
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
        _, optimizer, _, scaler = self._parts
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
        """Save if that is due, between two steps and with no gradient half summed."""
        self._boundary = Boundary.of(self._progress, self._parts[0]) if self._accumulates else None
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
        # A process that was killed after its last save has not come to this, and there may be no save any more.
        # No rank reads the checkpoint any more when the first one removes others.
        self._ranks.gather(lambda: None)
        self._ranks.decide(lambda: self._remove_old(Path(path)))

    def _restore(self) -> None:
        """Put the state of the checkpoint into the objects, once."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            give_checkpoint(checkpoint, *self._parts)

    def _save_last(self) -> None:
        """Save when the loop is over: a gradient that it has half summed is left out, with its batches."""
        if not self._is_half_summed:
            self._save_if_new()
        elif self._boundary is not None:
            self._save_if_new(self._boundary)
        elif self._progress.step > (self._saved_step or 0):
            left = "the loop was left within the first gradient that it accumulated"
            newest = f"The newest one is of step {self._saved_step}" if self._saved_step else "There is none yet"
            warnings.warn(f"No checkpoint of step {self._progress.step}: {left}. {newest}.", stacklevel=3)

    def _save_if_new(self, boundary: Boundary | None = None) -> None:
        """Save the present state, or that of a boundary behind it."""
        step = boundary.step if boundary else self._progress.step
        if not self._parts or step == (self._saved_step or 0):
            return
        states = self._ranks.gather(lambda: boundary.state if boundary else self._progress.state_bytes())
        self._ranks.decide(lambda: self._write(step, [*map(state_from_bytes, states)], boundary))
        self._saved_step = step

    def _write(self, step: int, states: Sequence[Mapping[str, Any]], boundary: Boundary | None) -> None:
        """Save what this rank has of the model, and the states of all ranks."""
        others = {"ranks": [*states[1:]]} if len(states) > 1 else {}
        checkpoint = build_checkpoint(*self._parts, step=step, extra={"position": states[0]["position"], **others})
        if boundary:
            checkpoint["rng"] = states[0]["rng"]
            model = checkpoint["model"]
            model |= {name: each for name, each in boundary.buffers.items() if name in model}
        path = self._root / f"checkpoint-{step}"
        if path.is_dir() and not path.is_symlink():  # `latest` passed it over: it is broken
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
        # One with a higher number is broken, or `latest` had chosen it; it is replaced when its step comes.
        directories = checkpoint_directories(self._root)
        older = [path for path in directories if checkpoint_step(path) < checkpoint_step(newest)]
        for path in older[self._keep_last - 1 :]:
            remove_checkpoint(path)

    def _on_optimizer_step(self, *_: Any) -> None:
        self._optimizer_stepped = True

    def _on_sigterm(self, *_: Any) -> None:
        self._terminated = True


def _mark_stepped(optimizer: Any) -> None:
    """Keep a scheduler from the warning that its optimizer has not stepped: in the passes that are done it has."""
    for owner in (optimizer, getattr(optimizer, "optimizer", None)):
        if owner is not None:
            owner._opt_called = True


@contextlib.contextmanager
def optimizer_step_hook(optimizer: Any, hook: Callable[..., None]) -> Iterator[bool]:
    """Call a hook after every `optimizer.step()` of a block; yield whether it, or what it wraps, takes hooks."""
    register = getattr(getattr(optimizer, "optimizer", optimizer), "register_step_post_hook", None)
    with register(hook) if register else contextlib.nullcontext():  # a handle removes its hook when its block ends
        yield register is not None


@contextlib.contextmanager
def scaler_update_hook(scaler: Any, hook: Callable[[], None]) -> Iterator[None]:
    """Call a hook after every `scaler.update()` of a block, if there is a scaler.

    A GradScaler that finds an infinite gradient skips `optimizer.step()`, and `update` is all that tells of it. It
    takes no hooks, so its method is replaced in this one object until the block ends.
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
