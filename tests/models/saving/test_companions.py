"""The files beside the weights are copied, and nothing that lies elsewhere on the machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.models.saving.new_directories import companions, copy_companions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a snapshot as the Hub's cache has it: links to what all snapshots of a repository share."""
    repository = tmp_path / "models--us--model"
    snapshot = repository / "snapshots" / "0123"
    for folder in (snapshot / "1_Pooling", repository / "blobs"):
        folder.mkdir(parents=True)
    for number, name in enumerate(("config.json", "tokenizer.json", "1_Pooling/config.json")):
        (repository / "blobs" / f"{number}").write_text(name)
        (snapshot / name).symlink_to(repository / "blobs" / f"{number}")
    return snapshot


def test_links_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    copy_companions(model, tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*.json")}
    assert {name: path.read_text() for name, path in found.items()} == {
        name: name for name in ("tokenizer.json", "1_Pooling/config.json")
    }
    assert not any(path.is_symlink() for path in found.values())


def test_a_link_to_another_file_of_the_model_is_followed(model: Path, tmp_path: Path) -> None:
    (model / "notes.txt").symlink_to("tokenizer.json")
    copy_companions(model, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "tokenizer.json"


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "1_Pooling/modules.json", "2_Dense"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_out_of_the_model_is_refused(model: Path, tmp_path: Path, name: str, absolute: bool) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    target = secret if name == "2_Dense" else secret / "key"
    up = Path(*[".."] * (len(model.relative_to(tmp_path).parts) + name.count("/")))
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target if absolute else up / target.relative_to(tmp_path))
    for call in (companions, lambda folder: copy_companions(folder, tmp_path / "out")):
        with pytest.raises(CorruptFileError, match=r"expected a file in .*, found a link to .*secret/key"):
            call(model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "2_Router/router_config.json",
        "2_Router/document_0_Dense/model.safetensors",
        "pooling/config.json",
        "heads/query/config.json",
        "qformer_tokenizer/tokenizer.json",
        "speaker_embeddings/v2/en_speaker_0.npy",
        "additional_chat_templates/rag.jinja",
    ],
)
def test_all_files_in_the_folders_of_modules_and_processors_are_copied(model: Path, tmp_path: Path, name: str) -> None:
    paths = ["", "1_Pooling", "2_Router", "3_Normalize", "pooling", "heads/query"]
    (model / "modules.json").write_text(json.dumps([{"path": path} for path in paths]))
    for file in (name, f"{name}.d/.cache/weights.bin"):
        (model / file).parent.mkdir(parents=True, exist_ok=True)
        (model / file).write_text(name)
    copy_companions(model, tmp_path / "out")
    copied = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert copied == {"modules.json", "tokenizer.json", "1_Pooling/config.json", name}


@pytest.mark.parametrize(
    "folder", ["original", "onnx", "openvino", "checkpoint-10", "global_step10", "runs", "pytorch_model_fsdp_0"]
)
def test_folders_of_weights_and_training_state_are_not_copied(model: Path, folder: str) -> None:
    (model / folder).mkdir()
    (model / folder / "config.json").write_text("{}")
    assert [path.relative_to(model).as_posix() for path in companions(model)] == [
        "1_Pooling/config.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"path": "../secret"}]', "expected paths of folders in .*, found '../secret'"),
        ('[{"path": "/etc"}]', "expected paths of folders in .*, found '/etc'"),
        ('[{"path": "1_Pooling/../../secret"}]', "expected paths of folders in "),
        ('[{"path": 1}]', "expected paths of folders in .*, found 1"),
        ('{"path": ""}', "expected a list of modules, each with a path"),
        ("[{}]", "expected a list of modules, each with a path"),
        ("[", "expected a list of modules, each with a path"),
    ],
)
def test_modules_that_lie_elsewhere_are_refused(model: Path, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "secret").mkdir()
    (model / "modules.json").write_text(text)
    with pytest.raises(CorruptFileError, match=expected):
        companions(model)


@pytest.mark.parametrize(
    "name",
    [
        *("abc.anchor", "trainweights.json", "trainweights_state.pt", "_trainweights_run.json", "_trainweights-0123"),
        *("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json", "scaler.pt"),
        *("random_states_0.pkl", "custom_checkpoint_0.pkl", "sampler.bin", "latest", "zero_to_fp32.py"),
        *("tf_model.h5", "64.tflite", "model.onnx", "ggml-model.gguf", "consolidated.00.pth", "model.pdparams"),
        *("model.safetensors.index.fp16.json", "pytorch_model.bin.index.json", ".gitattributes"),
    ],
)
def test_training_state_and_weights_are_not_copied(model: Path, name: str) -> None:
    (model / name).write_text("{}")
    assert name not in {path.name for path in companions(model)}
