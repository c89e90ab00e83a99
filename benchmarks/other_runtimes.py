"""OpenVINO and CTranslate2 as programs of `benchmarks.beside_llama_cpp`, each with its own quantized weights.

`pip install --no-deps openvino nncf tabulate ctranslate2` beside the tested versions suffices. Both quantize the
float weights themselves: OpenVINO to int8 with one scale a row or int4 in groups of 32, CTranslate2 to int8, which also
rounds activations to 8 bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from tests.tiny_tokenizers import byte_level

Clock = Callable[[], float]


def runtimes(model: LlamaForCausalLM, form: str, threads: int, sizes: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Yield the runtimes that are installed, each with its name, for a float model.

    Args:
        model: The model, in float32; it is not kept.
        form: "int8" or "int4".
        threads: The threads of a runtime.
        sizes: The numbers of tokens and texts: "prompt", "new", "batch" and "batch_prompt".
    """
    if importlib.util.find_spec("openvino") and importlib.util.find_spec("nncf"):
        yield "OpenVINO", OpenVino(model, form, threads, sizes)
    # CTranslate2 has no int4 on CPUs.
    if form == "int8" and importlib.util.find_spec("ctranslate2"):
        yield "CTranslate2", CTranslate2(model, threads, sizes)


class CTranslate2:
    """CTranslate2 with int8 weights."""

    def __init__(self, model: LlamaForCausalLM, threads: int, sizes: dict[str, int]):
        runtime: Any = importlib.import_module("ctranslate2")
        self._sizes, tokenizer = sizes, byte_level()
        self._tokens = tokenizer.convert_ids_to_tokens([index % 256 for index in range(sizes["prompt"])])
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            converted = Path(directory) / "converted"
            runtime.converters.TransformersConverter(directory).convert(converted, quantization="int8")
            self._generator = runtime.Generator(
                str(converted), device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
            )

    def run(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of the prompt, of a token after it, and of a step of several texts."""
        sizes = self._sizes
        prompt, whole = (self._seconds(clock, 1, sizes["prompt"], new) for new in (1, 1 + sizes["new"]))
        batch = [self._seconds(clock, sizes["batch"], sizes["batch_prompt"], new) for new in (1, 1 + sizes["new"])]
        return {
            "prompt": prompt,
            "token": (whole - prompt) / sizes["new"],
            "batch": (batch[1] - batch[0]) / sizes["new"],
        }

    def _seconds(self, clock: Clock, texts: int, prompt: int, new: int) -> float:
        options = {"max_length": new, "min_length": new, "sampling_topk": 1, "include_prompt_in_result": False}
        start = clock()
        self._generator.generate_batch([self._tokens[:prompt]] * texts, **options)
        return clock() - start


class OpenVino:
    """OpenVINO, which keeps keys and values as states of its compiled model."""

    def __init__(self, model: LlamaForCausalLM, form: str, threads: int, sizes: dict[str, int]):
        openvino: Any = importlib.import_module("openvino")
        self._sizes = sizes
        converted = _compressed(_stateful(model), form)
        properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "bf16"}
        compiled = openvino.Core().compile_model(converted, "CPU", properties)
        attention = {str(op.get_rt_info()["layerType"].astype(str)) for op in compiled.get_runtime_model().get_ops()}
        # Without this op each token copies all keys and values, and the figures would not be OpenVINO's best.
        assert "ScaledDotProductAttention" in attention
        self._request = compiled.create_infer_request()

    def run(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of the prompt, of a token after it, and of a step of several texts."""
        sizes = self._sizes
        prompt = self._seconds(clock, 1, sizes["prompt"])
        token = self._steps(clock, 1)
        self._seconds(clock, sizes["batch"], sizes["batch_prompt"])
        return {"prompt": prompt, "token": token, "batch": self._steps(clock, sizes["batch"])}

    def _seconds(self, clock: Clock, texts: int, prompt: int) -> float:
        self._request.reset_state()
        start = clock()
        self._infer(np.arange(prompt)[None].repeat(texts, 0))
        return clock() - start

    def _steps(self, clock: Clock, texts: int) -> float:
        ids = np.ones((texts, 1), np.int64)
        start = clock()
        for _ in range(self._sizes["new"]):
            ids = self._infer(ids)[:, -1:].argmax(-1)
        return (clock() - start) / self._sizes["new"]

    def _infer(self, ids: np.ndarray) -> np.ndarray:
        beams = np.arange(len(ids), dtype=np.int32)
        return self._request.infer({"ids": ids.astype(np.int64), "beams": beams})["logits"]


class _Step(nn.Module):
    """A step of a model whose keys and values are inputs and outputs."""

    def __init__(self, model: LlamaForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of the last token, and all keys and values."""
        cache = DynamicCache(config=self.model.config)
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            layer.keys, layer.values = states[2 * index : 2 * index + 2]
            layer.dtype, layer.device, layer.is_initialized = torch.float32, ids.device, True
        logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
        return (logits, *(state for layer in layers for state in (layer.keys, layer.values)))


def _stateful(model: LlamaForCausalLM) -> Any:
    """Convert a model, and make its keys and values states that a step appends to."""
    openvino: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    transformations: Any = importlib.import_module("openvino._offline_transformations")
    config: Any = model.config
    heads, columns = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    states = [torch.zeros(2, heads, 3, columns) for _ in range(2 * config.num_hidden_layers)]
    free = torch.export.Dim.AUTO
    shapes = ({0: free, 1: free}, tuple({0: free, 2: free} for _ in states))
    with torch.no_grad():
        inputs = torch.ones(2, 5, dtype=torch.long), *states
        converted = openvino.convert_model(torch.export.export(_Step(model), inputs, dynamic_shapes=shapes))
    names = [f"state_{index}" for index in range(len(states))]
    for port, name in zip(converted.inputs, ["ids", *names], strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(converted.outputs, ["logits", *(f"new_{name}" for name in names)], strict=True):
        port.get_tensor().set_names({name})
    converted.reshape({"ids": [-1, -1], **{name: [-1, heads, -1, columns] for name in names}})
    # OpenVINO appends to states in place only where a search with beams could reorder them.
    beams = ops.parameter(name="beams", dtype=openvino.Type.i32, shape=openvino.PartialShape([-1]))
    beams.output(0).get_tensor().add_names({"beams"})
    converted.add_parameters([beams])
    for name in names:
        port = converted.input(name)
        readers = port.get_target_inputs()
        gathered = ops.gather(port, beams, ops.constant(0)).output(0)
        for reader in readers:
            reader.replace_source_output(gathered)
    converted.validate_nodes_and_infer_types()
    transformations.apply_make_stateful_transformation(converted, {name: f"new_{name}" for name in names})
    _set_initial_states(converted, ops, heads, columns)
    return converted


def _set_initial_states(converted: Any, ops: Any, heads: int, columns: int) -> None:
    """Let the states begin without a token, for as many texts as the input has."""
    texts = ops.gather(ops.shape_of(converted.input("ids"), output_type="i64"), ops.constant([0]), ops.constant(0))
    rest = [ops.constant([size], dtype=np.int64) for size in (heads, 0, columns)]
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([texts, *rest], 0))
    for op in converted.get_ops():
        if op.get_type_name() == "ReadValue":
            op.set_arguments([empty.output(0)])
    converted.validate_nodes_and_infer_types()


def _compressed(converted: Any, form: str) -> Any:
    """Quantize the weights of a converted model, embeddings and the head too."""
    nncf: Any = importlib.import_module("nncf")
    if form == "int8":
        return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
    mode = nncf.CompressWeightsMode.INT4_SYM
    return nncf.compress_weights(converted, mode=mode, group_size=32, ratio=1.0, all_layers=True)
