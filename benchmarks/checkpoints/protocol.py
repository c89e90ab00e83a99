"""How small the checkpoints of a run become, and how a run goes on from them.

A plain run is the yardstick. Its checkpoints are made small in their order, as the callback would have done. From the
one at `resume_at` new processes resume: stored without an anchor, as the first delta to one, as a late delta of the
run, and five times in a row. They are compared with the run that was not interrupted; so is one that resumes from
weights that are off by one unit in the last place, because what training makes of that no coder can avoid.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors

from benchmarks.checkpoints.runs import MINILM, NAMES_FILE, RUNS, SAVES, STEPS_AFTER, Course, train
from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.manifest import Manifest
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME

PLAIN_WEIGHTS_NAME = "model.safetensors"
MODES = ("lossless", "near-lossless", "compact")
LOSSY_MODES = MODES[1:]
# What people take who quantize their checkpoints: 8-bit weights and first moments. A linear second moment is refused.
INT8 = {"format": "int8", "group_size": 64}
INT8_RULES = {"weight": INT8, "exp_avg": INT8}

CHAIN_RESUMES = 5
CHAIN_STEPS = 10
# The last link is followed further than to its own save.
CHAIN_STEPS_AFTER = 20

_BF16_STEPS = 20
# Measured with the first seed only.
_ONE_SEED = 0


# The keys that lead to a finding, and what finds it once the uninterrupted run is there.
Piece = tuple[tuple[str, ...], Callable[[], Any]]


@dataclass(frozen=True)
class Experiment:
    """One run with one seed, and the directory that it has for itself.

    Args:
        name: A name in `RUNS`.
        seed: Its seed.
        root: Where experiments lie.
    """

    name: str
    seed: int
    root: Path

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self.root / f"{self.name}-{self.seed}"

    @property
    def plain(self) -> Path:
        """The run that was not interrupted."""
        return self.directory / "plain"

    @property
    def save_steps(self) -> int:
        """Steps between two checkpoints."""
        return RUNS[self.name].save_steps

    @property
    def steps(self) -> list[int]:
        """Where it saves."""
        return [self.save_steps * (i + 1) for i in range(SAVES)]

    @property
    def first(self) -> int:
        """The step of the first checkpoint that has an anchor."""
        return self.steps[1]

    @property
    def followed(self) -> tuple[int, ...]:
        """The steps of the checkpoints that others resume from."""
        return self.steps[0], self.first, self.resume_at

    @property
    def resume_at(self) -> int:
        """The step of the checkpoint that others resume from."""
        return RUNS[self.name].resume_at

    def require(self, steps: Collection[int]) -> None:
        """Train the uninterrupted run unless its losses and these checkpoints are there from an earlier call."""
        if self._course_file.exists() and all(self.checkpoint(step).exists() for step in steps):
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        evaluate_at = {step + after for step in self.followed for after in (0, STEPS_AFTER)}
        evaluate_at |= {self.resume_at + (CHAIN_RESUMES - 1) * CHAIN_STEPS}
        course = in_new_process(
            train, RUNS[self.name], self.seed, self.plain, save_steps=self.save_steps, evaluate_at=evaluate_at
        )
        content = [list(course.losses.items()), list(course.held_out.items())]
        self._course_file.write_text(json.dumps(content), encoding="utf-8")

    @property
    def _course_file(self) -> Path:
        return self.directory / "course.json"

    @cached_property
    def course(self) -> Course:
        """What was measured on the uninterrupted run."""
        losses, held_out = json.loads(self._course_file.read_text(encoding="utf-8"))
        return Course(dict(losses), dict(held_out))

    def held_out(self) -> dict[int, float]:
        """Return the held-out loss after some steps."""
        return {step: self.course.held_out[step] for step in sorted(self.course.held_out)}

    def checkpoint(self, step: int, directory: str = "plain") -> Path:
        """Return where a checkpoint is."""
        return self.directory / directory / f"checkpoint-{step}"

    def copy(self, step: int, directory: str) -> Path:
        """Copy a plain checkpoint to another directory and return where it is."""
        target = self.checkpoint(step, directory)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.checkpoint(step), target)
        return target

    def compress(self, path: Path, **options: Any) -> Manifest:
        """Make a checkpoint small as the callback would."""
        # The models have no buffers in their files.
        return compress_directory(path, optimizer_names=self.parameter_names(), buffers=(), **options)

    def parameter_names(self) -> dict[int, str]:
        """Return the names of the optimizer's parameters by their index."""
        names = json.loads((self.plain / NAMES_FILE).read_text(encoding="utf-8"))
        return {int(index): name for index, name in names.items()}


def in_new_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function returns in a process of its own, with Transformers imported and nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoints.runs"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def measure(experiment: Experiment) -> Iterator[Piece]:
    """Yield what finds ratios and fidelity of one run with one seed."""
    step = experiment.resume_at
    follow_it = partial(follow, experiment)
    yield ("held_out",), experiment.held_out
    yield ("checkpoints",), lambda: {mode: compress_run(experiment, mode) for mode in MODES}
    yield ("lossless_alone",), partial(compress_alone, experiment, "alone", "lossless")
    yield ("int8_groups",), partial(compress_alone, experiment, "int8", "lossless", INT8_RULES)
    if experiment.name == "lm":
        yield ("bf16",), partial(measure_bf16, experiment)
    yield ("exact",), partial(is_exact_after_lossless, experiment)
    yield ("fidelity", "1 ulp", "first"), partial(follow_neighbours, experiment, step)
    for mode in LOSSY_MODES:
        yield ("fidelity", mode, "alone"), partial(follow_alone, experiment, mode)
        yield ("fidelity", mode, "first"), partial(follow_first, experiment, mode)
        yield ("fidelity", mode, "late"), partial(follow_it, experiment.checkpoint(step, mode))
        yield ("fidelity", mode, "chain"), partial(follow_chain, experiment, mode)
    if experiment.seed == _ONE_SEED:
        yield ("fidelity", "int8 groups", "first"), partial(follow_it, experiment.checkpoint(step, "int8"))
        for point, early in (("first save", experiment.steps[0]), ("early", experiment.first)):
            yield ("fidelity", "1 ulp", point), partial(follow_neighbours, experiment, early)
            for mode in LOSSY_MODES:
                yield ("fidelity", mode, point), partial(follow_it, experiment.checkpoint(early, mode))


def measure_with_base(experiment: Experiment) -> Iterator[Piece]:
    """Yield what finds the same of a fine-tune whose checkpoints are stored against the model that it began with."""
    for mode in MODES:
        yield ("checkpoints", mode), partial(compress_run, experiment, mode, f"base-{mode}", anchor=MINILM)
    for mode in LOSSY_MODES:
        for name, step in (("first", experiment.steps[0]), ("late", experiment.resume_at)):
            # It finds the base for a process that resumes.
            callback = TrainWeightsCheckpointCallback(mode=mode, anchor=MINILM)
            checkpoint = experiment.checkpoint(step, f"base-{mode}")
            yield ("fidelity", mode, name), partial(follow, experiment, checkpoint, callback)


def compress_run(
    experiment: Experiment, mode: str, directory: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Make every checkpoint of the run small, one after the other, and return the sizes."""
    directory = directory or mode
    # A checkpoint of an earlier call would be an anchor.
    shutil.rmtree(experiment.directory / directory, ignore_errors=True)
    rows = []
    for step in experiment.steps:
        path = experiment.copy(step, directory)
        plain_bytes = size_bytes(path)
        manifest = experiment.compress(path, mode=mode, **options)
        has_anchor = bool(manifest.files[WEIGHTS_NAME].report["anchor"])
        rows.append({"step": step, "is_anchor": not has_anchor, **sizes_of(path, plain_bytes, manifest)})
    return rows


def compress_alone(
    experiment: Experiment, directory: str, mode: str, rules: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Make the checkpoint at `resume_at` small without an anchor, and return its size."""
    shutil.rmtree(experiment.directory / directory, ignore_errors=True)
    path = experiment.copy(experiment.resume_at, directory)
    plain_bytes = size_bytes(path)
    manifest = experiment.compress(path, mode=mode, rules=rules)
    return {"step": experiment.resume_at, **sizes_of(path, plain_bytes, manifest)}


def sizes_of(path: Path, plain_bytes: int, manifest: Manifest) -> dict[str, Any]:
    """Return plain and stored bytes of a checkpoint, and the bits per element of each role."""
    tensors = [tensor for entry in manifest.files.values() for tensor in entry.report.get("tensors", ())]
    bits = {}
    for role in ("weight", "exp_avg", "exp_avg_sq"):
        of_role = [tensor for tensor in tensors if tensor["role"] == role]
        stored = sum(tensor["bytes_out"] for tensor in of_role)
        bits[role] = round(stored / sum(tensor["bytes_in"] for tensor in of_role), 4)
    return {"plain_bytes": plain_bytes, "stored_bytes": size_bytes(path), "stored_share": bits}


def size_bytes(path: Path) -> int:
    """Return the size of a checkpoint's weights and optimizer; a link to an anchor is no new data."""
    files = (path / name for name in (PLAIN_WEIGHTS_NAME, WEIGHTS_NAME, OPTIMIZER_NAME))
    return sum(file.stat().st_size for file in files if file.exists())


def begin_anchor(experiment: Experiment, mode: str) -> Path:
    """Make the checkpoint at `resume_at` small as the first delta to the one before it, and return where it is."""
    directory = f"first-{mode}"
    shutil.rmtree(experiment.directory / directory, ignore_errors=True)
    for step in (experiment.resume_at - experiment.save_steps, experiment.resume_at):
        experiment.compress(experiment.copy(step, directory), mode=mode)
    return experiment.checkpoint(experiment.resume_at, directory)


def follow_alone(experiment: Experiment, mode: str) -> dict[str, Any]:
    """Resume from the checkpoint at `resume_at`, stored without an anchor."""
    compress_alone(experiment, f"alone-{mode}", mode)
    return follow(experiment, experiment.checkpoint(experiment.resume_at, f"alone-{mode}"))


def follow_first(experiment: Experiment, mode: str) -> dict[str, Any]:
    """Resume from the checkpoint at `resume_at`, stored as the first delta."""
    return follow(experiment, begin_anchor(experiment, mode))


def follow_neighbours(experiment: Experiment, step: int) -> dict[str, Any]:
    """Resume from weights that are off by one unit in the last place."""
    return follow(experiment, perturb(experiment, step))


def perturb(experiment: Experiment, step: int) -> Path:
    """Copy a plain checkpoint, each weight to a neighbouring number, and return where it is."""
    path = experiment.copy(step, "ulp")
    generator = torch.Generator().manual_seed(experiment.seed)
    weights = load_safetensors(path / PLAIN_WEIGHTS_NAME)
    for name, weight in weights.items():
        upwards = torch.rand(weight.shape, generator=generator) < 0.5
        weights[name] = torch.nextafter(weight, torch.where(upwards, torch.inf, -torch.inf))
    save_safetensors(weights, path / PLAIN_WEIGHTS_NAME, metadata={"format": "pt"})
    return path


def is_exact_after_lossless(experiment: Experiment) -> bool:
    """Resume from a lossless checkpoint and tell whether the next one is that of the uninterrupted run, bit for bit."""
    step, after = experiment.resume_at, experiment.resume_at + experiment.save_steps
    directory = experiment.directory / "resumed"
    course = in_new_process(
        train,
        RUNS[experiment.name],
        experiment.seed,
        directory,
        resume_from=experiment.checkpoint(step, "lossless"),
        stop=after,
        save_steps=experiment.save_steps,
    )
    resumed, straight = directory / f"checkpoint-{after}", experiment.checkpoint(after)
    same = equal(load_safetensors(resumed / PLAIN_WEIGHTS_NAME), load_safetensors(straight / PLAIN_WEIGHTS_NAME))
    same &= equal(*(torch.load(path / OPTIMIZER_NAME, weights_only=True) for path in (resumed, straight)))
    same &= all(loss == experiment.course.losses[at] for at, loss in course.losses.items())
    return same and len(course.losses) == experiment.save_steps


def equal(left: Any, right: Any) -> bool:
    """Tell whether two trees are alike, bit for bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def follow(experiment: Experiment, checkpoint: Path, *callbacks: TrainWeightsCheckpointCallback) -> dict[str, Any]:
    """Resume from a small checkpoint and compare with the uninterrupted run."""
    step = int(checkpoint.name.rpartition("-")[2])
    course = in_new_process(
        train,
        RUNS[experiment.name],
        experiment.seed,
        experiment.directory / "resumed",
        resume_from=checkpoint,
        stop=step + STEPS_AFTER,
        evaluate_at=[step + STEPS_AFTER],
        callbacks=callbacks,
    )
    return compare(course, experiment.course, step, step + STEPS_AFTER)


def follow_chain(experiment: Experiment, mode: str) -> dict[str, Any]:
    """Resume several times, each time from what the last resumed run saved through the callback; compare the end."""
    step = experiment.resume_at
    directory = begin_anchor(experiment, mode).parent
    for _ in range(CHAIN_RESUMES - 1):
        in_new_process(
            train,
            RUNS[experiment.name],
            experiment.seed,
            directory,
            resume_from=directory / f"checkpoint-{step}",
            stop=step + CHAIN_STEPS,
            save_steps=CHAIN_STEPS,
            callbacks=[TrainWeightsCheckpointCallback(mode=mode)],
        )
        step += CHAIN_STEPS
    course = in_new_process(
        train,
        RUNS[experiment.name],
        experiment.seed,
        directory,
        resume_from=directory / f"checkpoint-{step}",
        stop=step + CHAIN_STEPS_AFTER,
    )
    return compare(course, experiment.course, step, step + CHAIN_STEPS_AFTER)


def compare(course: Course, exact: Course, step: int, stop: int) -> dict[str, Any]:
    """Return how far losses are from those of the uninterrupted run."""
    differences = [course.losses[at] - exact.losses[at] for at in range(step + 1, stop + 1)]
    found: dict[str, Any] = {
        "step": step,
        "mean_absolute_difference": math.fsum(map(abs, differences)) / len(differences),
        "max_absolute_difference": max(map(abs, differences)),
        "bias": math.fsum(differences) / len(differences),
        "held_out_at_restore": course.held_out[step] - exact.held_out[step],
        "differences": [round(difference, 6) for difference in differences],
    }
    if stop in course.held_out:
        found["held_out_after"] = course.held_out[stop] - exact.held_out[stop]
    return found


def measure_bf16(experiment: Experiment) -> dict[str, Any]:
    """Go on in pure bfloat16 from the middle of the run and make two checkpoints of that small, exactly."""
    start = experiment.resume_at
    directory = experiment.directory / "bf16"
    stop = start + 3 * _BF16_STEPS
    shutil.rmtree(directory, ignore_errors=True)
    in_new_process(
        train,
        RUNS[experiment.name],
        experiment.seed,
        directory,
        resume_from=experiment.checkpoint(start),
        stop=stop,
        save_steps=_BF16_STEPS,
        bf16_weights=True,
    )
    rows = []
    for step in range(stop - _BF16_STEPS, stop + 1, _BF16_STEPS):
        path = directory / f"checkpoint-{step}"
        plain_bytes = size_bytes(path)
        rows.append({"step": step, **sizes_of(path, plain_bytes, experiment.compress(path))})
    return {"alone": rows[0], "with_anchor": rows[1]}


def discard(experiment: Experiment) -> None:
    """Remove what an experiment wrote; of the first seed stays what the other parts need."""
    kept = experiment.steps[:2] if experiment.seed == 0 else []
    for path in experiment.directory.glob("*"):
        if path.is_dir() and path != experiment.plain:
            shutil.rmtree(path)
    for path in experiment.plain.glob("checkpoint-*"):
        if path not in map(experiment.checkpoint, kept):
            shutil.rmtree(path)
