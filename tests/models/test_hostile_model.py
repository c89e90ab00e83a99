"""What the files of somebody else's model can do to whoever loads them: nothing but be refused by a typed error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError
from hf_trainweights.files import expressions

LLAMA = ARCHITECTURES["llama"]
NEVER_ENDS = r"(([a-z_.0-9]+)+)+[!?]"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A quantized model of one file."""
    model = LLAMA.build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_bytes())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change", [{"overrides": {f"re:{NEVER_ENDS}": "int8"}}, {"modules_to_not_convert": [NEVER_ENDS]}]
)
def test_an_expression_that_never_ends_is_an_error_that_names_it(
    change: dict[str, Any], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "_MAX_SECONDS", 1.0)
    edit(saved / "config.json", lambda config: config["quantization_config"].update(change))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"expression: expected .* in 1 seconds and 512 MiB, found '\(\(\[a-z_"):
        AutoModelForCausalLM.from_pretrained(saved)
    assert time.monotonic() - began < 20
