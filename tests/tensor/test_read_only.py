"""No write to a quantized weight is lost: it changes the weight or raises. And what cannot be written to, reads."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from covering import exhaustive
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from weights import FORMS, KINDS, random_weight, weight_of

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.read_only import ReadOnlyTensor


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


# Each of these changes a float weight, as a test checks.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "w.data[0].zero_()": lambda w: w.data[0].zero_(),
    "w[3].fill_(0)": lambda w: w[3].fill_(0),
    "w[-1].mul_(2)": lambda w: w[-1].mul_(2),
    "w[3] *= 0": lambda w: operator.setitem(w, 3, w[3].mul_(0)),
    "w[3] = 0": lambda w: operator.setitem(w, 3, 0.0),
    "w[3][5] = 0": lambda w: operator.setitem(w[3], 5, 0.0),
    "w[3, 5].zero_()": lambda w: w[3, 5].zero_(),
    "w[:, :8].zero_()": lambda w: w[:, :8].zero_(),
    "w[:, 0].normal_()": lambda w: w[:, 0].normal_(),
    "w[2:5].zero_()": lambda w: w[2:5].zero_(),
    "w[::2].zero_()": lambda w: w[::2].zero_(),
    "w[::2][0].zero_()": lambda w: w[::2][0].zero_(),
    "w[..., None].zero_()": lambda w: w[..., None].zero_(),
    "w.flatten().zero_()": lambda w: w.flatten().zero_(),
    "w.ravel().zero_()": lambda w: w.ravel().zero_(),
    "w.reshape(2, -1)[1].zero_()": lambda w: w.reshape(2, -1)[1].zero_(),
    "w.contiguous()[1].zero_()": lambda w: w.contiguous()[1].zero_(),
    "w.as_strided().zero_()": lambda w: w.as_strided((3,), (2,)).zero_(),
    "w.data.unsqueeze(0)[0, 0, 5] = 9": lambda w: operator.setitem(w.data.unsqueeze(0), (0, 0, 5), 9.0),
    "w.diagonal().fill_(1)": lambda w: w.diagonal().fill_(1),
    "w.t()[0].zero_()": lambda w: w.t()[0].zero_(),
    "w.mT.diagonal().zero_()": lambda w: w.mT.diagonal().zero_(),
    "w.unbind()[0].zero_()": lambda w: w.unbind()[0].zero_(),
    "for row in w: row.zero_()": lambda w: [row.zero_() for row in w],
    "w.chunk(2)[0].zero_()": lambda w: w.chunk(2)[0].zero_(),
    "w.chunk(2, 1)[0].zero_()": lambda w: w.chunk(2, 1)[0].zero_(),
    "w.split(5, 1)[0].zero_()": lambda w: w.split(5, 1)[0].zero_(),
    "w.tensor_split(3, 1)[0].zero_()": lambda w: w.tensor_split(3, 1)[0].zero_(),
    "w.unsafe_chunk(2, 1)[0].zero_()": lambda w: w.unsafe_chunk(2, 1)[0].zero_(),
    "w.unsafe_split(5, 1)[0].zero_()": lambda w: w.unsafe_split(5, 1)[0].zero_(),
    "w.unsafe_split_with_sizes()[0].zero_()": lambda w: w.unsafe_split_with_sizes([3, w.shape[1] - 3], 1)[0].zero_(),
    "w.narrow(1, 0, 3).zero_()": lambda w: w.narrow(1, 0, 3).zero_(),
    "w.unsqueeze(0).zero_()": lambda w: w.unsqueeze(0).zero_(),
    "w.expand(1, ...).zero_()": lambda w: w.expand(1, *w.shape).zero_(),
    "w.unflatten(0, (2, -1)).zero_()": lambda w: w.unflatten(0, (2, -1)).zero_(),
    "w.unfold(0, 2, 2).zero_()": lambda w: w.unfold(0, 2, 2).zero_(),
    "w.swapaxes(0, 1)[:3].zero_()": lambda w: w.swapaxes(0, 1)[:3].zero_(),
    "w.movedim(0, 1)[1].zero_()": lambda w: w.movedim(0, 1)[1].zero_(),
    "w.view(integers).zero_()": lambda w: w.view(torch.int32 if w.dtype == torch.float32 else torch.int16).zero_(),
    "w.detach()[1].zero_()": lambda w: w.detach()[1].zero_(),
    "w[1].squeeze().exp_()": lambda w: w[1].squeeze().exp_(),
    "nn.init.zeros_(w[0])": lambda w: nn.init.zeros_(w[0]),
    "nn.init.normal_(w[:, 0])": lambda w: nn.init.normal_(w[:, 0]),
    "nn.init.xavier_uniform_(w)": lambda w: nn.init.xavier_uniform_(w),
    "nn.init.constant_(w.data, 1)": lambda w: nn.init.constant_(w.data, 1),
    "w.copy_(zeros)": lambda w: w.copy_(torch.zeros_like(w)),
    "w[0].copy_(zeros)": lambda w: w[0].copy_(torch.zeros_like(w[0])),
    "w.data = zeros": lambda w: setattr(w, "data", torch.zeros(w.shape, dtype=w.dtype)),
    "w.data *= 0": lambda w: w.data.mul_(0),
    "w.data += 1": lambda w: operator.iadd(w.data, 1),
    "add(out=w)": lambda w: torch.add(torch.ones_like(w), 1, out=w),
    "add(out=w[0])": lambda w: torch.add(torch.ones_like(w[0]), 1, out=w[0]),
    "_foreach_mul_([w])": lambda w: torch._foreach_mul_([w], 0.0),
    "_foreach_mul_([w[0]])": lambda w: torch._foreach_mul_([w[0]], 0.0),
    "w.set_()": lambda w: w.set_(torch.zeros_like(w)),
    "swap_tensors": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.zeros(w.shape), False)),
    "clamp_": lambda w: torch.clamp_(w, 0, 0),
    "clip_grad style w.mul_": lambda w: w.detach().mul_(0.5),
    "embedding max_norm": lambda w: F.embedding(torch.tensor([1]), w, max_norm=0.01),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones(w.shape, dtype=torch.bool), 0),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([0]), torch.zeros(1, w.shape[1], dtype=w.dtype)),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0]), 0.0),
    "SGD": lambda w: (setattr(w, "grad", torch.ones(w.shape, dtype=w.dtype)), torch.optim.SGD([w], lr=1.0).step()),
    "lerp_": lambda w: w.data.lerp_(torch.zeros(w.shape, dtype=w.dtype), 0.5),
    "w.data[ids] = 0": lambda w: operator.setitem(w.data, torch.tensor([1]), 0.0),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(w.numel(), dtype=w.dtype), [w]),
    "w.apply_": lambda w: w.apply_(lambda value: 0.0),
    "w[0].apply_": lambda w: w[0].apply_(lambda value: 0.0),
    "w.map_": lambda w: w.map_(torch.zeros_like(w), lambda first, second: 0.0),
    "w[0].map_": lambda w: w[0].map_(torch.zeros_like(w[0]), lambda first, second: 0.0),
    "w.map2_": lambda w: w.map2_(torch.zeros_like(w), torch.zeros_like(w), lambda first, second, third: 0.0),
    "storage": lambda w: w.untyped_storage().fill_(0),
    "storage of a row": lambda w: w[0].untyped_storage().fill_(0),
    "bytes of a storage": lambda w: operator.setitem(w[0].untyped_storage(), 1, 0),
    "typed storage": lambda w: w.storage().fill_(0),
    "typed storage of a row": lambda w: w[0].storage().fill_(0),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
    "dlpack of a row": lambda w: torch.from_dlpack(w[0]).zero_(),
}
# NumPy has no bfloat16, and a weight that is stored transposed cannot be viewed flat, as its strides say.
STORED_WRITES: dict[str, Callable[[Tensor], object]] = {
    "w.view(-1)[5] = 9": lambda w: operator.setitem(w.view(-1), 5, 9.0),
    "w.data.view(-1).zero_()": lambda w: w.data.view(-1).zero_(),
    "w.numpy()": lambda w: w.numpy().fill(0),
    "w.detach().numpy()": lambda w: w.detach().numpy().fill(0),
    "np.asarray(w)": lambda w: np.asarray(w).fill(0),
    "w[0].numpy()": lambda w: w[0].numpy().fill(0),
    "np.asarray(w[0])": lambda w: np.asarray(w[0]).fill(0),
    "np.asarray(w[:, :3])": lambda w: operator.setitem(np.asarray(w[:, :3]), (0, 0), 0.0),
}

# Held as the file has it, shown the other way round, and in bfloat16.
WAYS = {
    "stored": lambda form: quantized(form, torch.float32),
    "transposed": lambda form: quantized(form, torch.float32, transposed=True),
    "bfloat16": lambda form: quantized(form, torch.bfloat16),
}
DTYPES = {"stored": torch.float32, "transposed": torch.float32, "bfloat16": torch.bfloat16}
WRITTEN_WAYS = [(name, way) for name in WRITES for way in WAYS] + [(name, "stored") for name in STORED_WRITES]


def quantized(form: str, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
    return nn.Parameter(copy.deepcopy(_quantized(form, dtype, transposed)), requires_grad=False)


@functools.cache
def _quantized(form: str, dtype: torch.dtype, transposed: bool) -> QuantizedTensor:
    shape = (128, 64) if transposed else (64, 128)
    return weight_of(FORMS[form], shape, dtype, transposed)


def values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_every_write_of_the_table_changes_a_float_weight() -> None:
    for name, way in WRITTEN_WAYS:
        shape = (128, 64) if way == "transposed" else (64, 128)
        weight = nn.Parameter(random_weight(*shape, dtype=DTYPES[way]), requires_grad=False)
        before = weight.clone()
        (WRITES | STORED_WRITES)[name](weight)
        assert weight.shape != before.shape or not torch.equal(weight, before), (name, way)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("forms", [KINDS, *exhaustive([*FORMS])], ids=["of each kind", "all"])
@pytest.mark.parametrize("name", WRITES | STORED_WRITES)
def test_no_write_is_lost(name: str, forms: list[str]) -> None:
    for way, form in itertools.product((way for each, way in WRITTEN_WAYS if each == name), forms):
        weight = WAYS[way](form)
        before = values(weight)
        refused = refuses((WRITES | STORED_WRITES)[name], weight)
        assert torch.equal(values(weight), before) == refused, f"{form} {way}: lost, or done in part"


def refuses(write: Callable[[Tensor], object], weight: Tensor) -> bool:
    try:
        with torch.no_grad():
            write(weight)
    except UnsupportedError:
        return True
    except ValueError as error:
        return "read-only" in str(error)  # NumPy's own error
    return False


def test_errors_say_how_to_change_the_weight() -> None:
    # What Transformers does to the row of the padding token.
    weight = quantized("int8", torch.float32)
    for write in (lambda: weight.data[0].zero_(), lambda: nn.init.normal_(weight), lambda: weight.mul_(2)):
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"dequantize\(\) the model, .* to resize emb"):
            write()


# Reading


def row() -> tuple[Tensor, Tensor]:
    """Return the first row of a quantized weight, and the same values as a plain tensor."""
    weight = quantized("int8", torch.float32)
    taken = weight[0]
    assert type(taken) is ReadOnlyTensor
    return taken, weight.dequantize()[0]


READS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda t: t + 1,
    "sum": torch.sum,
    "clone": torch.clone,
    "float64": lambda t: t.double(),
    "stack": lambda t: torch.stack([t, t]),
    "compare": lambda t: t > 0,
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t.clone()),
    "topk": lambda t: torch.topk(t, 3).values,
    "index": lambda t: t[torch.tensor([3, 1])],
    "out": lambda t: torch.add(t, 1, out=torch.empty(128)),
    "copy into": lambda t: torch.zeros(128).copy_(t),
    "in-place on another": lambda t: torch.ones(128).mul_(t),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "linear": lambda t: F.linear(t, torch.ones(4, 128)),
    "einsum": lambda t: torch.einsum("k,nk->n", t, torch.ones(4, 128)),
    "fft": torch.fft.fft,
    "collate": lambda t: default_collate([t, t]),
    "tensor": lambda t: torch.tensor(t.tolist()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "vmap": lambda t: torch.vmap(lambda scalar: scalar * 2)(t),
    "vmap closure": lambda t: torch.vmap(lambda scalar: scalar * t)(torch.ones(3)),
    "func.grad": lambda t: torch.func.grad(lambda x: (x * t).sum())(torch.ones(128)),
    "numbers": lambda t: (t.tolist(), t[1].item(), float(t[2]), f"{t[3]:.3f}", repr(t), str(t[:2])),
    "array": lambda t: (np.asarray(t).tolist(), t.numpy().sum(), np.asarray(t, dtype=np.float64).sum()),
    "bytes": lambda t: safetensors.torch.save({"row": t}),
    "address": lambda t: (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() != 0, t.nbytes),
    "copy of a storage": lambda t: t.untyped_storage().clone().tolist()[:4],
}


def by_default(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_reading_gives_what_a_plain_tensor_gives(name: str) -> None:
    taken, plain = row()
    result, expected = READS[name](taken), READS[name](plain)
    assert type(result) is type(expected)
    assert by_default(result) == by_default(expected)


@pytest.mark.parametrize("zipped", [True, False])
def test_saved_values_are_plain_and_no_more_than_they(zipped: bool) -> None:
    taken, plain = row()
    buffer = io.BytesIO()
    torch.save({"row": taken, "view": taken[3:9]}, buffer, _use_new_zipfile_serialization=zipped)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert [type(tensor) for tensor in loaded.values()] == [Tensor, Tensor]
    assert torch.equal(loaded["row"], plain)
    assert torch.equal(loaded["view"], plain[3:9])
    assert loaded["view"].untyped_storage().nbytes() == 6 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[2:7],
        lambda t: t.view(2, 64),
        lambda t: t.reshape(-1, 4),
        lambda t: t.unbind()[0],
        lambda t: t.split(64)[1],
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.contiguous(),
        lambda t: t.to(torch.float32),
        lambda t: t.expand(2, 128),
        torch.as_tensor,
    ],
)
def test_a_view_of_what_is_read_only_is_read_only(view: Callable[[Tensor], Tensor]) -> None:
    taken, plain = row()
    part = view(taken)
    assert type(part) is ReadOnlyTensor
    assert torch.equal(part, view(plain))
    with pytest.raises(UnsupportedError, match=r"zero_.*: expected float values of a quantized weight to be read only"):
        part.zero_()
    assert torch.equal(taken, plain)


@pytest.mark.parametrize("name", ["data", "storage", "dlpack", "parameter", "inference"])
def test_ways_around_the_ops_are_refused_too(name: str) -> None:
    taken, plain = row()
    ways: dict[str, Callable[[], object]] = {
        "data": lambda: setattr(taken, "data", torch.zeros(128)),
        "storage": lambda: taken.untyped_storage().resize_(0),
        "dlpack": lambda: np.from_dlpack(taken),
        "parameter": lambda: nn.Parameter(taken, requires_grad=False).zero_(),
        "inference": lambda: in_inference_mode(taken.zero_),
    }
    with pytest.raises(UnsupportedError, match=r"read only, found a write .* call \.clone\(\) first"):
        ways[name]()
    assert torch.equal(taken, plain)


def in_inference_mode(function: Callable[[], object]) -> None:
    with torch.inference_mode():
        function()


def test_a_reader_who_asks_for_a_copy_gets_one() -> None:
    weight = quantized("int4", torch.float32)
    for tensor in (weight.detach(), weight[0]):
        capsule = tensor.__dlpack__(copy=True)
        assert torch.equal(torch.utils.dlpack.from_dlpack(capsule), values(tensor))


@pytest.mark.slow
def test_gradients_flow_past_what_is_read_only() -> None:
    taken, plain = row()
    x = random_weight(128, seed=1).requires_grad_()
    (x * taken + taken.view(2, 64).sum()).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
    weight = quantized("int8", torch.float32).double()
    assert torch.autograd.gradcheck(lambda x: x * weight[0], x.detach().double().requires_grad_())


# Compiling


@pytest.mark.slow
def test_a_compiled_function_takes_what_is_read_only() -> None:
    taken, plain = row()
    compiled = torch.compile(lambda t, x: (t.view(2, 64) * x).sum(), backend="aot_eager", fullgraph=True)
    x, y = (random_weight(64, seed=1).requires_grad_() for _ in range(2))
    compiled(taken, x).backward()
    (plain.view(2, 64) * y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_compiled_function_does_not_write_to_it() -> None:
    taken, plain = row()
    for write in (lambda t: t.mul_(2), lambda t: t.view(2, 64)[0].zero_()):
        torch._dynamo.reset()
        with pytest.raises(UnsupportedError, match="read only"):
            torch.compile(write, backend="aot_eager", fullgraph=True)(taken)
        assert torch.equal(taken, plain)


@pytest.mark.slow
def test_a_compiled_view_is_plain() -> None:
    weight = quantized("int4", torch.float32)
    compiled = torch.compile(lambda w: (w[0], w.view(-1)), backend="aot_eager", fullgraph=True)
    first, flat = compiled(weight.detach())
    assert [type(first), type(flat)] == [Tensor, Tensor]
    assert torch.equal(flat, values(weight).view(-1))
