"""Two of PEFT's own test files, from its sdist, on bases that this package quantized.

    pip download --no-deps --no-binary :all: peft && tar xzf peft-*.tar.gz
    pip install --no-deps --target /tmp/ecosystem diffusers datasets ...
    PYTHONPATH=/tmp/ecosystem python -m benchmarks.peft_suite peft-0.21.2

`test_quantization.py` runs as it is, but for the list of quantizers, which becomes this package's formats, and for the
model: a random OPT with as many layers as the one that the tests fetch from the Hub. `test_custom_models.py` runs with
the first configuration of each adapter on its MLP, once as it is and once with every MLP quantized to int8; counted are
the cases that pass in float. It adds `peft_suite` to results/ecosystem.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.ecosystem import RESULTS
from benchmarks.peer_suites import counts, passing, replace, run

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


_CUSTOM = "test_custom_models.py"
_MADE = "            return MLP().to(dtype)\n"
_QUANTIZED = """            import hf_trainweights
            made = MLP().to(dtype)
            hf_trainweights.quantize_(made, "int8")
            return made
"""
# One configuration of each adapter; a cast of the whole model is a test of float weights.
_SELECTION = """
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "TestPeftCustomModel::" in item.nodeid and "[Vanilla MLP 1 " in item.name
                and "autocast" not in item.name and "float16" not in item.name]
"""


def quantization_tests(sdist: Path) -> dict[str, Any]:
    """Return the counts of `test_quantization.py` in each format."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
        config = OPTConfig(vocab_size=256, word_embed_proj_dim=64, max_position_embeddings=64, **sizes)
        OPTForCausalLM(config).save_pretrained(Path(directory) / "opt")
        loaders = _LOADERS.format(model=str(Path(directory) / "opt"), formats=FORMATS)
        outcomes = run(sdist, [_TESTS], [replace(_LIST, loaders + _LIST)])
    return {
        name: counts({case: report for case, report in outcomes.items() if f"-{name}]" in case or f"[{name}-" in case})
        for name in FORMATS
    }


def custom_model_tests(sdist: Path) -> dict[str, Any]:
    """Return the counts of `test_custom_models.py` in int8, over the cases that pass in float."""
    in_float = run(sdist, [_CUSTOM], conftest=_SELECTION)
    return counts(passing(in_float, run(sdist, [_CUSTOM], [replace(_MADE, _QUANTIZED)], _SELECTION)))


def main() -> None:
    """Measure, and write the counts beside the other flows."""
    results = json.loads(RESULTS.read_text())
    sdist = Path(sys.argv[1]).resolve()
    results["peft_suite"] = {"version": sdist.name, **quantization_tests(sdist)}
    results["peft_suite"]["custom_models_int8"] = custom_model_tests(sdist)
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(json.dumps(results["peft_suite"], indent=2))


if __name__ == "__main__":
    main()
