"""A little of what `make fuzz` does for as long as one likes: the same inputs each time, and none breaks a promise."""

from __future__ import annotations

import pytest
from covering import by_default, exhaustive

from tests.fuzz.finding import CORPUS
from tests.fuzz.harness import memory_directory, run_count
from tests.fuzz.registry import TARGETS
from tests.fuzz.targets.imports import ImportedDirectories
from tests.fuzz.targets.onnx_exports import OnnxExports
from tests.fuzz.targets.programs import OnnxFiles, ProgramExports

# Inputs of these take longest.
_EXHAUSTIVE = (
    *(OnnxExports.name, OnnxFiles.name, ProgramExports.name, ImportedDirectories.name),
    *("exports", "gguf-exports", "gguf-imports", "model-directories", "run-directories"),
)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1 / 128, *exhaustive(1.0)], ids=["a part", "all"])
@pytest.mark.parametrize("name", by_default(TARGETS.keys() - set(_EXHAUSTIVE), TARGETS))
def test_no_mutated_input_breaks_a_promise(name, share):
    target = TARGETS[name]()
    inputs = min(target.inputs_in_suite, max(30, int(share * target.inputs_in_suite)))
    with memory_directory() as directory:
        target.prepare(directory / "corpus")
        tally = run_count(target, directory / "work", range(inputs), seed=0)
    told = [f"{finding.save(CORPUS)}: {finding}" for finding in tally.findings.values()]
    assert told == [], "\n".join(told)
    assert tally.inputs == inputs
    assert min(tally.accepted, tally.refused) > 0.03 * tally.inputs  # the inputs reach what lies behind the first check
