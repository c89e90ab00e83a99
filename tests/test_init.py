"""What importing the package does: it registers once, and shows the names a user needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

import pytest
from fresh_process import run_fresh
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.serialization import get_safe_globals
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)

import hf_trainweights
from hf_trainweights import TrainWeightsConfig, TrainWeightsHfQuantizer
from hf_trainweights.tensor.dispatch import HANDLERS
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

MOST_NAMES = 30
MOST_MODULES = 180


def public_names() -> dict[str, object]:
    return {name: getattr(hf_trainweights, name) for name in hf_trainweights.__all__}


@pytest.mark.parametrize("package", ["hf_trainweights", "hf_trainweights.checkpoint", "hf_trainweights.exports"])
def test_a_public_package_shows_what_it_lists_and_nothing_that_it_imports(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == list(module.__all__)
    shown = {name for name in dir(module) if not name.startswith("_")}
    assert {name for name in shown if not inspect.ismodule(getattr(module, name))} == set(module.__all__)
    theirs = [name for name in shown if not getattr(module, name).__name__.startswith("hf_trainweights")]
    assert [name for name in theirs if inspect.ismodule(getattr(module, name))] == []


IMPORTS = """
import sys, tempfile, types
import peft, safetensors.torch, torch, transformers, transformers.modeling_utils, transformers.quantizers.auto
from torch.nn.modules import module as modules
from transformers import LlamaConfig, LlamaForCausalLM

def functions():
    found = {}
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in THEIRS]:
        for name, value in list(vars(module).items()):
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {f"{module.__name__}.{name}.{key}": own for key, own in list(vars(value).items())}
    kinds = (type, types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property)
    return {name: value for name, value in found.items() if isinstance(value, kinds)}

THEIRS = ("peft", "safetensors", "torch", "transformers")
before, modules_before = functions(), set(sys.modules)
import hf_trainweights
print(*sorted(sys.modules.keys() - modules_before))
print(hf_trainweights.export_torchscript.__module__, hf_trainweights.checkpoint.Policy.__module__)
import hf_trainweights.checkpoint, hf_trainweights.exports
after_import = functions()
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
hf_trainweights.quantize_(model, "int8")
with tempfile.TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    LlamaForCausalLM.from_pretrained(directory)
for now in (after_import, functions()):
    print(*sorted(name for name in before if now.get(name) is not before[name]))
hooks = [value for name, value in vars(modules).items() if name.startswith("_global_") and name.endswith("_hooks")]
print(*sorted(hook.__name__ for each in hooks for hook in each.values()))
"""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Return the lines that the program prints."""
    done = run_fresh(IMPORTS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_what_a_model_does_not_need_is_imported_when_it_is_asked_for(imported: list[str]) -> None:
    new, asked_for = (line.split() for line in imported[:2])
    assert {name.partition(".")[0] for name in new} == {"hf_trainweights", "zlib_ng"}
    assert len(new) < MOST_MODULES
    rooms = ("exports", "inspection", "report", "checkpoint.trainer", "checkpoint.whole")
    assert [name for name in new if name.startswith(tuple(f"hf_trainweights.{room}" for room in rooms))] == []
    assert asked_for == ["hf_trainweights.exports.pytorch", "hf_trainweights.checkpoint.planning.policy"]


@pytest.mark.slow
def test_the_package_puts_functions_where_its_registration_says_and_nowhere_else(imported: list[str]) -> None:
    by_import, by_use, hooks = imported[-3:]
    config, model = "transformers.configuration_utils", "transformers.modeling_utils.PreTrainedModel"
    methods = ("_from_config", "dequantize", "get_memory_footprint", "initialize_weights", "resize_token_embeddings")
    replaced = {f"{model}.{name}" for name in (*methods, "save_pretrained", "push_to_hub")}
    replaced |= {f"{config}.{name}.get_config_dict" for name in ("PreTrainedConfig", "PretrainedConfig")}
    assert set(by_import.split()) == replaced
    assert by_use == f"{by_import} transformers.modeling_utils.safe_save_file"
    assert hooks == "describe meet_adapters"


@pytest.mark.parametrize("package", ["hf_trainweights", "hf_trainweights.checkpoint"])
def test_names_that_do_not_exist_are_attribute_errors(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'quantise_'"):
        importlib.import_module(package).quantise_  # noqa: B018  (asking is the test)


@pytest.mark.parametrize(
    "name",
    [
        "QuantizedTensor",
        "TrainWeightsConfig",
        "TrainWeightsError",
        "TrainWeightsHfQuantizer",
        "dequantize_",
        "get_model_size_in_bytes",
        "quantize_",
        "verify_model",
    ],
)
def test_the_names_a_user_needs_are_public(name: str) -> None:
    assert name in public_names()


def test_public_names_are_few_ours_and_documented() -> None:
    assert len(public_names()) <= MOST_NAMES
    for name, value in public_names().items():
        assert value.__module__.partition(".")[0] == "hf_trainweights", name
        assert inspect.getdoc(value), name


def test_the_version_is_that_of_the_distribution() -> None:
    assert hf_trainweights.__version__ == importlib.metadata.version("hf_trainweights")


def test_transformers_knows_the_method() -> None:
    assert AUTO_QUANTIZER_MAPPING["trainweights"] is TrainWeightsHfQuantizer
    config = AutoQuantizationConfig.from_dict(TrainWeightsConfig("int4").to_dict())
    assert type(config) is TrainWeightsConfig
    assert config == TrainWeightsConfig("int4")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    assert isinstance(quantizer, TrainWeightsHfQuantizer)


def test_files_may_call_two_functions_and_name_them_by_the_package_alone() -> None:
    ours = [each for each in get_safe_globals() if getattr(each, "__module__", "").startswith("hf_trainweights")]
    assert {f"{our.__module__}.{our.__qualname__}" for our in ours} == {
        "hf_trainweights.decode_file",
        "hf_trainweights.rebuild_quantized_tensor",
    }
    assert QuantizedTensor not in get_safe_globals()


def test_importing_again_registers_nothing_twice() -> None:
    config, quantizer = AUTO_QUANTIZATION_CONFIG_MAPPING["trainweights"], AUTO_QUANTIZER_MAPPING["trainweights"]
    handlers, allowed, hooks = dict(HANDLERS), len(get_safe_globals()), len(_global_parameter_registration_hooks)
    before = public_names()
    reloaded = importlib.reload(hf_trainweights)
    assert reloaded is hf_trainweights
    assert public_names() == before
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["trainweights"] is config
    assert AUTO_QUANTIZER_MAPPING["trainweights"] is quantizer
    assert handlers == HANDLERS
    assert len(get_safe_globals()) == allowed
    assert len(_global_parameter_registration_hooks) == hooks
