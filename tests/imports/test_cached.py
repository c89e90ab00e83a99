"""A model of another program is converted once, and again when its source changes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from imports.gguf.files import all_of, write_gguf
from imports.writers import gptq, write_model
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM

from hf_trainweights import QuantizedTensor, from_quantized
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.imports import cached

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "trainweights"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of sources that are converted."""
    converted: list[Path] = []
    original = cached.import_local

    def counted(source: Path, *args: object, **kwargs: object) -> object:
        converted.append(source)
        return original(source, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(cached, "import_local", counted)
    return converted


@pytest.mark.parametrize("layout", ["gguf", "gptq"])
def test_a_second_load_converts_nothing(layout: str, tmp_path: Path, conversions: list[Path], cache: Path) -> None:
    source = tmp_path / "source"
    if layout == "gguf":
        write_gguf(source / "model.gguf")
    else:
        write_model(source, gptq(), dtype=torch.float16)
    first, second = (from_quantized(AutoModelForCausalLM, source, dtype=torch.bfloat16) for _ in range(2))
    assert len(conversions) == 1
    assert first.dtype == second.dtype == torch.bfloat16
    assert any(isinstance(parameter, QuantizedTensor) for parameter in first.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", ["weights", "tokenizer", "file", "base_model", "version"])
def test_another_source_or_option_is_another_conversion(
    change: str, tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = tmp_path / "source", {"file": "*Q4*"}
    for kind in ("Q4_K", "Q8_0"):
        write_gguf(source / f"tiny-{kind}.gguf", kinds=all_of(kind))
    first = from_quantized(AutoModelForCausalLM, source, **options)
    if change == "weights":
        write_gguf(source / "tiny-Q4_K.gguf", kinds=all_of("Q4_0"))
    elif change == "tokenizer":
        byte_level(size=300).save_pretrained(source)
    elif change == "file":
        options["file"] = "*Q8*"
    elif change == "base_model":
        first.config.save_pretrained(tmp_path / "base")
        options["base_model"] = str(tmp_path / "base")
    else:
        monkeypatch.setattr(cached, "version", lambda _: "99")
    from_quantized(AutoModelForCausalLM, source, **options)
    assert len(conversions) == 2


def test_another_gguf_file_beside_it_changes_nothing(tmp_path: Path, conversions: list[Path]) -> None:
    write_gguf(tmp_path / "source" / "tiny-Q4_K.gguf")
    for _ in range(2):
        from_quantized(AutoModelForCausalLM, tmp_path / "source", file="*Q4*")
        write_gguf(tmp_path / "source" / "tiny-Q8_0.gguf", kinds=all_of("Q8_0"))
    assert len(conversions) == 1


def test_two_at_once_convert_it_once(tmp_path: Path, conversions: list[Path]) -> None:
    write_gguf(tmp_path / "source" / "model.gguf")
    # Two loads by Transformers at once would leave another default dtype behind.
    only_converts = SimpleNamespace(from_pretrained=lambda path: path)
    loads = [threading.Thread(target=from_quantized, args=(only_converts, tmp_path / "source")) for _ in "ab"]
    for load in loads:
        load.start()
    for load in loads:
        load.join()
    assert len(conversions) == 1


def test_a_conversion_that_fails_leaves_nothing_that_loads(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "source" / "model.gguf")
    whole = (tmp_path / "source" / "model.gguf").read_bytes()
    (tmp_path / "source" / "model.gguf").write_bytes(whole[:-100])
    with pytest.raises(CorruptFileError, match="expected all bytes of"):
        from_quantized(AutoModelForCausalLM, tmp_path / "source")
    assert not list(cache.rglob("config.json"))
    (tmp_path / "source" / "model.gguf").write_bytes(whole)
    assert from_quantized(AutoModelForCausalLM, tmp_path / "source").config.hidden_size == 256


@pytest.mark.parametrize("name", ["gguf_file", "revision", "subfolder"])
def test_arguments_that_select_other_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected arguments of from_pretrained that select no files"):
        from_quantized(AutoModelForCausalLM, tmp_path, **{name: "x"})
