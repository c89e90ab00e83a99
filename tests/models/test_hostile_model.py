"""What the files of somebody else's model can do to whoever loads them: nothing but be refused by a typed error."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive
from transformers import AutoConfig, AutoModelForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files import selectors

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"overrides": {f"re:{NEVER_ENDS}": "int8"}}, *exhaustive({"modules_to_not_convert": [NEVER_ENDS]})]
)
def test_an_expression_that_never_ends_is_an_error_that_names_it(
    change: dict[str, Any], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "_MAX_SECONDS", 1.0)
    edit(saved / "config.json", lambda config: config["quantization_config"].update(change))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"expression: expected .* in 1 seconds and 512 MiB, found '\(\(\[a-z_"):
        AutoModelForCausalLM.from_pretrained(saved)
    assert time.monotonic() - began < 20


OUTSIDE: dict[str, Callable[[Path], str]] = {
    "a neighbour": lambda outside: f"../{outside.name}/",
    "an absolute path": lambda outside: f"{outside}/",
    "through itself": lambda outside: f"../model/../{outside.name}/",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leads_out_of_the_directory_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    for directory in (saved, tmp_path / "outside"):
        model.save_pretrained(directory, max_shard_size="32KB")
    place = OUTSIDE[name](tmp_path / "outside")

    def lead_out(index: dict[str, Any]) -> None:
        index["weight_map"] = {key: place + shard for key, shard in index["weight_map"].items()}

    edit(saved / "model.safetensors.index.json", lead_out)
    with pytest.raises(CorruptFileError, match=r"outside/model-\S+: expected a file in .*, found a path out of it"):
        AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(CorruptFileError, match=r"outside/model-\S+: expected a file in .*, found a path out of it"):
        AutoModelForCausalLM.from_pretrained(saved, config=AutoConfig.from_pretrained(tmp_path / "outside"))


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["safetensors", "bin"])
def test_a_fifo_in_the_place_of_a_file_is_never_waited_for(serialization: str, saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    model.save_pretrained(saved, max_shard_size="32KB", safe_serialization=serialization == "safetensors")
    shard = sorted(saved.glob("*-of-*"))[1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CorruptFileError, match=rf"{shard.name}: expected a regular file, found a FIFO"):
        AutoModelForCausalLM.from_pretrained(saved)
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(CorruptFileError, match=rf"{shard.name}: expected a regular file, found a character device"):
        AutoModelForCausalLM.from_pretrained(saved)
    for name in ("config.json", next(saved.glob("*.index.json")).name):
        content = (saved / name).read_bytes()
        (saved / name).unlink()
        os.mkfifo(saved / name)
        with pytest.raises((OSError, ValueError), match=r"Unrecognized model|no file named"):
            AutoModelForCausalLM.from_pretrained(saved)
        (saved / name).unlink()
        (saved / name).write_bytes(content)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.system, eval, exec, Path.touch], ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore")  # of what torch thinks of such a file
def test_a_pickle_that_calls_is_refused_and_runs_nothing(
    function: Callable[..., Any], zipped: bool, saved: Path, tmp_path: Path
) -> None:
    witness = tmp_path / "it ran"
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(saved, safe_serialization=False)
    python = f"import pathlib; pathlib.Path({str(witness)!r}).touch()"
    arguments = {os.system: f"touch '{witness}'", eval: f"__import__('pathlib').Path({str(witness)!r}).touch()"}
    call = Call(function, witness if function is Path.touch else arguments.get(function, python))
    tensors = torch.load(saved / "pytorch_model.bin", weights_only=True)
    torch.save({**tensors, "x": call}, saved / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: expected a pickle of plain tensors"):
        AutoModelForCausalLM.from_pretrained(saved)
    assert not witness.exists()
    pickle.loads(pickle.dumps(call))
    assert witness.exists(), "the pickle would not have done anything"
