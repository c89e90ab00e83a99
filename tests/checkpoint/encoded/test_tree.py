from __future__ import annotations

import contextlib
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import fingerprint

from hf_trainweights.checkpoint.encoded.structure import storage_name
from hf_trainweights.checkpoint.encoded.tree import MAX_DEPTH, flatten, unflatten
from hf_trainweights.errors import CorruptFileError, UnstorableError

Point = namedtuple("Point", "x y")


def through_json(tree):
    structure, storages = flatten(tree)
    text = json.dumps(structure, allow_nan=False)
    return unflatten(json.loads(text), [storage.read() for storage in storages])


def nan(payload: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", 0x7FF8000000000000 | payload))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 1, -1, 2**127 + 1, -(2**64), 0.0, -0.0, 1.0, 0.1, 5e-324, 1e308, 1e22,
        math.inf, -math.inf, math.nan, -math.nan, nan(0xDEAD), "", "text", "é\u2028\ud800\0", [], [[]], (), ((),), {},
        [1, 1.0, True], {"a": 1, 1: "a", None: 2, 2.5: 3, False: 4}, {math.inf: 1},
        OrderedDict(b=1, a=2), Counter({30: 1, 60: 2}), {"tensor": 0, "dict": [["float", "x"]]},
        torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.Size([2, 0, 3]), torch.Size([]),
        torch.device("cpu"), torch.device("cuda:1"), torch.device("meta"),
    ],
    ids=repr,
)  # fmt: skip
def test_value_comes_back_with_its_type_and_bits(value):
    assert fingerprint(through_json({"at": [value]})) == fingerprint({"at": [value]})


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(st.none() | st.text() | st.integers() | st.booleans(), children, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(json_like)
def test_any_tree_of_plain_values_comes_back(tree):
    assert fingerprint(through_json(tree)) == fingerprint(tree)


def test_order_of_keys_is_kept():
    keys = [f"k{index}" for index in (5, 1, 4, 2)]
    assert list(through_json(OrderedDict.fromkeys(keys))) == keys
    assert list(through_json(dict.fromkeys(keys))) == keys


def test_metadata_of_a_state_dict_is_kept():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert through_json(state)._metadata == state._metadata
    assert through_json(state)._metadata[""]["version"] == 2


def test_the_same_tensor_twice_is_one_object():
    weight = torch.ones(2)
    tree = through_json({"a": weight, "b": [weight]})
    assert tree["a"] is tree["b"][0]


class Label(str):
    """Looks like a str and is none: what it adds would be lost."""


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (object(), "object"), (b"x", "bytes"), ({1}, "set"), (1j, "complex"), (np.float64(1), "numpy.float64"),
        (np.zeros(2), "numpy.ndarray"), (Label("x"), "Label"), (Point(1, 2), "Point"),
        (defaultdict(int), "defaultdict"), (len, "builtin_function_or_method"), (torch.strided, "layout"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_type_outside_the_tree_is_named_with_its_key_path(value, type_name):
    with pytest.raises(UnstorableError, match=rf"^state\.0\.extra\.1: .* found \S*{type_name}"):
        flatten({"state": {0: {"extra": [1, value]}}})


@pytest.mark.parametrize("key", [(1, 2), b"k", np.int64(3), torch.float32], ids=repr)
def test_key_that_is_no_scalar_is_named(key):
    with pytest.raises(UnstorableError, match=r"^state: expected keys that are scalars"):
        flatten({"state": {key: 1}})


def test_attributes_of_a_dict_are_not_dropped_silently():
    state = OrderedDict(a=1)
    state.version = 3
    with pytest.raises(UnstorableError, match=r"^model: expected a dict without attributes, found attributes version"):
        flatten({"model": state})


def test_integer_too_long_for_json_is_refused():
    with pytest.raises(UnstorableError, match=r"^seed: expected an integer of at most 4096 bits, found 5001 bits"):
        flatten({"seed": 1 << 5000})


@pytest.mark.parametrize("kind", [list, dict])
def test_container_that_contains_itself_is_refused(kind):
    loop = kind()
    if kind is list:
        loop.append([loop])
    else:
        loop["again"] = [loop]
    with pytest.raises(UnstorableError, match=r"found a container that contains itself"):
        flatten(loop)


def test_same_container_twice_is_no_loop():
    shared = [1, 2]
    assert through_json({"a": shared, "b": [shared, shared]}) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def nested(depth: int):
    tree = "leaf"
    for index in range(depth):
        tree = [tree] if index % 2 else {"k": tree}
    return tree


def test_depth_that_is_stored_is_depth_that_is_read():
    assert through_json(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(UnstorableError, match=f"expected a tree at most {MAX_DEPTH} deep"):
        flatten(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "node",
    [
        {}, {"what": 1}, {"tensor": 1}, {"tensor": -1}, {"tensor": True}, {"tensor": "0"}, {"tensor": None},
        {"tuple": 1}, {"tuple": {"a": 1}}, {"dict": {"a": 1}}, {"dict": [1]}, {"dict": [["a"]]},
        {"dict": [["a", 1, 2]]}, {"dict": [[["list"], 1]]}, {"dict": [[{"tensor": 0}, 1]]},
        {"dict": [[{"dict": []}, 1]]}, {"counter": 3},
        {"float": "xyz"}, {"float": "00"}, {"float": 1}, {"float": []}, {"dtype": "torch.float32"}, {"dtype": []},
        {"device": "nowhere"}, {"device": [0]}, {"size": ["a"]}, {"size": [1.5]}, {"size": 3}, {"size": None},
        {"ordered_dict": [], "metadata": {"what": 1}}, {"": []},
        {"dict": [["b", 1], ["b", 2]]}, {"counter": [[1, 1], [True, 2]]}, {"tensor": 10**30},
    ],
    ids=repr,
)  # fmt: skip
def test_malformed_node_is_named_with_its_key_path(node):
    structure = {"tree": {"dict": [["a", [0, node]]]}, "tensors": [{"storage": 0}]}
    with pytest.raises(CorruptFileError, match=r"^a\.1"):
        unflatten(structure, [torch.ones(2)])


def test_tree_deeper_than_python_can_go_is_refused():
    node: list = []
    for _ in range(500):
        node = [node]
    with pytest.raises(CorruptFileError, match=f"expected a tree at most {MAX_DEPTH} deep"):
        unflatten({"tree": node, "tensors": []}, [])


@pytest.mark.parametrize("kind", ["tuple", "tensor", "dict", "float", "what"])
def test_a_malformed_node_deeper_than_python_can_print_is_refused(kind):
    node: list = []
    for _ in range(sys.getrecursionlimit()):
        node = [node]
    with pytest.raises(CorruptFileError, match=r"^a: expected|^a\.0.*expected a tree at most"):
        unflatten({"tree": {"dict": [["a", {kind: node}]]}, "tensors": []}, [])


def calls_of(function, *arguments):
    """Return how many functions a call makes, those of Python's own included, and what it gave."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return calls, result


LONG_KEY = "k" * 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "items",
    [
        lambda n: [1] * n,
        lambda n: {"tuple": [[]] * n},
        lambda n: {"dict": [[f"{i}", "text"] for i in range(n)]},
        lambda n: [{"tensor": 0}] * n,
        lambda n: [{"dict": [["a", {"float": "7ff8000000000000"}]]}] * n,
    ],
    ids=["list", "tuple", "dict", "one tensor", "floats"],
)
def test_four_times_the_items_are_four_times_the_work_however_long_the_key_above_them(items, monkeypatch):
    monkeypatch.setattr("hf_trainweights.checkpoint.encoded.tree.path_text", None)  # each call would copy the key

    def structure(n):
        return {"tree": {"dict": [[LONG_KEY, items(n)]]}, "tensors": [{"storage": 0}]}

    few, _ = calls_of(unflatten, structure(500), [torch.ones(2)])
    many, tree = calls_of(unflatten, structure(2000), [torch.ones(2)])
    assert len(tree[LONG_KEY]) == 2000
    assert many <= 4 * few


def test_of_a_long_key_messages_and_reports_show_the_beginning():
    structure = {"tree": {"dict": [[LONG_KEY, {"dict": [["b", {"what": 1}]]}]]}, "tensors": []}
    with pytest.raises(CorruptFileError, match=rf"^{LONG_KEY[:500]}\.b: expected a node"):
        unflatten(structure, [])


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dict", "tuple", "tensor", "float", "size", "counter", "ordered_dict", "metadata", "x"]),
            children,
            max_size=2,
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(any_json, any_json)
def test_any_json_is_a_tree_or_a_corrupt_file(tree, tensors):
    structure = {"tree": tree, "tensors": tensors}
    storage_name(structure, 0)
    with contextlib.suppress(CorruptFileError):
        unflatten(structure, [torch.ones(2)])
