"""A whole model: a token at a time, a prompt at once, and `generate` as a user would time it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.speed.methods import Method, guarded
from benchmarks.speed.models import load
from benchmarks.speed.rounds import Run, clock, interleave
from hf_trainweights.models.host.models import cache_argument

PROMPT_TOKENS = 16
PREFILL_TOKENS = 256
GENERATED_TOKENS = 16
# What torch.compile is given.
COMPILATIONS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "default": {},
    "max-autotune": {"mode": "max-autotune"},
    "freezing": {"options": {"freezing": True}},
    "cpp_wrapper": {"options": {"cpp_wrapper": True}},
}
EAGER = {"eager": None}
RELOADED_COMPILATIONS = {name: COMPILATIONS[name] for name in ("eager", "max-autotune")}


def speed(
    path: Path,
    methods: Sequence[Method],
    threads: Sequence[int],
    rounds: int,
    failures: dict[str, str],
    known: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Time decoding and prefill of a model, each method with nothing but the float model beside it.

    The more models a process holds, the slower each of them decodes.

    Args:
        path: The saved float model.
        methods: What is compared.
        threads: Numbers of torch threads, one after the other.
        rounds: Interleaved rounds.
        failures: Filled with what could not run, and why.
        known: Rows that a run measured before it was interrupted.

    Yields:
        One row per number of threads, phase and method, as soon as a method is measured.
    """
    measured = {row["name"] for row in known}
    for versus in dict.fromkeys(method.versus for method in methods):
        baseline, *others = (method for method in methods if method.versus == versus)
        for other in others:
            if other.name not in measured:
                taken = _speed_of_pair(path, baseline, other, threads, rounds, failures)
                yield from (row for row in taken if other is others[0] or row["name"] != baseline.name)


def _speed_of_pair(
    path: Path, baseline: Method, other: Method, threads: Sequence[int], rounds: int, failures: dict[str, str]
) -> list[dict[str, Any]]:
    loaded = {method.name: guarded(failures, method.name, load, path, method) for method in (baseline, other)}
    models = {name: model for name, model in loaded.items() if model is not None}
    rows: list[dict[str, Any]] = []
    for count in threads:
        torch.set_num_threads(count)
        for phase, make in PHASES.items():
            made = {name: guarded(failures, name, make, model) for name, model in models.items()}
            runs = {name: run for name, run in made.items() if run is not None}
            taken = interleave(runs, rounds, baseline.name)
            rows += [{"threads": count, "phase": phase, **row} for row in taken]
    torch.set_num_threads(1)
    return rows


def _tokens(model: PreTrainedModel, count: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


def _decode(model: PreTrainedModel) -> Run:
    """Return a run that decodes a few tokens and returns the seconds of one."""
    seconds_per_token = _decode_some(model, 2)
    # A method that dequantizes at every step would otherwise take most of the time of the benchmark.
    count = max(2, min(GENERATED_TOKENS, int(1.5 / seconds_per_token)))
    return lambda: _decode_some(model, count)


@torch.inference_mode()
def _decode_some(model: PreTrainedModel, count: int) -> float:
    name = cache_argument(model)
    result = model(_tokens(model, PROMPT_TOKENS), use_cache=True, logits_to_keep=1)
    start = clock()
    for _ in range(count):
        token = result.logits[:, -1:].argmax(dim=-1)
        result = model(token, **{name: result[name]}, use_cache=True)
    return (clock() - start) / count


def _prefill(count: int, model: PreTrainedModel) -> Run:
    """Return a run that reads a prompt of so many tokens and returns the seconds of it."""
    tokens = _tokens(model, count)

    @torch.inference_mode()
    def run() -> float:
        start = clock()
        model(tokens, use_cache=True, logits_to_keep=1)
        return clock() - start

    run()
    return run


# What is timed of a model: how a run is made from it, which returns the seconds.
PHASES: dict[str, Callable[[PreTrainedModel], Run]] = {
    "decode": _decode,
    "short prompt": partial(_prefill, PROMPT_TOKENS),
    "prefill": partial(_prefill, PREFILL_TOKENS),
}


def generate(path: Path, methods: Sequence[Method], compiled: bool, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Time `generate` the way users do: 5 warm-ups, then the mean of `torch.utils.benchmark`'s blocked_autorange.

    Args:
        path: The saved float model, which is the baseline.
        methods: The float model first, and formats of this package.
        compiled: Whether also under `torch.compile`, in several settings, which takes minutes.
        failures: Filled with what could not run, and why.

    Returns:
        One row per method, whether it was reloaded from disk, and setting.
    """
    runs: dict[str, Run] = {}
    about: dict[str, dict[str, Any]] = {}
    # Each model and setting is one more version of the same compiled function.
    with torch._dynamo.config.patch(recompile_limit=64):
        for method in methods:
            for model, reloaded in _fresh_and_reloaded(path, method, failures):
                settings = COMPILATIONS if compiled and not reloaded else RELOADED_COMPILATIONS if compiled else EAGER
                for setting, options in settings.items():
                    name = f"{method.name}{', reloaded' * reloaded}, {setting}"
                    run = guarded(failures, name, _generate, model, options)
                    if run is not None:
                        runs[name] = run
                        about[name] = {"method": method.name, "reloaded": reloaded, "setting": setting}
        rows = interleave(runs, 3, next(iter(runs)))
    return [{**about[row["name"]], **row} for row in rows]


def _fresh_and_reloaded(path: Path, method: Method, failures: dict[str, str]) -> list[tuple[PreTrainedModel, bool]]:
    fresh = guarded(failures, method.name, load, path, method)
    if fresh is None or method.config is None:
        return [(fresh, False)] if fresh is not None else []
    with tempfile.TemporaryDirectory() as directory:
        fresh.save_pretrained(directory)
        reloaded = AutoModelForCausalLM.from_pretrained(directory, dtype=method.dtype).eval()
    return [(fresh, False), (reloaded, True)]


def _generate(model: PreTrainedModel, compilation: dict[str, Any] | None) -> Run:
    options: dict[str, Any] = {"max_new_tokens": GENERATED_TOKENS, "min_new_tokens": GENERATED_TOKENS}
    forward = model.forward
    if compilation is not None:
        forward = torch.compile(type(model).forward.__get__(model), **compilation)
        # A static cache keeps shapes, so that one compilation serves every token.
        options["cache_implementation"] = "static"
    tokens = _tokens(model, PROMPT_TOKENS)

    @torch.inference_mode()
    def call() -> None:
        plain, model.forward = model.forward, forward
        try:
            model.generate(tokens, do_sample=False, **options)
        finally:
            model.forward = plain

    timer = Timer("call()", globals={"call": call})
    timer.timeit(5)
    return lambda: timer.blocked_autorange(min_run_time=0.5).mean
