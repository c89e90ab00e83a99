"""Stores: what is appended is read again, in whatever pieces it came and however much room there was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpus import use_library
from torch import Tensor

from hf_trainweights.cache.stores import FloatStore, IntegerStore, Store, distinct_tokens

SHAPE = (2, 3, 32)


def tokens(count: int, seed: int = 0) -> Tensor:
    batch, heads, columns = SHAPE
    return torch.randn(batch, heads, count, columns, generator=torch.Generator().manual_seed(seed))


def in_floats(x: Tensor) -> FloatStore:
    store = FloatStore(x, x.dtype)
    store.append(x)
    return store


def in_integers(bits: int, is_key: bool) -> Callable[[Tensor], IntegerStore]:
    return lambda x: IntegerStore.of(x, bits, is_key, torch.ones(x.shape[0], x.shape[2], dtype=torch.bool))


MAKERS: dict[str, Callable[[Tensor], Store]] = {
    "floats": in_floats,
    "keys of 8 bits": in_integers(8, True),
    "values of 8 bits": in_integers(8, False),
    "keys of 4 bits": in_integers(4, True),
    "values of 4 bits": in_integers(4, False),
}
every_store = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_store
def test_tokens_are_the_same_in_whatever_pieces_they_come(make: Callable[[Tensor], Store]) -> None:
    x = tokens(200)
    whole, pieces = make(x[:, :, :70]), make(x[:, :, :70])
    whole.append(x[:, :, 70:])
    for start, stop in ((70, 71), (71, 90), (90, 96), (96, 170), (170, 200)):
        pieces.append(x[:, :, start:stop])
    assert whole.shape == SHAPE
    assert whole.length == pieces.length == 200
    assert torch.equal(whole.load(0, torch.float32), pieces.load(0, torch.float32))
    assert torch.equal(whole.load(37, torch.float32), whole.load(0, torch.float32)[:, :, 37:])


@every_store
def test_appending_a_token_moves_the_others_rarely(make: Callable[[Tensor], Store]) -> None:
    store, moves = make(tokens(64)), 0
    sizes = {store.stored_bytes}
    for step in range(1000):
        store.append(tokens(1, step))
        moves += store.stored_bytes not in sizes
        sizes.add(store.stored_bytes)
    assert moves <= 8
    used = sum(tensor.nbytes for tensor in store.tensors().values())
    assert store.stored_bytes <= 1.6 * used


@every_store
def test_sequences_are_selected_with_all_that_belongs_to_them(make: Callable[[Tensor], Store]) -> None:
    store = make(tokens(70))
    before = store.load(0, torch.float32)
    store.select(torch.tensor([1, 1, 0]))
    assert torch.equal(store.load(0, torch.float32), before[[1, 1, 0]])
    more = tokens(20, 1)[[1, 1, 0]]
    store.append(more)
    assert torch.equal(store.load(0, torch.float32)[:, :, :70], before[[1, 1, 0]])


@every_store
def test_tokens_before_one_are_dropped(make: Callable[[Tensor], Store]) -> None:
    store = make(tokens(100))
    before = store.load(0, torch.float32)
    store.drop(48)
    assert store.length == 52
    assert torch.equal(store.load(0, torch.float32), before[:, :, 48:])


@every_store
def test_a_store_is_made_again_of_its_tensors(make: Callable[[Tensor], Store]) -> None:
    store = make(tokens(70))
    form = store.stored.form if isinstance(store, IntegerStore) else None
    again = type(store).from_tensors(store.tensors(), store.length, form)  # pyright: ignore[reportArgumentType]
    assert torch.equal(again.load(0, torch.float32), store.load(0, torch.float32))
    for of in (store, again):
        of.append(tokens(30, 1))
    assert torch.equal(again.load(0, torch.float32), store.load(0, torch.float32))


@pytest.mark.parametrize("factor", [1, 10, 30, 1000])
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.006), (4, 0.09)])
def test_channels_that_are_far_larger_cost_no_precision(bits: int, limit: float, factor: float) -> None:
    """The error of scores `q . k`, where a model has large keys in some channels and small queries there."""
    keys, query = tokens(256), tokens(8, 1)
    weight = torch.ones(SHAPE[2])
    weight[::8] = factor
    stored = in_integers(bits, True)(keys * weight + weight * 3).load(0, torch.float32) - weight * 3
    scores = (query / weight) @ stored.transpose(2, 3)
    exact = query @ keys.transpose(2, 3)
    assert (scores - exact).norm() <= limit * exact.norm()


def test_padding_on_the_left_counts_once() -> None:
    values = tokens(10)
    values[0, :, :4] = values[0, :, :1]
    assert distinct_tokens(values)[0].tolist() == [True, *[False] * 3, *[True] * 6]
    assert distinct_tokens(values)[1].all()


def test_tokens_that_are_not_counted_do_not_change_the_channels() -> None:
    keys, counted = tokens(128), torch.ones(2, 128, dtype=torch.bool)
    counted[:, :60] = False
    padded = keys.clone()
    padded[:, :, :60] = 100.0
    channels = [IntegerStore.of(x, 8, True, counted).stored.channels for x in (keys, padded)]
    assert channels[0] is not None
    assert channels[1] is not None
    assert torch.equal(*channels)


def test_keys_that_are_not_finite_are_stored_without_losing_others() -> None:
    keys = tokens(70)
    keys[0, 0, 3, 4] = float("nan")
    store = in_integers(8, True)(keys)
    loaded = store.load(0, torch.float32)
    assert loaded[0, 0, 3].isnan().any()
    loaded[0, 0, 3] = 0
    assert loaded.isfinite().all()


CHANGES: dict[str, Callable[[Store], None]] = {
    "none": lambda store: None,
    "selected": lambda store: store.select(torch.tensor([1, 0])),
    "dropped": lambda store: store.drop(16),
    "moved": lambda store: store.move(torch.device("cpu")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("has_library", [True, False])
@every_store
def test_tokens_made_in_inference_mode_take_more_outside_it(
    make: Callable[[Tensor], Store],
    change: Callable[[Store], None],
    has_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_library:
        use_library(None, monkeypatch)
    with torch.inference_mode():
        store = make(tokens(70))
        change(store)
        store.truncate(store.length - 5)
    before = store.length
    store.append(tokens(1))
    assert store.length == before + 1


@every_store
def test_a_store_moves_to_another_device(make: Callable[[Tensor], Store]) -> None:
    store = make(tokens(70))
    store.move(torch.device("meta"))
    store.append(tokens(3).to("meta"))
    assert store.device.type == store.load(0, torch.float32).device.type == "meta"
