"""Components of diffusers through their own `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.files.safetensors_file import read_safetensors_header

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("hf_trainweights.diffusers")

pytestmark = pytest.mark.slow  # importing diffusers takes seconds

INPUTS = (torch.linspace(-1, 1, 192).view(1, 3, 8, 8), 1)
INT4 = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*to_q": "int8", "re:.*to_k": None})
FILE = "diffusion_pytorch_model.safetensors"


def quantized(model: nn.Module) -> dict[str, str]:
    return {name: str(p.format) for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    directory = tmp_path_factory.mktemp("float")
    diffusers.UNet2DModel(**sizes, **blocks).save_pretrained(directory)
    return directory


def load(directory: Path, config: TrainWeightsConfig | None = None, **options: Any) -> Any:
    options |= {} if config is None else {"quantization_config": config}
    return diffusers.UNet2DModel.from_pretrained(directory, **options)


@torch.no_grad()
def output(model: nn.Module) -> torch.Tensor:
    return model(INPUTS[0].to(model.dtype), INPUTS[1]).sample


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", [TrainWeightsConfig("int8"), INT4, TrainWeightsConfig("coded", compress=True)])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}, {"safe_serialization": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reloading_gives_equal_outputs(
    source: Path, tmp_path: Path, config: TrainWeightsConfig, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = load(source, config, torch_dtype=dtype)
    assert len(quantized(model)) > 20
    assert (output(model) - output(load(source, torch_dtype=dtype))).norm() < 0.2 * output(model).norm()
    model.save_pretrained(tmp_path, **options)
    reloaded = load(tmp_path, torch_dtype=dtype, use_safetensors=options.get("safe_serialization", True))
    assert quantized(reloaded) == quantized(model)
    assert torch.equal(output(reloaded), output(model))


def test_a_component_is_saved_over_the_file_that_it_was_loaded_from(source: Path, tmp_path: Path) -> None:
    load(source, TrainWeightsConfig("int8")).save_pretrained(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    load(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_without_a_dtype_devices_are_chosen_and_what_stays_float_is_float32(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusers.UNet2DModel, "_no_split_modules", [])  # without it "auto" is refused
    load(source, torch_dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, TrainWeightsConfig("int8"), device_map="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config["_pre_quantization_dtype"] == torch.float32
    output(model)


def test_the_memory_footprint_is_that_of_the_stored_tensors(source: Path) -> None:
    model, stays = load(source, TrainWeightsConfig("int8")), load(source)
    saved = sum(p.nbytes - p.stored_bytes for p in model.parameters() if isinstance(p, QuantizedTensor))
    assert saved > 0
    assert model.get_memory_footprint() == stays.get_memory_footprint() - saved


def test_overrides_hold(source: Path) -> None:
    formats = quantized(load(source, INT4))
    assert formats["time_embedding.linear_1.weight"] == "int4 g32"
    assert formats["mid_block.attentions.0.to_q.weight"] == "int8"
    assert "mid_block.attentions.0.to_k.weight" not in formats


def test_a_pipeline_saves_and_loads_its_quantized_component(source: Path, tmp_path: Path) -> None:
    diffusers.DDPMPipeline(load(source), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "float")
    config = diffusers.PipelineQuantizationConfig(quant_mapping={"unet": TrainWeightsConfig("int8")})
    pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path / "float", quantization_config=config)
    pipeline.save_pretrained(tmp_path / "int8")
    reloaded = diffusers.DDPMPipeline.from_pretrained(tmp_path / "int8")
    assert quantized(reloaded.unet) == quantized(pipeline.unet)
    assert torch.equal(output(reloaded.unet), output(pipeline.unet))


def test_a_dequantized_component_is_saved_as_a_float_one(source: Path, tmp_path: Path) -> None:
    model = load(source, TrainWeightsConfig("int8"))
    expected = output(model)
    model.dequantize().save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    torch.testing.assert_close(output(load(tmp_path)), expected)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"config": TrainWeightsConfig(bits=5)}, "expected a format, found bits or size"),
        ({"config": TrainWeightsConfig("int8"), "device_map": {"": "disk"}}, "memory for every weight"),
        ({"config": TrainWeightsConfig("int8", modules_to_not_convert=["nowhere"])}, "nowhere"),
    ],
)
def test_what_cannot_be_quantized_is_refused(source: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(source, **options)


def test_a_weight_with_nan_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    model = load(source)
    model.time_embedding.linear_1.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(QuantizationError, match=r"time_embedding\.linear_1\.weight"):
        load(tmp_path, TrainWeightsConfig("int8"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("time_embedding.linear_1._weight_scale", "time_embedding.linear_1._weight_scalf"), "scale beside"),
        (("time_embedding.linear_1._weight_", "time_embedding.linear_9._weight_"), r"none of time_embedding\.linear_1"),
        (
            ("up_blocks.0.attentions.1.to_v._", "up_blocks.9.attentions.1.to_v._"),
            r"none of up_blocks\.0\.attentions",
        ),
    ],
)
def test_a_weight_that_the_file_lacks_is_named(
    source: Path, tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    load(source, TrainWeightsConfig("int8")).save_pretrained(tmp_path)
    old, new = (name.encode() for name in change)
    before = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(before.replace(old, new))
    assert (tmp_path / FILE).read_bytes() != before
    with pytest.raises(CorruptFileError, match=problem):
        load(tmp_path)


def test_a_weight_of_another_shape_is_refused(source: Path, tmp_path: Path) -> None:
    load(source, TrainWeightsConfig("int8")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"attention_head_dim": 8, "block_out_channels": [32, 96]})
    )
    with pytest.raises((CorruptFileError, ValueError), match="shape"):
        load(tmp_path)


def test_guards_lie_under_the_names_of_weights(source: Path, tmp_path: Path) -> None:
    load(source, TrainWeightsConfig("int8")).save_pretrained(tmp_path)
    header = read_safetensors_header(tmp_path / FILE)
    assert header["time_embedding.linear_1.weight"]["shape"] == [1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_fusing_an_adapter_says_once_what_rounding_has_cost(is_pipeline: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 32}
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("UpBlock2D",) * 2}
    unet = diffusers.UNet2DConditionModel(**sizes, **blocks, attention_head_dim=8)
    quantize_(unet, TrainWeightsConfig("int8"))
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    fused = unet
    if is_pipeline:
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
        fused = diffusers.StableDiffusionPipeline(
            unet=unet,
            scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
            **parts,
            requires_safety_checker=False,
        )
    arguments = {"components": ["unet"]} if is_pipeline else {}
    layers = sum(hasattr(module, "merged_adapters") for module in unet.modules())
    for call in (fused.fuse_lora, fused.unfuse_lora):
        with pytest.warns(UserWarning, match=f"^{layers} quantized weights were changed and rounded to int8") as told:
            call(**arguments)
        assert len(told) == 1
