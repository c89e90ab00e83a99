"""PEFT's own quantization tests (`tests/test_quantization.py` of its sdist) on a base that this package quantized.

    pip download --no-deps --no-binary :all: peft && tar xzf peft-*.tar.gz
    python -m benchmarks.peft_suite peft-0.21.2

The tests run as they are, but for the list of quantizers, which becomes this package's formats, and for the model: a
random OPT with as many layers as the one that they fetch from the Hub. It adds `peft_suite` to results/ecosystem.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.ecosystem import RESULTS

FORMATS = ("int8", "int4", "float8_e4m3")
_TESTS = "test_quantization.py"
_LIST = "TEST_CASES = ["
_LOADERS = """
import hf_trainweights


@dataclass
class Loader:
    name: str
    backend_cls = None
    supports_merge = True
    supports_non_quantized_comparison = True
    model_id = {model!r}
    expected_layer_count = 24

    def load_model(self):
        options = {{"group_size": 32}} if self.name == "int4" else {{}}
        config = hf_trainweights.TrainWeightsConfig(self.name, **options)
        return AutoModelForCausalLM.from_pretrained(self.model_id, quantization_config=config)


QUANTIZATION_BACKENDS = [Loader(name) for name in {formats!r}]

"""


def measure(sdist: Path) -> dict[str, Any]:
    """Return how many of the tests passed in each format, and which failed.

    Args:
        sdist: PEFT's unpacked source distribution.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tests = shutil.copytree(sdist / "tests", root / "tests")
        (tests / "__init__.py").touch()
        (root / "datasets.py").write_text("load_dataset = None  # imported, and not called by these tests\n")
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
        config = OPTConfig(vocab_size=256, word_embed_proj_dim=64, max_position_embeddings=64, **sizes)
        OPTForCausalLM(config).save_pretrained(root / "opt")
        source = (tests / _TESTS).read_text()
        loaders = _LOADERS.format(model=str(root / "opt"), formats=FORMATS)
        (tests / _TESTS).write_text(source.replace(_LIST, loaders + _LIST, 1))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={root / 'report.xml'}"]
        subprocess.run([*command, f"tests/{_TESTS}"], cwd=root, check=False)
        cases = ElementTree.parse(root / "report.xml").getroot().iter("testcase")
        outcomes = {case.attrib["name"]: [child.tag for child in case] for case in cases}
    report: dict[str, Any] = {"version": sdist.name}
    for name in FORMATS:
        own = {case: tags for case, tags in outcomes.items() if f"-{name}]" in case or f"[{name}-" in case}
        failed = sorted(case for case, tags in own.items() if {"failure", "error"} & set(tags))
        skipped = sum("skipped" in tags for tags in own.values())
        by_test = sorted({case.partition("[")[0] for case in failed})
        report[name] = {
            "passed": len(own) - len(failed) - skipped,
            "failed": len(failed),
            "skipped": skipped,
            "tests_with_failures": {test: sum(case.startswith(f"{test}[") for case in failed) for test in by_test},
        }
    return report


def main() -> None:
    """Measure, and write the counts beside the other flows."""
    results = json.loads(RESULTS.read_text())
    results["peft_suite"] = measure(Path(sys.argv[1]).resolve())
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(results["peft_suite"], indent=2))


if __name__ == "__main__":
    main()
