"""Programs of odd modules: PyTorch computes with them what the dequantized module computes. And damaged ONNX files."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_trainweights import dequantize_, export_program, export_torchscript
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.exports import OnnxModel, export_onnx
from tests.fuzz.directories import read_tree
from tests.fuzz.mutate_bytes import damage
from tests.fuzz.target import BrokenPromiseError, Outcome, Target
from tests.fuzz.targets.onnx_exports import OnnxExport, OnnxExports, built

_EARLIER = b"an earlier program"


@dataclass(frozen=True)
class ProgramExport:
    """A module to export.

    Args:
        module: It, as for the ONNX exports.
        kind: Which export writes it.
    """

    module: OnnxExport
    kind: str


class ProgramExports(Target):
    """A program computes what the dequantized module computes, or the export is refused and leaves what was there."""

    name = "program-exports"
    limit_seconds = 60.0
    inputs_in_suite = 40

    def mutate(self, rng: random.Random) -> ProgramExport:
        return ProgramExport(OnnxExports.mutate(self, rng), rng.choice(("trace", "trace", "script", "pt2")))  # type: ignore[arg-type]

    def run(self, given: ProgramExport) -> Outcome:
        model, ids = built(given.module), torch.arange(10).view(2, 5) % given.module.vocab
        out = self.directory / "out" / f"model.{'pt2' if given.kind == 'pt2' else 'pt'}"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        before = {out.name: _EARLIER} if given.module.over else {}
        for name, content in before.items():
            (out.parent / name).write_bytes(content)
        try:
            if given.kind == "pt2":
                export_program(model, out, ids)
            else:
                export_torchscript(model, out, ids, method=given.kind)
        except TrainWeightsError as error:
            if read_tree(out.parent) != before:
                raise BrokenPromiseError("a refused export has changed the directory") from error
            raise
        read = torch.export.load(out).module() if given.kind == "pt2" else torch.jit.load(out)
        dequantize_(model)
        with torch.no_grad():
            found, wanted = read(ids.flip(0)), model(ids.flip(0))
        rounding = 1e-5 if wanted.dtype is torch.float32 else 0.02
        difference = (found - wanted).abs().max()
        if found.dtype != wanted.dtype or not difference <= 1e-6 + rounding * wanted.abs().max():
            raise BrokenPromiseError(f"the program computes something else: off by {difference}")
        return Outcome.ACCEPTED


class OnnxFiles(Target):
    """A damaged ONNX file runs or is refused by name."""

    name = "onnx-files"
    inputs_in_suite = 200

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.files = []
        for seed, runtime in enumerate(("portable", "onnxruntime", "portable")):
            given = OnnxExports.mutate(self, random.Random(f"onnx {seed}"))  # type: ignore[arg-type]
            self.vocab = given.vocab
            path = directory / f"{seed}.onnx"
            ids = torch.arange(10).view(2, 5) % 8
            export_onnx(
                built(given).float(), path, example_inputs=ids, runtime=runtime, verify=False, external_data=False
            )
            self.files.append(path.read_bytes())

    def mutate(self, rng: random.Random) -> bytes:
        return damage(rng, rng.choice(self.files), rng.choice(self.files))

    def run(self, given: bytes) -> Outcome:
        path = self.directory / "damaged.onnx"
        path.write_bytes(given)
        OnnxModel(path, ["CPUExecutionProvider"]).predict(torch.arange(10).view(2, 5) % 8)
        return Outcome.ACCEPTED
