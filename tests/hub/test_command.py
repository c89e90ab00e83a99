"""The `trainweights` command and the Hub: it pushes a directory in one commit, and takes models by their ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from command_line import run, run_json
from hub.server import LocalHub
from hub.test_push import THEIRS, computes_the_same, pull
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from imports.gguf.files import all_of, write_gguf
from tiny_tokenizers import byte_level
from transformers import AutoTokenizer

from hf_trainweights import import_directory, verify_model
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.loading.saved_models import load_saved

LLAMA = ARCHITECTURES["llama"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    LLAMA.build().save_pretrained(root / "float")
    (root / "float" / "tokenizer.json").write_text("{}")
    run_json("quantize", root / "float", root / "int8", "--format", "int8")
    for name in ("training_args.bin", "trainer_state.json", ".secret"):
        (root / "int8" / name).write_text("private")
    return root / "int8"


@pytest.mark.slow
def test_push_uploads_the_directory_as_it_lies_there(quantized: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    options = ("--private", "--message", "My words")
    result = run_json("push", quantized, "user/tiny", *options)
    repository = local_hub.repositories["user/tiny"]
    head = repository.find("main")
    assert head is not None
    assert repository.private
    assert head.title == "My words"
    assert result["repo_id"] == "user/tiny"
    assert result["commit"].endswith(head.sha)
    pushed = set(HfApi().list_repo_files("user/tiny"))
    expected = {"config.json", "generation_config.json", "model.safetensors", "trainweights_files.json"}
    assert pushed - {".gitattributes"} == expected | {"tokenizer.json", "README.md"}
    snapshot = Path(snapshot_download("user/tiny", cache_dir=tmp_path / "check"))
    for name in expected:
        assert (snapshot / name).read_bytes() == (quantized / name).read_bytes()
    assert "import hf_trainweights" in (snapshot / "README.md").read_text()
    assert verify_model(snapshot).ok
    assert computes_the_same(pull("user/tiny", tmp_path / "cache"), load_saved(quantized))


@pytest.mark.slow
def test_push_keeps_a_card_that_somebody_wrote_and_removes_older_weights(
    quantized: Path, local_hub: LocalHub, tmp_path: Path
) -> None:
    run_json("push", quantized, "user/tiny", "--revision", "try")
    api = HfApi()
    for name, content in (("README.md", THEIRS.encode()), ("pytorch_model.bin", b"old")):
        api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id="user/tiny", revision="try")
    done = run("push", quantized, "user/tiny", "--revision", "try")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("pushed to ")
    assert "pytorch_model.bin" not in api.list_repo_files("user/tiny", revision="try")
    card = api.hf_hub_download("user/tiny", "README.md", revision="try", local_dir=tmp_path / "card")
    assert ModelCard.load(card).content == THEIRS
    assert "model.safetensors" not in api.list_repo_files("user/tiny")


@pytest.mark.slow
def test_push_refuses_a_float_model_and_a_name_that_is_none(quantized: Path, local_hub: LocalHub) -> None:
    refused = run("push", quantized.parent / "float", "user/tiny")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "expected a model that this package has quantized, found a float model" in refused.stderr
    assert run("push", quantized, "no name").exit_code == 2
    assert local_hub.repositories == {}


@pytest.mark.slow
def test_what_the_hub_refuses_is_an_error_in_one_line(
    quantized: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused = run("push", quantized, "user/tiny")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert refused.stderr.startswith("error: ")


def pushed_id(quantized: Path) -> str:
    run_json("push", quantized, "user/tiny")
    return "user/tiny"


@pytest.mark.slow
def test_every_command_that_takes_a_model_takes_its_id(quantized: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    name = pushed_id(quantized)
    here = run_json("inspect", quantized)
    there = run_json("inspect", name)
    assert (there["path"], there["tensors"]) == (name, here["tensors"])
    report = run_json("verify", name)
    assert (report["path"], report["ok"], report["files"]) == (name, True, ["model.safetensors"])
    assert run_json("diff", quantized, name)["equal"] == len(here["tensors"])
    assert run_json("report", name, quantized, "--html", tmp_path / "report.html")["title"].startswith("user/tiny")
    run_json("dequantize", name, tmp_path / "float")
    assert (tmp_path / "float" / "tokenizer.json").exists()
    run_json("export", name, tmp_path / "ct", "--to", "compressed-tensors")
    run_json("quantize", pushed_float(quantized), tmp_path / "again", "--format", "int8")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (quantized / "model.safetensors").read_bytes()
    run_json("push", name, "user/copy")
    assert computes_the_same(pull("user/copy", tmp_path / "cache"), load_saved(quantized))


def pushed_float(quantized: Path) -> str:
    HfApi().create_repo("user/float")
    HfApi().upload_folder(repo_id="user/float", folder_path=quantized.parent / "float")
    return "user/float"


@pytest.mark.slow
def test_an_import_downloads_no_weights_that_it_does_not_read(local_hub: LocalHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5"):
        (folder / name).write_text("{}")
    HfApi().create_repo("user/mixed")
    HfApi().upload_folder(repo_id="user/mixed", folder_path=folder)
    with pytest.raises(ConfigError, match=r"expected a quantization_config, or .* beside it, found none"):
        import_directory("user/mixed", tmp_path / "out")
    (snapshot,) = Path(constants.HF_HUB_CACHE, "models--user--mixed", "snapshots").iterdir()
    assert {path.name for path in snapshot.iterdir()} - {".gitattributes"} == {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_an_import_downloads_the_one_gguf_file_that_it_reads(local_hub: LocalHub, tmp_path: Path) -> None:
    for kind in ("Q4_K", "Q8_0"):
        write_gguf(tmp_path / "model" / f"tiny-{kind}.gguf", kinds=all_of(kind))
    byte_level(size=300).save_pretrained(tmp_path / "model")
    HfApi().create_repo("user/gguf")
    HfApi().upload_folder(repo_id="user/gguf", folder_path=tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"user/gguf: expected one GGUF file, found 2: tiny-Q4_K\.gguf, tiny-Q8_0\.gguf"
    ):
        import_directory("user/gguf", tmp_path / "out")
    import_directory("user/gguf", tmp_path / "out", file="*Q4_K*")
    (snapshot,) = Path(constants.HF_HUB_CACHE, "models--user--gguf", "snapshots").iterdir()
    assert [path.name for path in snapshot.glob("*.gguf")] == ["tiny-Q4_K.gguf"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 300


@pytest.mark.slow
def test_torch_files_are_downloaded_where_there_are_no_safetensors(local_hub: LocalHub, tmp_path: Path) -> None:
    api = HfApi()
    api.create_repo("user/old")
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    api.upload_file(
        path_or_fileobj=tmp_path / "pytorch_model.bin", path_in_repo="pytorch_model.bin", repo_id="user/old"
    )
    assert [tensor["name"] for tensor in run_json("inspect", "user/old")["tensors"]] == ["w"]


@pytest.mark.slow
def test_a_model_that_the_hub_has_not_is_said_to_be_nowhere(local_hub: LocalHub) -> None:
    result = run("inspect", "user/missing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "error: user/missing: expected a path, or the id of a model on the Hub, found no such path here, "
        "and no such model on the Hub that this account may read. Check its spelling.\n"
    )


@pytest.mark.slow
def test_offline_the_cache_answers_or_the_error_says_why_not(
    quantized: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = pushed_id(quantized)
    tensors = run_json("inspect", name)["tensors"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run_json("inspect", name)["tensors"] == tensors
    refused = run("inspect", "user/other")
    assert refused.exit_code == 1
    assert "no copy in the cache of the Hub (HF_HUB_OFFLINE is set)" in refused.stderr
