"""What importing the package does: it registers once, and shows the names a user needs."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect

import pytest
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
from hf_trainweights.quantized_ops import HANDLERS
from hf_trainweights.quantized_tensor import QuantizedTensor

MOST_NAMES = 15


def public_names() -> dict[str, object]:
    """Return what the package imports under its own name, `import x as x`: that is how it says that x is public."""
    tree = ast.parse(inspect.getsource(hf_trainweights))
    aliases = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname: getattr(hf_trainweights, alias.asname) for alias in aliases if alias.asname}


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
    assert {f"{each.__module__}.{each.__qualname__}" for each in ours} == {
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
