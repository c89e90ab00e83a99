"""Compiled models read a `KVCache` within their program: no graph breaks, and the logits of eager mode."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from cache.cached_models import KINDS, VOCAB, llama, mistral, prompt
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_trainweights import KVCache
from hf_trainweights.cache import programs
from hf_trainweights.cache.layers import KVLayer
from hf_trainweights.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.slow


def compiled(model: Any, fullgraph: bool = True, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model.forward, fullgraph=fullgraph, backend=backend)


def filled(model: Any, kind: Any = "int8", count: int = 70, batch: int = 2) -> Any:
    cache = KVCache(model.config, kind)
    model(prompt(count, batch)["input_ids"], past_key_values=cache)
    return cache


def steps(forward: Any, cache: Any, count: int, batch: int = 2) -> Tensor:
    tokens, logits = torch.ones(batch, 1, dtype=torch.long), []
    for _ in range(count):
        logits.append(forward(tokens, past_key_values=cache).logits)
        tokens = logits[-1][:, -1:].argmax(-1)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", [*KINDS, ("int8", "bf16")], ids=str)
@torch.no_grad()
def test_one_program_serves_all_steps_and_the_next_cache(kind: Any) -> None:
    model = llama()
    forward = compiled(model)
    # So many that the codes move to a larger room twice.
    for cache, own in ((filled(model, kind), filled(model, kind)) for _ in range(2)):
        assert torch.equal(steps(forward, cache, 90), steps(model, own, 90))
        assert cache.get_seq_length() == own.get_seq_length() == 160
    # The second has the number of tokens as an argument.
    assert counters["stats"]["unique_graphs"] <= 2


@torch.no_grad()
def test_the_program_of_inductor_gives_nearly_the_logits_of_eager_mode() -> None:
    model = llama()
    actual = steps(compiled(model, backend="inductor"), filled(model), 5)
    expected = steps(model, filled(model), 5)
    assert (actual - expected).norm() <= 0.02 * expected.norm()


@torch.no_grad()
def test_several_tokens_at_once_and_left_padding() -> None:
    model = llama()
    forward = compiled(model)
    mask = torch.ones(2, 79, dtype=torch.long)
    mask[0, :17] = 0
    ids = prompt(9)["input_ids"]
    outs = []
    for each in (forward, model):
        cache = KVCache(model.config, "int8")
        model(prompt(70)["input_ids"], attention_mask=mask[:, :70], past_key_values=cache)
        outs.append(each(ids, attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*outs)


@torch.no_grad()
def test_tokens_before_a_window_are_forgotten_within_the_program() -> None:
    model = mistral()
    forward = compiled(model)
    cache, own = filled(model), filled(model)
    assert torch.equal(steps(forward, cache, 300), steps(model, own, 300))
    assert cache.layers[0].dropped == own.layers[0].dropped > 0


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_generate_takes_a_compiled_model(options: dict[str, Any]) -> None:
    model = llama()
    inputs = prompt(batch=1)
    options = {**inputs, **options, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**options, past_key_values=KVCache(model.config, "int8"))
    model.forward = compiled(model, fullgraph=False)
    actual = model.generate(**options, past_key_values=KVCache(model.config, "int8"))
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_stored_tokens_cross_from_one_program_to_the_next() -> None:
    model = llama()
    forward, cache = compiled(model, fullgraph=False), filled(model)
    attention, own = ALL_ATTENTION_FUNCTIONS["sdpa"], filled(model)

    def break_and_attend(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return attention(*args, **kwargs)

    expected = steps(model, own, 3)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = break_and_attend
    try:
        actual = steps(forward, cache, 3)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    assert (actual - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@torch.no_grad()
def test_eager_attention_gets_floats_within_the_program(kind: str) -> None:
    model = llama(attn_implementation="eager")
    assert torch.equal(steps(compiled(model), filled(model, kind), 5), steps(model, filled(model, kind), 5))


@torch.no_grad()
def test_a_program_may_write_to_tokens_that_it_loaded() -> None:
    layer = filled(llama(), "bf16").layers[0]
    order = torch.tensor(70)
    programs.LOAD_TOKENS(order, layer._record, False, [2, 2, 16], 70, torch.bfloat16).fill_(9)
    assert not (layer.keys == 9).any()


@torch.no_grad()
def test_an_encoder_decoder_is_compiled_with_its_caches() -> None:
    sizes: dict[str, Any] = {"d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCAB)).eval().bfloat16()
    forward = compiled(model, fullgraph=False)
    outs = []
    for each in (forward, model):
        cache, encoder_ids = KVCache(model.config, "int8"), prompt(80)["input_ids"]
        encoded = model(encoder_ids, decoder_input_ids=prompt(70)["input_ids"], past_key_values=cache)
        states = (encoded.encoder_last_hidden_state,)
        ids = torch.ones(2, 1, dtype=torch.long)
        outs += [each(encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache).logits for _ in range(3)]
    for actual, expected in zip(outs[:3], outs[3:], strict=True):
        assert (actual - expected).norm() <= 0.02 * expected.norm()


@torch.no_grad()
def test_a_program_writes_to_the_cache_that_it_was_called_with_alone() -> None:
    model = llama()
    forward = compiled(model)
    first = filled(model)
    steps(forward, first, 3)
    second = copy.deepcopy(first)
    logits = steps(forward, first, 4)
    assert second.get_seq_length() == 73
    assert torch.equal(steps(forward, second, 4), logits)
    first.crop(-4)
    assert torch.equal(steps(forward, first, 4), logits)


# PyTorch looks at the gradient of an activation where a program ends and goes on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_leave_the_program() -> None:
    model = llama()
    forward = compiled(model, fullgraph=False)
    ids = prompt(3)["input_ids"]
    forward(ids, past_key_values=filled(model)).logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_a_cache_of_other_sizes_is_refused() -> None:
    model = llama()
    forward, cache = compiled(model), filled(model)
    with pytest.raises(ConfigError, match="keys and values of the batch, heads and columns 2, 2, 16, found 1, 2, 16"):
        forward(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert torch.equal(steps(model, cache, 1), steps(model, filled(model), 1))


@torch.no_grad()
def test_the_record_of_a_freed_layer_is_refused() -> None:
    cache = filled(llama())
    record = cache.layers[0]._record
    del cache
    gc.collect()
    x = torch.ones(2, 2, 1, 16)
    with pytest.raises(UnsupportedError, match="expected a cache that the program was called with, found one that"):
        programs.STORE_TOKENS(x, x, record, 0, 70)
    if programs.ops_in_c():
        assert record[1:].count_nonzero() == 0
        with pytest.raises(RuntimeError, match="could not store tokens in a KVCache or attend to them"):
            programs.STORE_CODES(x, x, record, 0, 70)


@torch.no_grad()
def test_a_layer_that_is_freed_while_a_compiler_traces_leaves_no_trace() -> None:
    cache = filled(llama())
    record = cache.layers[0]._record
    with FakeTensorMode():
        del cache
        gc.collect()
    assert record[1:].count_nonzero() == 0


needs_c = pytest.mark.skipif(not programs.ops_in_c(), reason="the ops are not compiled, or PyTorch lacks a function")


def by_both(kind: Any, count: int, dtype: torch.dtype, mask: Tensor | None = None) -> tuple[list[Tensor], ...]:
    """Store tokens and attend to all but three, with the ops in C and with those in Python; return all results."""
    model = llama().to(dtype)
    layer = filled(model, kind).layers[0]
    keys, values = torch.randn(2, 2, 2, count, 16).to(dtype)
    query, results = torch.randn(2, 4, count, 16).to(dtype), []
    for store, attend in ((programs.STORE_CODES, programs.ATTEND_TO_CODES), (programs.STORE_TOKENS, programs.ATTEND)):
        own = copy.deepcopy(layer)
        order = store(keys, values, own._record, 0, 70)
        out = attend(query, order, own._record, 16, 67 + count, mask, False, 0.25)
        results.append([order, out, *(tensor for each in own.stores for tensor in each.tensors().values())])
    return tuple(results)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("kind", ["int8", "int4", ("int8", "int4")], ids=str)
@torch.no_grad()
def test_the_ops_in_c_give_the_bits_of_those_in_python(kind: Any, count: int, dtype: torch.dtype) -> None:
    assert all(map(torch.equal, *by_both(kind, count, dtype)))


MASKS = {
    "bools": torch.rand(2, 1, 3, 70) < 0.7,
    "floats of each head": torch.randn(2, 4, 3, 70),
    "the same for all": (torch.rand(70) < 0.7)[None],
    "bfloat16": torch.randn(2, 1, 3, 70).bfloat16(),
    "turned": torch.randn(70, 3).T[None, None],
}


@needs_c
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_the_ops_take_every_mask(name: str) -> None:
    assert all(map(torch.equal, *by_both("int8", 3, torch.float32, MASKS[name])))


@needs_c
@torch.no_grad()
def test_a_token_after_a_prompt_runs_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(KVLayer, "store_at", fail)
    monkeypatch.setattr(KVLayer, "attend", fail)
    layer = filled(llama()).layers[0]
    keys, values = torch.randn(2, 2, 2, 1, 16).bfloat16()
    order = programs.STORE_CODES(keys, values, layer._record, 0, 70)
    mask = torch.ones(2, 1, 1, 71, dtype=torch.bool)
    programs.ATTEND_TO_CODES(torch.randn(2, 4, 1, 16).bfloat16(), order, layer._record, 16, 71, mask, False, 0.25)
    assert order.item() == 71


@needs_c
@pytest.mark.parametrize("change", ["grow", "select", "copy", "load", "drop"])
@torch.no_grad()
def test_a_record_follows_the_codes(change: str) -> None:
    """The ops would read memory that was freed."""
    cache = filled(llama())
    layer: Any = cache.layers[0]
    if change == "grow":
        layer.update(*torch.randn(2, 2, 2, 500, 16).bfloat16())
    elif change == "select":
        layer.select(torch.tensor([1, 0, 1]))
    elif change == "copy":
        layer = copy.deepcopy(layer)
    elif change == "load":
        layer = pickle.loads(pickle.dumps(layer))
    else:
        layer._drop(16)
    described = [number for store in layer.stores for number in store.stored.describe()]
    assert layer._record[1:].tolist() == described
    assert layer._shapes == [store.shape for store in layer.stores]


def test_the_record_of_a_layer_is_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert programs.new_record(KVLayer("int8", "int8")).device.type == "cpu"
