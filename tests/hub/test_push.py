"""What is pushed comes back as it was; what the Hub refuses is refused first; a push that failed can be repeated."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SERIALIZATIONS, computes_the_same, outputs
from covering import by_default, exhaustive
from fresh_process import run_fresh
from hub.server import TOKEN, Failure, LocalHub
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, dequantize_directory, quantize_, verify_model
from hf_trainweights.errors import ConfigError, SaveError
from hf_trainweights.files.digests import read_calibration
from hf_trainweights.files.weight_files import is_weight_file
from hf_trainweights.models.choosing import summary as summary_module

LLAMA = ARCHITECTURES["llama"]
THEIRS = "---\nlicense: mit\ntags:\n- mine\n---\n# My words\n"
OTHERS = {"README.md", "config.json", "generation_config.json", "trainweights_files.json"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return quantized("int4", group_size=32)


@pytest.fixture(scope="module")
def other() -> PreTrainedModel:
    """Return a model that computes something else."""
    return quantized("int8")


def quantized(*args: Any, **options: Any) -> PreTrainedModel:
    built = LLAMA.build()
    built.config.name_or_path = "someone/tiny-llama"
    quantize_(built, TrainWeightsConfig(*args, **options))
    return built


def pull(repo_id: str, cache: Path, **options: Any) -> PreTrainedModel:
    assert not cache.exists(), "an old cache would hide what the Hub does not hold"
    pulled, info = AutoModelForCausalLM.from_pretrained(repo_id, cache_dir=cache, output_loading_info=True, **options)
    assert {problem: keys for problem, keys in info.items() if keys} == {}
    return pulled


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---- round trips


@pytest.mark.slow
@pytest.mark.parametrize("serialization", by_default(("safetensors", "sharded_bin"), SERIALIZATIONS))
def test_what_is_pushed_comes_back(
    serialization: str, model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    options = SERIALIZATIONS[serialization]
    url = model.push_to_hub("me/model", commit_message="One", commit_description="More", **options)
    commit = list(local_hub.repositories["me/model"].commits.values())[-1]
    assert (commit.title, commit.description) == ("One", "More")
    assert url == f"{local_hub.url}/me/model/commit/{commit.sha}"

    pushed = local_hub.files("me/model")
    model.save_pretrained(tmp_path / "saved", **options)
    assert {name: data for name, data in pushed.items() if name != "README.md"} == contents(tmp_path / "saved")
    assert computes_the_same(pull("me/model", tmp_path / "cache"), model)
    assert verify_model(snapshot_download("me/model", cache_dir=tmp_path / "snapshot")).ok


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["safetensors", "bin"])
def test_what_is_saved_and_pushed_comes_back(
    serialization: str, model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    options = {"variant": "v", **SERIALIZATIONS[serialization]}
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model", commit_message="One", **options)
    assert local_hub.titles("me/model") == ["One"]
    assert local_hub.files("me/model") == contents(tmp_path / "model")
    assert computes_the_same(pull("me/model", tmp_path / "cache", variant="v"), model)
    # By default the repository is the user's own, called like the directory.
    model.save_pretrained(tmp_path / "model", push_to_hub=True)
    assert local_hub.titles("tester/model") == ["Upload model"]


@pytest.mark.slow
def test_what_calibration_was_worth_is_read_once_and_said_on_the_card(
    local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA.build()
    summary = quantize_(model, "int4", calibration=[{"input_ids": torch.arange(96).view(4, 24)}])
    model.save_pretrained(tmp_path)
    loaded, read = AutoModelForCausalLM.from_pretrained(tmp_path), []
    monkeypatch.setattr(summary_module, "read_calibration", lambda path: read.append(path) or read_calibration(path))
    loaded.push_to_hub("me/model")
    assert read == [tmp_path]
    assert f"The codes were {summary.calibrated}." in local_hub.files("me/model")["README.md"].decode()
    assert local_hub.files("me/model")["trainweights_files.json"] == (tmp_path / "trainweights_files.json").read_bytes()


@pytest.mark.slow
def test_a_given_state_dict_is_what_is_pushed(model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path) -> None:
    state_dict = {**model.state_dict(), "lm_head.weight": torch.full((96, 64), 3.0)}
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model", state_dict=state_dict)
    assert pull("me/model", tmp_path / "cache").lm_head.weight.eq(3.0).all()


@pytest.mark.slow
def test_weights_go_through_xet_where_the_hub_wants_it(
    model: PreTrainedModel, xet_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/model", max_shard_size="32KB")
    stored = xet_hub.repositories["me/model"].find("main")
    assert stored is not None
    shards = [file for name, file in stored.files.items() if name.endswith(".safetensors")]
    assert len(shards) > 1
    assert all(shard.xet_hash and not shard.content for shard in shards)
    assert computes_the_same(pull("me/model", tmp_path / "cache"), model)
    assert verify_model(snapshot_download("me/model", cache_dir=tmp_path / "cache")).ok


@pytest.mark.slow
def test_a_private_repository_needs_the_token(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    model.push_to_hub("me/model", private=True, token=TOKEN)
    assert local_hub.repositories["me/model"].private
    assert computes_the_same(pull("me/model", tmp_path / "cache", token=TOKEN), model)
    with pytest.raises(OSError, match="not a local folder and is not a valid model identifier"):
        pull("me/model", tmp_path / "nobody")


@pytest.mark.slow
def test_a_branch_is_made_and_holds_what_was_pushed_to_it(
    model: PreTrainedModel, other: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/model")
    other.push_to_hub("me/model", revision="eight")
    other.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/model", revision="again/eight")
    assert computes_the_same(pull("me/model", tmp_path / "main"), model)
    for branch in ("eight", "again/eight"):
        assert computes_the_same(pull("me/model", tmp_path / branch, revision=branch), other)
        assert "int8" in ModelCard(local_hub.files("me/model", branch)["README.md"].decode()).data.tags


@pytest.mark.slow
@pytest.mark.parametrize(
    ("earlier", "serialization"),
    [("sharded", "bin"), *exhaustive(("safetensors", "sharded"), ("bin", "safetensors"), ("sharded_bin", "sharded"))],
)
def test_weight_files_of_an_earlier_push_are_removed_in_the_same_commit(
    earlier: str,
    serialization: str,
    model: PreTrainedModel,
    other: PreTrainedModel,
    local_hub: LocalHub,
    tmp_path: Path,
) -> None:
    other.save_pretrained(tmp_path / "v", variant="v", push_to_hub=True, repo_id="me/model")
    other.push_to_hub("me/model", **SERIALIZATIONS[earlier])
    model.push_to_hub("me/model", **SERIALIZATIONS[serialization])
    model.save_pretrained(tmp_path / "saved", **SERIALIZATIONS[serialization])
    names = {name for name in local_hub.files("me/model") if name not in OTHERS}
    variant = {"model.v.safetensors", "trainweights_files.v.json"}
    assert names == {name for name in contents(tmp_path / "saved") if is_weight_file(name)} | variant
    assert len(local_hub.titles("me/model")) == 3
    assert computes_the_same(pull("me/model", tmp_path / "cache"), model)


@pytest.mark.slow
def test_a_dequantized_model_replaces_a_quantized_one(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/model", safe_serialization=False)
    plain = copy.deepcopy(model)
    plain.dequantize()
    for directory, options in (("safetensors", {}), ("bin", {"safe_serialization": False})):
        plain.push_to_hub("me/model", **options)
        assert "trainweights_files.json" not in local_hub.files("me/model")
        assert b"quantized" not in local_hub.files("me/model")["README.md"].partition(b"<!--")[0]
        assert computes_the_same(pull("me/model", tmp_path / directory), plain)


@pytest.mark.slow
def test_the_cards_own_snippet_loads_the_model_in_a_fresh_process(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/model")
    [code] = re.findall(r"```python\n(.*?)```", local_hub.files("me/model")["README.md"].decode(), re.DOTALL)
    torch.save((LLAMA.make_inputs()["input_ids"], outputs(model, LLAMA.make_inputs())[0]), tmp_path / "expected.pt")
    check = "import torch\nids, expected = torch.load('expected.pt')\nassert torch.equal(model(ids).logits, expected)\n"
    variables = {"HF_ENDPOINT": local_hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    program = f"{code}\n{check}print('equal')"
    done = run_fresh(program, cwd=tmp_path, environment={**variables, "HF_HUB_DISABLE_TELEMETRY": "1"})
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


# ---- the card


@pytest.mark.slow
def test_a_card_is_written_anew_until_someone_edits_it(
    model: PreTrainedModel, other: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/model", tags=["first"])
    assert ModelCard(local_hub.files("me/model")["README.md"].decode()).data.to_dict() == {
        "base_model": "someone/tiny-llama",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf-trainweights", "quantized", "int4", "first"],
    }
    other.push_to_hub("me/model")
    card = local_hub.files("me/model")["README.md"].decode()
    assert ModelCard(card).data.tags == ["hf-trainweights", "quantized", "int8"]
    # A model that was pulled knows its base from the card.
    pull("me/model", tmp_path / "cache").push_to_hub("me/model")
    assert local_hub.files("me/model")["README.md"].decode() == card
    assert len(local_hub.titles("me/model")) == 2, "nothing had changed"


@pytest.mark.slow
def test_a_card_on_the_hub_that_someone_wrote_is_kept(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    edit(local_hub, tmp_path, THEIRS)
    model.push_to_hub("me/model")
    assert local_hub.files("me/model")["README.md"].decode() == THEIRS
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/model", tags=["new"])
    card = ModelCard(local_hub.files("me/model")["README.md"].decode())
    assert (card.data.to_dict(), card.text) == ({"license": "mit", "tags": ["mine", "new"]}, "# My words\n")


def edit(hub: LocalHub, directory: Path, text: str) -> None:
    """Put a card on the Hub as a user does."""
    api = HfApi()
    api.create_repo("me/model", exist_ok=True)
    (directory / "edited.md").write_text(text)
    api.upload_file(path_or_fileobj=directory / "edited.md", path_in_repo="README.md", repo_id="me/model")
    assert hub.files("me/model")["README.md"].decode() == text


@pytest.mark.slow
def test_a_card_that_someone_edited_is_kept(model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path) -> None:
    model.push_to_hub("me/model")
    edited = local_hub.files("me/model")["README.md"].decode().replace("# model", "# My model")
    edit(local_hub, tmp_path, edited)
    model.push_to_hub("me/model", safe_serialization=False)
    assert local_hub.files("me/model")["README.md"].decode() == edited


@pytest.mark.slow
def test_a_card_in_the_directory_that_someone_wrote_is_kept_and_pushed(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text(THEIRS)
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model", tags=["new"])
    assert (tmp_path / "model" / "README.md").read_text() == THEIRS
    assert ModelCard(local_hub.files("me/model")["README.md"].decode()).data.tags == ["mine", "new"]


@pytest.mark.slow
def test_tags_of_the_model_are_tags_of_the_card(model: PreTrainedModel, local_hub: LocalHub) -> None:
    tagged = copy.deepcopy(model)
    tagged.add_model_tags("of-the-model")
    tagged.push_to_hub("me/model", tags="of-the-push")
    tags = ModelCard(local_hub.files("me/model")["README.md"].decode()).data.tags
    assert tags == ["hf-trainweights", "quantized", "int4", "of-the-model", "of-the-push"]
    assert tagged.model_tags == ["of-the-model"]


@pytest.mark.slow
def test_adapters_are_pushed_alone_and_come_back_on_the_quantized_base(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    model.push_to_hub("me/base")
    adapted = pull("me/base", tmp_path / "base")
    adapted.add_adapter(LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.push_to_hub("me/adapter")
    files = local_hub.files("me/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} < files.keys()
    assert not any(map(is_weight_file, files))
    card = ModelCard(files["README.md"].decode())
    assert card.data.to_dict() == {"library_name": "transformers"}
    assert "import hf_trainweights" in card.text
    assert "## Weights" not in card.text
    pulled = AutoModelForCausalLM.from_pretrained("me/adapter", cache_dir=tmp_path / "cache")
    assert computes_the_same(pulled, adapted)
    assert not computes_the_same(pulled, model)
    with pytest.raises(ConfigError, match=r"me/adapter: expected a model by itself, found an adapter"):
        dequantize_directory("me/adapter", tmp_path / "out")


# ---- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repo_id", "options", "error", "match"),
    [
        ("not a name", {}, HFValidationError, "Repo id must use alphanumeric"),
        ("a/b/c", {}, HFValidationError, "Repo id must be in the form"),
        ("me/model", {"token": False}, HfHubHTTPError, "401"),
        ("me/model", {"token": "wrong"}, HfHubHTTPError, "401"),
        ("me/model", {"revision": "missing", "create_pr": True}, HfHubHTTPError, "404"),
        ("me/model", {"safe_serialisation": False}, TypeError, "unexpected keyword argument 'safe_serialisation'"),
    ],
)
def test_what_the_hub_refuses_is_refused_before_anything_is_written(
    repo_id: str,
    options: dict[str, Any],
    error: type[Exception],
    match: str,
    model: PreTrainedModel,
    local_hub: LocalHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(error, match=match):
        model.save_pretrained(tmp_path / "new", push_to_hub=True, repo_id=repo_id, **options)
    monkeypatch.setattr(type(model), "save_pretrained", lambda *_, **__: pytest.fail("it was saved"))
    with pytest.raises(error, match=match):
        model.push_to_hub(repo_id, **options)
    assert not (tmp_path / "new").exists()
    assert not any(request.path.endswith(("/preupload/main", "/commit/main")) for request in local_hub.requests)


def test_offline_nothing_is_written(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(OfflineModeIsEnabled, match="offline mode is enabled"):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, *exhaustive(503)])
def test_a_push_that_fails_says_so_changes_nothing_and_can_be_repeated(
    status: int, model: PreTrainedModel, other: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    other.push_to_hub("me/model")
    before = local_hub.files("me/model")
    local_hub.failures.append(Failure("POST */commit/main", status))
    with pytest.raises(SaveError, match=rf"me/model: expected the Hub to take.*{status}.*: push again\.$") as raised:
        model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model")
    assert isinstance(raised.value.__cause__, HfHubHTTPError)
    assert local_hub.failures == []
    assert local_hub.files("me/model") == before
    assert verify_model(tmp_path / "model").ok, "what was saved is whole"
    model.push_to_hub("me/model")
    assert computes_the_same(pull("me/model", tmp_path / "cache"), model)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_for_the_card_does_not_lose_it(
    model: PreTrainedModel, local_hub: LocalHub, tmp_path: Path
) -> None:
    edit(local_hub, tmp_path, THEIRS)
    # Not 503: the client would try again, for half a minute.
    local_hub.failures.append(Failure("HEAD */README.md", 403))
    with pytest.raises(LocalEntryNotFoundError, match="cannot find the requested files"):
        model.push_to_hub("me/model")
    assert local_hub.files("me/model")["README.md"].decode() == THEIRS


def test_a_pull_of_what_is_not_there_is_an_error(local_hub: LocalHub, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError, match="404"):
        snapshot_download("me/missing", cache_dir=tmp_path)
    assert [request.status for request in local_hub.requests] == [404]
