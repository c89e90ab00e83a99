"""Whole encoders in float32: how fast each method embeds, and how near to the float32 model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.encoder_methods import FLOAT, Encode, EncoderMethod, MakeEncode
from benchmarks.speed.encoder_models import Encoder, Inputs, pooled
from benchmarks.speed.methods import guarded
from benchmarks.speed.rounds import Run, interleave, repeats_for, significant, timed

Row = dict[str, Any]


def speed(
    encoders: Sequence[Encoder],
    methods: Sequence[EncoderMethod],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
    failures: dict[str, str],
    known: Sequence[Row] = (),
) -> Iterator[Row]:
    """Time encoders, each method with nothing but the float32 model beside it, by turns.

    Args:
        encoders: What is timed.
        methods: What is compared with the float32 model.
        threads: Numbers of torch threads, one after the other.
        rounds: Interleaved rounds.
        seconds: Roughly how long a method takes in a round; at least one call.
        failures: Filled with what could not run, and why.
        known: Rows of a run that was interrupted. Of a method and encoder that they hold nothing is measured again.

    Yields:
        A row for each encoder, method, number of threads and shape of inputs, the rows of one method and encoder at
        once. `cosine` is the mean over texts or images of the cosine of their embedding to the float32 model's.
    """
    done = {(row["encoder"], row["name"]) for row in known}
    for encoder in encoders:
        with tempfile.TemporaryDirectory() as directory:
            for method in methods:
                if (encoder.name, method.name) not in done:
                    name = f"{encoder.name}, {method.name}"
                    yield from (
                        guarded(failures, name, _time, encoder, method, Path(directory), threads, rounds, seconds) or []
                    )
    torch.set_num_threads(1)


@torch.no_grad()
def _time(
    encoder: Encoder, method: EncoderMethod, folder: Path, threads: Sequence[int], rounds: int, seconds: float
) -> list[Row]:
    torch.set_num_threads(1)
    compared, shapes = encoder.compared(), encoder.inputs()
    makers = [each.prepare(encoder.build(), compared, folder) for each in (FLOAT, method)]
    cosine = _cosine(makers, compared)
    rows: list[Row] = []
    for count in threads:
        torch.set_num_threads(count)
        encodes = [make() for make in makers]
        for shape, inputs in shapes.items():
            runs = {
                each.name: _run(encode, inputs, seconds) for each, encode in zip((FLOAT, method), encodes, strict=True)
            }
            baseline, taken = interleave(runs, rounds, FLOAT.name)
            where = {"encoder": encoder.name, "threads": count, "shape": shape}
            rows.append({**where, **taken, "float_seconds": baseline["seconds"], "cosine": cosine})
    return rows


def _cosine(makers: Sequence[MakeEncode], inputs: Inputs) -> float:
    first, second = (pooled(make()(inputs), inputs) for make in makers)
    return significant((first * second).sum(dim=1).mean().item())


def _run(encode: Encode, inputs: Inputs, seconds: float) -> Run:
    @torch.inference_mode()
    def call(_: int) -> Tensor:
        return encode(inputs)

    return timed(call, repeats_for(call, seconds, at_most=100))
