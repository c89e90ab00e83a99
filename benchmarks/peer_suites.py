"""Test files of accelerate, diffusers, sentence-transformers and TRL, on models that this package quantized.

    pip install --no-deps --target /tmp/ecosystem trl datasets parameterized ...
    PYTHONPATH=/tmp/ecosystem python -m benchmarks.peer_suites accelerate accelerate-1.15.0

The second argument is a folder with the package's `tests`: its source distribution, or its repository where that has no
tests. What a test would fetch from the Hub is a tiny random model or a few rows. Each file runs twice, on the float
model and on the same one in int8; counted are the cases that pass in float. It adds `peer_suites` to
results/ecosystem.json, with the first line that each failing case reports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks.ecosystem import INT8, RESULTS, llama, quantized_llama
from benchmarks.minilm import MODEL

Edit = Callable[[str], str]
Outcomes = dict[str, dict[str, str]]
_REASON_LENGTH = 200

_ACCELERATE = ("test_big_modeling.py", "test_hooks.py", "test_modeling_utils.py", "test_offload.py")
_LAST_LINEAR = re.compile(r"(        self\.linear\d = nn\.Linear\(.*\)\n)(\n    def forward)")
_QUANTIZE = """        import hf_trainweights
        hf_trainweights.quantize_(self, "int8")
"""

# datasets would pickle a table without a fingerprint, which not all its versions can.
_ROWS = """
import datasets
import hf_trainweights
from datasets.table import InMemoryTable


def dataset(name, **columns):
    return datasets.Dataset(InMemoryTable.from_pydict(columns), fingerprint=name)


datasets.load_dataset = lambda *_, **__: ROWS
"""

_SENTENCES = ("test_model.py", "test_trainer.py", "test_compute_embeddings.py")
_SENTENCE_ROWS = f"""{_ROWS}
WORDS = [f"text {{n}}" for n in range(200)]
SPLITS = ("train", "validation", "test")
COLUMNS = {{"sentence1": WORDS, "sentence2": WORDS[::-1], "score": [n / 200 for n in range(200)]}}
ROWS = datasets.DatasetDict({{name: dataset(name, **COLUMNS) for name in SPLITS}})


def pytest_collection_modifyitems(items):
    tests = {{}}
    for item in items:
        tests.setdefault(item.originalname, []).append(item)
    items[:] = [item for cases in tests.values() for item in cases[:2]]
"""

# The checks that diffusers has for its own quantizers, which no test calls without an accelerator.
_CHECKS = "models/testing_utils/quantization.py"
_MIXIN = "class QuantizationTesterMixin:"
_OURS = """

import hf_trainweights
import hf_trainweights.diffusers
from diffusers import UNet2DConditionModel

CONFIGS = {{"int8": {{}}, "int4": {{"group_size": 32}}, "uint4": {{}}, "float8_e4m3": {{}}}}
CHECKS = [name for name in vars(QuantizationTesterMixin) if name.startswith("_test_")]
FILES = ("_test_quantization_serialization",)


class TestTrainWeights(QuantizationTesterMixin):
    model_class = UNet2DConditionModel
    pretrained_model_name_or_path = {model!r}
    sharded_serialization_config = {{"format": "int8"}}

    def get_dummy_inputs(self):
        torch.manual_seed(0)
        return {{"sample": torch.randn(1, 4, 8, 8), "timestep": 1, "encoder_hidden_states": torch.randn(1, 3, 32)}}

    def _create_quantized_model(self, config_kwargs, **options):
        config = hf_trainweights.TrainWeightsConfig(**config_kwargs)
        return self.model_class.from_pretrained(
            self.pretrained_model_name_or_path, quantization_config=config, **options
        )

    def _verify_if_layer_quantized(self, name, module, config_kwargs):
        assert isinstance(module.weight, hf_trainweights.QuantizedTensor), name

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("name", CONFIGS)
    def test_quantization(self, check, name, tmp_path):
        more = {{"tmp_path": tmp_path}} if check in FILES else {{}}
        if check.endswith("modules_to_not_convert"):
            more = {{"modules_to_not_convert": ["to_q"]}}
        getattr(self, check)({{"format": name, **CONFIGS[name]}}, **more)
"""

_TRL = ("test_sft_trainer.py",)
_TEXT_ROWS = f"""{_ROWS}
ROWS = dataset("train", text=[f"row {{n}} has the text {{n * n}}" for n in range(17)])


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "TestSFTTrainer::" in item.nodeid and
                ("peft" in item.name or "prompt_tuning" in item.name)]
"""


def run(source: Path, files: Sequence[str], edits: Sequence[Edit] = (), conftest: str = "") -> Outcomes:
    """Run test files of a package, edited; return what each case reported, nothing if it passed.

    Args:
        source: The folder that has the package's `tests`.
        files: The files, relative to `tests`.
        edits: What changes the texts of the modules below `tests`; each has to change one of them at least.
        conftest: A plugin of pytest that is loaded before them.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tests = shutil.copytree(source / "tests", root / "tests")
        (tests / "__init__.py").touch()
        (root / "conftest.py").write_text(conftest)
        for edit in edits:
            texts = {module: module.read_text() for module in tests.rglob("*.py")}
            changed = {module: new for module, text in texts.items() if (new := edit(text)) != text}
            assert changed, "the tests are of another version: there is nothing to edit"
            for module, text in changed.items():
                module.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={root / 'report.xml'}"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        named = [f"tests/{file}" for file in files]
        subprocess.run([*command, *named], cwd=root, check=False, env=environment)
        cases = list(ElementTree.parse(root / "report.xml").getroot().iter("testcase"))
    reports = [{child.tag: child.attrib.get("message", "") for child in case} for case in cases]
    return {
        f"{case.attrib['classname']}::{case.attrib['name']}": report
        for case, report in zip(cases, reports, strict=True)
    }


def counts(outcomes: Outcomes) -> dict[str, Any]:
    """Return how many cases passed, failed and skipped, and of which tests those are that failed."""
    failed = sorted(case for case, report in outcomes.items() if {"failure", "error"} & report.keys())
    skipped = sum("skipped" in report for report in outcomes.values())
    by_test = Counter(case.partition("::")[2].partition("[")[0] for case in failed)
    passed = len(outcomes) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "tests_with_failures": dict(by_test)}


def passing(in_float: Outcomes, quantized: Outcomes) -> Outcomes:
    """Return what the cases that pass in float report when quantized."""
    return {case: report for case, report in quantized.items() if in_float.get(case) == {}}


def replace(old: str, new: str) -> Edit:
    """Return what exchanges a text for another one."""
    return lambda text: text.replace(old, new)


def accelerate(source: Path, _: Path) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes for models that quantize themselves when they are built."""
    return run(source, _ACCELERATE), run(
        source, _ACCELERATE, [lambda text: _LAST_LINEAR.sub(rf"\1{_QUANTIZE}\2", text)]
    )


def sentence_transformers(source: Path, directory: Path) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes for a BERT of the shape that the tests fetch, with random weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes)).save_pretrained(directory / "bert")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory / "bert")
    modules = [Transformer(str(directory / "bert")), Pooling(128)]
    SentenceTransformer(modules=modules, device="cpu").save(str(directory / "float"))
    options = {"quantization_config": INT8}
    quantized = SentenceTransformer(str(directory / "float"), model_kwargs=options, device="cpu")
    quantized.save(str(directory / "int8"))

    def outcomes(model: Path) -> Outcomes:
        edits = [
            replace("sentence-transformers-testing/stsb-bert-tiny-safetensors", str(model)),
            replace('from_pretrained("google-bert/bert-base-uncased")', f'from_file("{MODEL}/tokenizer.json")'),
        ]
        return run(source, [f"sentence_transformer/{file}" for file in _SENTENCES], edits, _SENTENCE_ROWS)

    return outcomes(directory / "float"), outcomes(directory / "int8")


def diffusers(source: Path, directory: Path) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes of the checks for quantizers, on a random UNet; of a float model there are none to pass."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "norm_num_groups": 8}
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    UNet2DConditionModel(**sizes, **blocks, cross_attention_dim=32, attention_head_dim=8).save_pretrained(directory)
    edits = [
        replace(f"@require_accelerator\n{_MIXIN}", _MIXIN),
        lambda text: text + _OURS.format(model=str(directory)) if f"\n{_MIXIN}" in text else text,
    ]
    outcomes = run(source, [_CHECKS], edits)
    return {case: {} for case, report in outcomes.items() if "skipped" not in report}, outcomes


def trl(source: Path, directory: Path) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes for a Llama: the tests of SFT that train an adapter, because the others train all weights."""
    models = llama(directory), quantized_llama(directory)
    name = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
    in_float, quantized = (run(source, _TRL, [replace(name, str(model))], _TEXT_ROWS) for model in models)
    return in_float, quantized


SUITES = {
    "accelerate": accelerate,
    "diffusers": diffusers,
    "sentence-transformers": sentence_transformers,
    "trl": trl,
}


def main() -> None:
    """Measure one package, and write the counts beside the other flows."""
    name, source = sys.argv[1], Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as directory:
        in_float, quantized = SUITES[name](source, Path(directory))
    compared = passing(in_float, quantized)
    lines = {case: next(iter(report.values())).partition("\n")[0] for case, report in compared.items() if report}
    row = {"version": version(name), "tests": source.name, **counts(compared)}
    row["reasons"] = {case: line[:_REASON_LENGTH] for case, line in lines.items()}
    results = json.loads(RESULTS.read_text())
    results.setdefault("peer_suites", {})[name] = row
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
