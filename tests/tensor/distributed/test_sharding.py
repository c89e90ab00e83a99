"""Quantized weights under FSDP2, in two and four processes over gloo, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from covering import by_default, exhaustive
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weights import FORMS, KINDS, Packed, quantized_weight, same_stored, weight_of

from hf_trainweights import QuantizedTensor, dequantize_
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.distributed.agreement import check_shardable
from hf_trainweights.tensor.distributed.sharded_ops import FlatWeight

# Each test starts processes, and some need seconds.
pytestmark = pytest.mark.slow

K, STEPS = 128, 10
WHOLE = StateDictOptions(full_state_dict=True)


class Adapted(nn.Module):
    """A frozen quantized layer with a trainable adapter beside it, as LoRA has it."""

    def __init__(self, form: str, rows: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(K, rows, bias=False)
        weight = weight_of(FORMS[form], (rows, K), seed=seed)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(K, 4), nn.Linear(4, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def stack(form: str, rows: int = K) -> nn.Sequential:
    """Return two adapted layers and a head."""
    return nn.Sequential(Adapted(form, K, 0), nn.Tanh(), Adapted(form, rows, 1))


def train(model: nn.Module, steps: int = STEPS, share: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """Return the losses of some steps on a share of always the same inputs."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(8, K, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(share(x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(model: nn.Module, **how: Any) -> nn.Module:
    """Return the model with each adapted layer, and the rest, spread over all ranks."""
    for layer in model.modules():
        if isinstance(layer, Adapted):
            fully_shard(layer, mesh=mesh_of_all(), **how)
    return fully_shard(model, mesh=mesh_of_all(), **how)


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def losses(rank: int, forms: list[str], rows: int) -> dict[str, list[float]]:
    del rank
    return {form: train(sharded(stack(form, rows))) for form in forms}


every_form = pytest.mark.parametrize("forms", [KINDS, *exhaustive([*FORMS])], ids=["of each kind", "all"])


@every_form
@pytest.mark.parametrize("world_size", by_default((2,), (2, 4)))
def test_training_over_ranks_gives_the_bits_of_one_process_in_every_format(world_size: int, forms: list[str]) -> None:
    # 7 rows: the last rank has one less.
    expected = {form: train(stack(form, 7)) for form in forms}
    assert run_ranks(world_size, losses, forms, 7) == [expected] * world_size


HOW: dict[str, dict[str, Any]] = {
    "kept after the forward pass": {"reshard_after_forward": False},
    "on the CPU between uses": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


SPREAD: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: fully_shard(tied_stack(), mesh=mesh_of_all()),
    **{name: lambda how=how: sharded(stack("int8", 7), **how) for name, how in HOW.items()},
    "checkpointed": lambda: sharded(checkpointed(stack("int8", 7))),
    "in autocast": lambda: in_autocast(sharded(stack("int8", 7))),
    "checkpointed in autocast": lambda: in_autocast(sharded(checkpointed(stack("int8", 7)))),
    "compiled": lambda: cast(nn.Module, torch.compile(sharded(stack("int8", 7)), backend="aot_eager")),
}


def losses_of(rank: int, ways: list[str]) -> dict[str, list[float]]:
    """Return the losses of some ways to spread the same model."""
    del rank
    return {way: train(SPREAD[way]()) for way in ways}


def tied_stack() -> nn.Sequential:
    model = stack("int8")
    model[2].base.weight = model[0].base.weight
    return model


def checkpointed(model: nn.Sequential) -> nn.Sequential:
    """Compute each layer again in the backward pass."""
    for layer in (model[0], model[2]):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def in_autocast(model: nn.Module) -> nn.Module:
    """Compute in bfloat16, as the Trainer does with bf16=True."""
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


@pytest.mark.parametrize("ways", [["tied", "in autocast", *HOW], *exhaustive([*SPREAD])], ids=["quick ones", "all"])
def test_every_way_to_spread_a_model_trains_as_one_process_does(ways: list[str]) -> None:
    alone, in_bfloat16 = train(stack("int8", 7)), train(in_autocast(stack("int8", 7)))
    expected = {way: in_bfloat16 if "autocast" in way else alone for way in ways} | {"tied": train(tied_stack())}
    assert run_ranks(2, losses_of, ways) == [expected] * 2


def losses_over_two_groups(rank: int, rows: int) -> list[float]:
    del rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = stack("int8_g32", rows)
    fully_shard(model[2], mesh=mesh)
    return train(fully_shard(model, mesh=mesh))


def test_copies_of_a_spread_model_train_as_one_process_does() -> None:
    assert run_ranks(4, losses_over_two_groups, 7) == [train(stack("int8_g32", 7))] * 4


def halves(rank: int) -> list[float]:
    """Return the losses of a rank that sees its own half of the inputs."""
    model = sharded(stack("int4"))
    return train(model, share=lambda x: x[4 * rank : 4 * rank + 4])


def test_ranks_with_inputs_of_their_own_average_their_gradients() -> None:
    first, second = run_ranks(2, halves)
    whole = train(stack("int4"))
    torch.testing.assert_close((torch.tensor(first) + torch.tensor(second)) / 2, torch.tensor(whole), rtol=1e-5, atol=0)


def shown_in_bfloat16(rank: int) -> tuple[list[float], set[torch.dtype], bool]:
    """Return the losses, the dtypes that gathered weights show, and whether their scales are those of the model."""
    del rank
    model, seen = stack("int8"), []
    scale = model[2].base.weight.scale.clone()
    model[2].base.register_forward_pre_hook(
        lambda layer, _: seen.append((layer.weight.dtype, layer.weight.scale.clone()))
    )
    found = train(sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    with torch.no_grad():
        model(torch.zeros(1, K))
    return found, {dtype for dtype, _ in seen}, torch.equal(seen[-1][1], scale)


def test_mixed_precision_changes_what_a_weight_shows_and_not_its_scales() -> None:
    whole = torch.tensor(train(stack("int8")))
    for found, dtypes, same in run_ranks(2, shown_in_bfloat16):
        assert (dtypes, same) == ({torch.bfloat16}, True)
        torch.testing.assert_close(torch.tensor(found), whole, rtol=0.02, atol=0)


def gathered_bytes(rank: int, form: str | None) -> int:
    """Return how many bytes a rank sends in a forward pass; of a float model without `form`."""
    del rank
    model = stack(form or "int8")
    if form is None:
        dequantize_(model)
    sharded(model)
    before = torch.ops.fsdp.all_gather_copy_in
    sent = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal sent
            if func is before.default:
                sent += sum(tensor.nbytes for tensor in args[0])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        model(torch.zeros(1, K))
    return sent


def test_codes_and_scales_are_gathered_and_not_floats() -> None:
    whole, int8, int4 = (run_ranks(2, gathered_bytes, form)[0] for form in (None, "int8", "int4"))
    adapters = 2 * (4 * K + 4 + 4 * K + K) * 4 // 2
    scales, codes = 2 * K * 4 // 2, 2 * K * K // 2
    assert whole == adapters + 4 * codes
    assert int8 == adapters + scales + codes
    assert int4 == adapters + scales + codes // 2


def round_trips(rank: int, forms: list[str]) -> None:
    """Check each way to take the state of a spread model and to give it to another."""
    del rank
    for form in forms:
        round_trips_in(form)


def round_trips_in(form: str) -> None:
    plain, model = stack(form, 7), sharded(stack(form, 7))
    state = dict(plain.state_dict())
    full = get_model_state_dict(model, options=WHOLE)
    assert list(full) == list(state) == list(model.state_dict())
    assert all(
        same_stored(full[name], value) if isinstance(value, QuantizedTensor) else torch.equal(full[name], value)
        for name, value in state.items()
    )
    expected = train(plain, 2)
    for given, full_state in ((full, True), (get_model_state_dict(model), False)):
        fresh = sharded(stack(form, 7).to("meta"))
        assert all(parameter.is_meta for parameter in fresh.parameters())
        fresh.to_empty(device="cpu")
        set_model_state_dict(fresh, dict(given), options=StateDictOptions(full_state_dict=full_state))
        assert train(fresh, 2) == expected
    fresh = sharded(stack(form, 7).to("meta"))
    fresh.load_state_dict(get_model_state_dict(sharded(stack(form, 7))), assign=True)
    assert train(fresh, 2) == expected


@every_form
def test_a_model_made_without_memory_takes_the_state_of_a_spread_one(forms: list[str]) -> None:
    run_ranks(2, round_trips, forms)


class Experts(nn.Module):
    """All rows of the input times each expert."""

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.shape[-2] == x.shape[-1] else self.weight.transpose(-1, -2)
        return torch.bmm(x.expand(len(weight), *x.shape), weight)


def experts(form: str, layout: str) -> Experts:
    return Experts(quantized_weight(form, layout))


class Transposed(nn.Module):
    """A layer that keeps its weight `[K, N]`, as GPT-2 does."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(FORMS[form], (256, 6), transposed=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def table(form: str) -> nn.Embedding:
    layer = nn.Embedding(6, 128)
    layer.weight = nn.Parameter(quantized_weight(form), requires_grad=False)
    return layer


def spread_as_whole(rank: int, forms: list[str], make: Callable[..., nn.Module], x: Tensor, *args: str) -> None:
    """Check output, gradient and full state of one spread layer of each format against the same layer whole."""
    del rank
    for form in forms:
        whole, spread = make(form, *args), fully_shard(make(form, *args), mesh=mesh_of_all())
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        outputs = [layer(given) for layer, given in zip((whole, spread), inputs, strict=True)]
        assert torch.equal(*outputs), form
        with torch.no_grad():
            assert torch.equal(outputs[0], spread(x)), form
        if x.is_floating_point():
            for output in outputs:
                output.square().sum().backward()
            assert torch.equal(*(given.grad for given in inputs)), form
        assert same_stored(get_model_state_dict(spread, options=WHOLE)["weight"], whole.weight.data), form


@pytest.mark.covering(1)
@every_form
@pytest.mark.parametrize("layout", ["experts", "experts_transposed"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_experts_are_spread_one_by_one(layout: str, world_size: int, forms: list[str]) -> None:
    # Three of them: the last rank has one, or none.
    run_ranks(world_size, spread_as_whole, forms, experts, torch.randn(5, 128), layout)


@every_form
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_that_is_stored_transposed_is_cut_by_columns(world_size: int, forms: list[str]) -> None:
    cuttable = [form for form in forms if FORMS[form].has_cuttable_columns or world_size == 1]
    run_ranks(world_size, spread_as_whole, cuttable, Transposed, torch.randn(5, 256))


def test_no_rank_gets_nothing_of_a_weight_that_is_cut_by_columns() -> None:
    weight = Transposed("int8").weight
    assert isinstance(weight, QuantizedTensor)
    assert [size for size in (0, 64, 100, 128) if weight.can_be_cut(size)] == [64, 128]


def test_a_flattened_weight_computes_with_its_values_however_it_is_called() -> None:
    weight = quantized_weight("int8")
    flat, values = FlatWeight.of(weight), weight.dequantize()
    assert torch.equal(flat.sum(dtype=torch.float64), values.sum(dtype=torch.float64))
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(flat.sum(dtype=torch.float64), values.sum(dtype=torch.float64))


def cut_within_a_group(rank: int) -> str:
    del rank
    with pytest.raises(UnsupportedError, match="whole groups of 128 columns") as caught:
        fully_shard(Transposed("int4"), mesh=mesh_of_all())
    return str(caught.value)


class Words(nn.Module):
    """A layer that keeps its weight `[K, N]`, of which 16 columns share a word although its format does not say so."""

    def __init__(self) -> None:
        super().__init__()
        weight = QuantizedTensor.quantize(
            torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), Packed(), True
        )
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def cut_within_a_word(rank: int) -> None:
    del rank
    with pytest.raises(UnsupportedError, match="parts of equal size, and of whole groups"):
        fully_shard(Words(), mesh=mesh_of_all())


def cut_between_words(rank: int) -> None:
    del rank
    whole, spread, x = Words(), fully_shard(Words(), mesh=mesh_of_all()), torch.randn(5, 48)
    assert torch.equal(whole(x), spread(x))


@pytest.mark.parametrize(("world_size", "body"), [(2, cut_within_a_word), (3, cut_between_words)])
def test_a_weight_whose_columns_share_words_is_cut_between_these(world_size: int, body: Callable[[int], None]) -> None:
    run_ranks(world_size, body)


def test_a_weight_that_ranks_cannot_share_by_groups_is_refused_on_every_rank() -> None:
    assert len(set(run_ranks(3, cut_within_a_group))) == 1


@every_form
def test_a_table_of_embeddings_is_spread_by_rows(forms: list[str]) -> None:
    run_ranks(4, spread_as_whole, forms, table, torch.tensor([5, 0, 3, 5]))


def refusal(rank: int, what: str) -> str:
    """Return what a rank is told before its model is spread."""
    form = "int4" if (what, rank) == ("a format", 1) else "int8"
    model = stack(form, 8 if (what, rank) == ("a shape", 1) else 7)
    if rank == 1 and what == "a float weight":
        dequantize_(model)
    if rank == 1 and what == "no weight":
        model[2].base = nn.Identity()
    if rank == 1 and what == "other values":
        model[2].base.weight.qdata[3, 5] += 1
    if rank == 1 and what == "exchanged rows":
        weight = model[2].base.weight
        model[2].base.weight = nn.Parameter(weight[torch.arange(len(weight)).flip(0)], requires_grad=False)
    if what == "a transposed weight":
        model[2].base.weight = nn.Parameter(quantized_weight("int4", "matrix_transposed"), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"base\.weight") as caught:
        check_shardable(model)
    return str(caught.value)


@pytest.mark.parametrize(
    "what",
    ["a format", "a shape", "a float weight", "no weight", "other values", "exchanged rows", "a transposed weight"],
)
def test_ranks_that_cannot_share_a_weight_are_all_told_its_name_and_why(what: str) -> None:
    first, second = run_ranks(2, refusal, what)
    assert first == second
    assert ("transposed" if what == "a transposed weight" else "rank 1") in first


def accepted(rank: int) -> list[float]:
    model = stack("int8", 7)
    nn.init.constant_(model[0].up.bias, rank)  # a float weight: DDP and users make those equal themselves
    check_shardable(model)
    return train(sharded(stack("int8", 7)), 1)


def test_ranks_that_hold_the_same_weights_go_on() -> None:
    assert run_ranks(2, accepted) == [train(stack("int8", 7), 1)] * 2


def refused_by_older_wrapper(rank: int) -> str:
    del rank
    with pytest.raises(UnsupportedError, match="use fully_shard, which is fsdp_version 2") as caught:
        FullyShardedDataParallel(stack("int8"), use_orig_params=True, device_id=torch.device("cpu"))
    return str(caught.value)


def test_the_older_wrapper_names_the_newer_on_every_rank() -> None:
    first, second = run_ranks(2, refused_by_older_wrapper)
    assert first == second


def sent_whole(rank: int) -> None:
    del rank
    weight = quantized_weight("int8")
    with pytest.raises(UnsupportedError, match=r"weight\.tensors one by one"):
        torch.distributed.broadcast(weight, 0)
    with pytest.raises(UnsupportedError, match=r"weight\.tensors one by one"):
        torch.distributed.all_gather([torch.empty(6, 128), torch.empty(6, 128)], weight)


def test_a_weight_in_a_plain_collective_is_refused_and_not_lost() -> None:
    run_ranks(2, sent_whole)


def flat_and_zeros(rank: int) -> None:
    """Check that what FSDP gets for views and zeros is right for others too."""
    del rank
    weight = quantized_weight("int4")
    flat, dense = weight.view(-1), weight.dequantize().view(-1)
    assert (flat.shape, flat.tolist(), flat.numpy().tolist()) == (dense.shape, dense.tolist(), dense.tolist())
    assert torch.equal(flat[3:7] * 2, dense[3:7] * 2)
    with pytest.raises(UnsupportedError, match="read only"):
        flat.zero_()
    zeros = weight.new_zeros(9, 128)
    assert torch.equal(zeros.dequantize(), torch.zeros(9, 128))
    with pytest.raises(UnsupportedError, match="in-place"):
        zeros.add_(1)
    assert type(weight.new_zeros(9, 64)) is Tensor
    assert type(weight.new_zeros(9, 128, dtype=torch.float16)) is Tensor


def test_views_and_zeros_among_ranks_are_right_for_all_callers() -> None:
    run_ranks(1, flat_and_zeros)
