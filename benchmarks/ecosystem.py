"""Quantized models in other people's packages: what works, with the versions that it was tried with.

    pip install --no-deps --target /tmp/ecosystem trl datasets diffusers lm-eval fastapi uvicorn openai ...
    PYTHONPATH=/tmp/ecosystem python -m benchmarks.ecosystem

Every flow runs on a tiny model, without a network. It writes results/ecosystem.json; a package that is missing is
recorded as such.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    pipeline,
)

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, load_file, quantize_, save_file

RESULTS = Path(__file__).parent / "results" / "ecosystem.json"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
INT8 = TrainWeightsConfig("int8")
SERVER_SECONDS = 120
RUN = [sys.executable, "-m", "hf_trainweights", "run"]

Flow = Callable[[Path], None]


def count_quantized(module: nn.Module) -> int:
    return sum(isinstance(parameter, QuantizedTensor) for parameter in module.parameters())


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = ("<pad>", "<eos>", "<unk>")
    inner = Tokenizer(models.BPE(alphabet | {token: len(alphabet) + n for n, token in enumerate(special)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return wrapped


def llama(directory: Path) -> Path:
    tokens = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokens), eos_token_id=tokens.eos_token_id, pad_token_id=0, **SIZES)
    LlamaForCausalLM(config).save_pretrained(directory / "llama")
    tokens.save_pretrained(directory / "llama")
    return directory / "llama"


def quantized_llama(directory: Path) -> Path:
    source = llama(directory)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=INT8)
    model.save_pretrained(directory / "quantized")
    AutoTokenizer.from_pretrained(source).save_pretrained(directory / "quantized")
    return directory / "quantized"


def sentence_encoder(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokens = tokenizer()
    BertModel(BertConfig(vocab_size=len(tokens), **SIZES)).save_pretrained(directory / "bert")
    tokens.save_pretrained(directory / "bert")
    encoder = Transformer(str(directory / "bert"))
    return SentenceTransformer(modules=[encoder, Pooling(64)], device="cpu")


def sentence_transformers_load_save_reload(directory: Path) -> None:
    from sentence_transformers import SentenceTransformer

    sentence_encoder(directory).save(str(directory / "float"))
    options = {"quantization_config": INT8}
    model = SentenceTransformer(str(directory / "float"), model_kwargs=options, device="cpu")
    assert count_quantized(model) == 13
    model.save(str(directory / "int8"))
    reloaded = SentenceTransformer(str(directory / "int8"), device="cpu")
    assert count_quantized(reloaded) == 13
    assert (model.encode(["a b c"]) == reloaded.encode(["a b c"])).all()


def sentence_transformers_quantize_save_reload(directory: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = sentence_encoder(directory)
    quantize_(model, INT8)
    model.save(str(directory / "int8"))
    reloaded = SentenceTransformer(str(directory / "int8"), device="cpu")
    assert count_quantized(reloaded) == count_quantized(model)
    assert (model.encode(["a b c"]) == reloaded.encode(["a b c"])).all()


def pipeline_text_generation(directory: Path) -> None:
    source = llama(directory)
    generate = pipeline("text-generation", str(source), model_kwargs={"quantization_config": INT8})
    assert count_quantized(generate.model) == 14
    assert generate("a b", max_new_tokens=4)[0]["generated_text"].startswith("a b")


def pipeline_feature_extraction(directory: Path) -> None:
    sentence_encoder(directory)
    extract = pipeline("feature-extraction", str(directory / "bert"), model_kwargs={"quantization_config": INT8})
    assert count_quantized(extract.model) >= 12
    assert len(extract("a b")[0][0]) == 64


def pipeline_speech(directory: Path) -> None:
    # Its decoder is asked for timestamps, which the tokenizer of a tiny model does not have.
    tokens = tokenizer()
    tokens._decode_asr = lambda outputs, **_: (tokens.decode(outputs[0]["tokens"][0]), {})
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 80}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1)
    config = WhisperConfig(vocab_size=len(tokens), max_target_positions=32, **sizes, **heads, **special)
    WhisperForConditionalGeneration(config).save_pretrained(directory)
    tokens.save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)
    options = {"quantization_config": INT8}
    model = WhisperForConditionalGeneration.from_pretrained(directory, **options)
    extractor = WhisperFeatureExtractor()
    hear = pipeline("automatic-speech-recognition", model, tokenizer=tokens, feature_extractor=extractor)
    assert count_quantized(hear.model) > 0
    assert "text" in hear(torch.zeros(16000).numpy(), generate_kwargs={"max_new_tokens": 3})


def pipeline_vision(directory: Path) -> None:
    from PIL import Image

    config = ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES)
    ViTForImageClassification(config).save_pretrained(directory)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(directory)
    see = pipeline("image-classification", str(directory), model_kwargs={"quantization_config": INT8})
    assert count_quantized(see.model) >= 12
    assert len(see(Image.new("RGB", (16, 16)))) == 3


def trl_sft_with_lora(directory: Path) -> None:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    source = quantized_llama(directory)
    model = AutoModelForCausalLM.from_pretrained(source)
    # Rows that are tokenized and have a fingerprint: datasets would pickle the table, which not all versions can.
    prepared = {"skip_prepare_dataset": True}
    steps = {"max_steps": 2, "per_device_train_batch_size": 2}
    arguments = SFTConfig(
        str(directory / "run"), report_to=[], use_cpu=True, bf16=False, dataset_kwargs=prepared, **steps
    )
    tokens = AutoTokenizer.from_pretrained(source)
    rows = [tokens("a b c d e f").input_ids] * 8
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    dataset = Dataset(InMemoryTable.from_pydict({"input_ids": rows, "labels": rows}), fingerprint="rows")
    trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokens, peft_config=adapter)
    result = trainer.train()
    assert count_quantized(trainer.model) == 14
    assert result.training_loss > 0
    assert (directory / "run" / "checkpoint-2" / "adapter_model.safetensors").exists()


def unet() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(**sizes, **blocks).eval()


def diffusers_load_save_reload(directory: Path) -> None:
    from diffusers import UNet2DModel

    import hf_trainweights.diffusers  # noqa: F401

    unet().save_pretrained(directory / "float")
    model = UNet2DModel.from_pretrained(directory / "float", quantization_config=INT8)
    model.save_pretrained(directory / "int8")
    reloaded = UNet2DModel.from_pretrained(directory / "int8")
    assert count_quantized(reloaded) == count_quantized(model) > 0
    assert torch.equal(reloaded(torch.ones(1, 3, 8, 8), 1).sample, model(torch.ones(1, 3, 8, 8), 1).sample)


def diffusers_pipeline(directory: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, PipelineQuantizationConfig

    import hf_trainweights.diffusers  # noqa: F401

    DDPMPipeline(unet(), DDPMScheduler()).save_pretrained(directory / "float")
    config = PipelineQuantizationConfig(quant_mapping={"unet": INT8})
    DDPMPipeline.from_pretrained(directory / "float", quantization_config=config).save_pretrained(directory / "int8")
    reloaded = DDPMPipeline.from_pretrained(directory / "int8")
    assert count_quantized(reloaded.unet) > 0
    assert reloaded(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 3)


def diffusers_save_file_and_load(directory: Path) -> None:
    """Save a component as config.json and one safetensors file, and load it without a float copy."""
    from diffusers import UNet2DModel

    model = unet()
    quantize_(model, INT8)
    expected = model(torch.ones(1, 3, 8, 8), 1).sample
    model.save_config(directory)
    save_file(model, directory / "diffusion_pytorch_model.safetensors")
    with torch.device("meta"):
        reloaded = UNet2DModel.from_config(UNet2DModel.load_config(directory)).eval()
    reloaded.load_state_dict(load_file(directory / "diffusion_pytorch_model.safetensors"), assign=True)
    assert count_quantized(reloaded) == count_quantized(model) > 0
    assert torch.equal(reloaded(torch.ones(1, 3, 8, 8), 1).sample, expected)


def accelerate_dispatch(directory: Path) -> None:
    from accelerate import cpu_offload

    model = AutoModelForCausalLM.from_pretrained(quantized_llama(directory))
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(tokens).logits, expected)


def accelerate_save_state_with_lora(directory: Path) -> None:
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(quantized_llama(directory))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(str(directory / "state"))
    accelerator.load_state(str(directory / "state"))


def transformers_serve(directory: Path) -> None:
    """Serve a quantized model over HTTP by `trainweights run transformers serve`."""
    source = quantized_llama(directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["transformers", "serve", str(source), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = (directory / "log").open("w+")
    server = subprocess.Popen([*RUN, *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        messages = [{"role": "user", "content": "a b"}]
        body = {"model": str(source), "messages": messages, "max_tokens": 4, "stream": False}
        answer = _ask(server, f"http://127.0.0.1:{port}/v1/chat/completions", body, directory / "log")
        assert answer["choices"][0]["message"]["role"] == "assistant"
    finally:
        server.terminate()
        server.wait()
        log.close()


def _ask(server: subprocess.Popen[bytes], url: str, body: dict[str, Any], log: Path) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as response:
                return json.loads(response.read())
        except ConnectionError:
            time.sleep(0.5)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.5)
    raise RuntimeError(log.read_text()[-600:])


def lm_evaluation_harness(directory: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(str(quantized_llama(directory)), device="cpu", batch_size=2, dtype="float32")
    assert count_quantized(lm.model) == 14
    requests = [Instance("loglikelihood", {}, ("a b", ending), number) for number, ending in enumerate((" c", " d"))]
    assert all(score < 0 for score, _ in lm.loglikelihood(requests))


def lm_evaluation_harness_command(directory: Path) -> None:
    """Measure a quantized model by `trainweights run lm_eval`, on a task of three lines."""
    lines = [json.dumps({"text": text}) for text in ("a b c", "d e f", "g h i")]
    (directory / "lines.jsonl").write_text("\n".join(lines))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(directory / "lines.jsonl")}}
    task = {"task": "lines", **data, "test_split": "train", "output_type": "loglikelihood_rolling"}
    task |= {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]}
    (directory / "lines.yaml").write_text(json.dumps(task))
    model = ["--model", "hf", "--model_args", f"pretrained={quantized_llama(directory)}", "--device", "cpu"]
    output = ["--tasks", "lines", "--include_path", str(directory), "--output_path", str(directory / "out")]
    done = subprocess.run([*RUN, "lm_eval", *model, *output], capture_output=True, text=True, check=False)
    results = [json.loads(path.read_text()) for path in (directory / "out").rglob("results*.json")]
    if not results:
        raise RuntimeError(done.stderr[-600:])
    assert results[0]["results"]["lines"]["bits_per_byte,none"] > 0


FLOWS: dict[str, tuple[str, Flow]] = {
    flow.__name__: (package, flow)
    for package, flow in (
        ("sentence-transformers", sentence_transformers_load_save_reload),
        ("sentence-transformers", sentence_transformers_quantize_save_reload),
        ("transformers", pipeline_text_generation),
        ("transformers", pipeline_feature_extraction),
        ("transformers", pipeline_speech),
        ("transformers", pipeline_vision),
        ("transformers", transformers_serve),
        ("trl", trl_sft_with_lora),
        ("diffusers", diffusers_load_save_reload),
        ("diffusers", diffusers_pipeline),
        ("diffusers", diffusers_save_file_and_load),
        ("accelerate", accelerate_dispatch),
        ("accelerate", accelerate_save_state_with_lora),
        ("lm-eval", lm_evaluation_harness),
        ("lm-eval", lm_evaluation_harness_command),
    )
}


def run(name: str) -> dict[str, str]:
    """Return the outcome of one flow: `works`, or the error in one line."""
    package, flow = FLOWS[name]
    try:
        row = {"package": package, "version": version(package)}
    except PackageNotFoundError:
        return {"package": package, "version": "", "outcome": "not installed"}
    with tempfile.TemporaryDirectory() as directory:
        try:
            flow(Path(directory))
        except Exception as error:
            reason = " ".join(str(error).split()).replace(directory, "DIR")[:300]
            return {**row, "outcome": f"{type(error).__name__}: {reason}"}
    return {**row, "outcome": "works"}


def main() -> None:
    """Run all flows, or those that are named, and write what came of them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    names = sys.argv[1:] or list(FLOWS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {name: row for name, row in results.get("flows", {}).items() if name in FLOWS}
    for name in names:
        rows[name] = run(name)
        print(f"{name:<45} {rows[name]['outcome']}", flush=True)
    versions = {package: version(package) for package in ("hf_trainweights", "torch", "transformers")}
    results |= {"versions": versions, "flows": rows}
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
