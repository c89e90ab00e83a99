from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from trees import fingerprint

from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES
from hf_trainweights.checkpoint.encoded.tree import build_tensors, find_storages
from hf_trainweights.errors import CorruptFileError, UnstorableError


def found(*tensors):
    return find_storages(tensors, [[(index,)] for index in range(len(tensors))])


def rebuilt(*tensors):
    views, storages = found(*tensors)
    return build_tensors(views, [storage.read().clone() for storage in storages])


def bytes_in_use(*tensors):
    return sum(storage.read().nbytes for storage in found(*tensors)[1])


def weight(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize(
    "tensor",
    [
        weight(3, 4), weight(3, 4).t(), weight(6, 4)[::2], weight(4, 6)[:, 1:3], weight(2, 3, 4, 5).permute(0, 2, 3, 1),
        weight(2, 3, 4, 4).to(memory_format=torch.channels_last), weight(4).expand(3, 4), weight(1).expand(100, 100),
        weight(1, 5)[:, 2:3], torch.tensor(3.0), torch.empty(0), torch.empty(3, 0, 2), weight(5)[5:], weight(3, 1, 2),
        torch.empty_strided((1, 3), (7, 1)).zero_(), Parameter(weight(3)), Parameter(weight(3), requires_grad=False),
        weight(3).requires_grad_(), (weight(3).requires_grad_() * 2), torch.tensor([True, False]),
        torch.tensor([1 + 2j]), torch.view_as_real(torch.tensor([1 + 2j])),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}-{tuple(tensor.shape)}-{tensor.stride()}",
)  # fmt: skip
def test_tensor_comes_back_with_layout_and_flags(tensor):
    (back,) = rebuilt(tensor)
    assert fingerprint(back) == fingerprint(tensor)
    assert back.is_leaf
    assert back._base is None


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    torch.manual_seed(0)
    tensor = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert fingerprint(rebuilt(tensor[:, 1:])[0]) == fingerprint(tensor[:, 1:])


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_strided_views_of_one_storage_come_back(data):
    base = torch.arange(60.0)
    tensors = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        stride = data.draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
        offset = data.draw(st.integers(0, 20))
        tensors.append(base.as_strided(shape, stride, offset))
    back = rebuilt(*tensors)
    assert [fingerprint(tensor) for tensor in back] == [fingerprint(tensor) for tensor in tensors]
    # A write through one view shows in all others exactly where it did before.
    original = copy.deepcopy(tensors)
    target = data.draw(st.integers(0, len(tensors) - 1))
    original[target].fill_(-1)
    back[target].fill_(-1)
    assert [fingerprint(tensor) for tensor in back] == [fingerprint(tensor) for tensor in original]


def test_tied_tensors_are_stored_once_and_stay_tied():
    embedding = weight(8, 4)
    assert bytes_in_use(embedding, embedding.detach()) == embedding.nbytes
    first, second = rebuilt(embedding, embedding.detach())
    first[0, 0] = 99
    assert second[0, 0] == 99


def test_overlapping_views_share_a_write():
    base = weight(10)
    left, right = rebuilt(base[:6], base[4:])
    left[5] = -1
    assert right[1] == -1
    assert bytes_in_use(base[:6], base[4:]) == base.nbytes


def test_small_views_do_not_drag_their_storage_along():
    large = torch.zeros(1_000_000)
    first, last = large[10:20], large[-10:]
    assert bytes_in_use(first, last) == 80
    back = rebuilt(first, last)
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
    assert back[0].untyped_storage().nbytes() == 80


def test_storage_read_without_gaps_is_no_copy():
    large = torch.zeros(100)
    (storage,) = found(large[10:20])[1]
    assert storage.read().data_ptr() == large[10:].data_ptr()


@pytest.mark.parametrize(
    ("tensors", "exclusive"),
    [
        ([weight(4, 4)], True),
        ([weight(8, 4)[2:4]], True),
        ([weight(4, 1, 4)], True),
        ([weight(4, 4)] * 2, True),
        ([weight(4, 4).t()], False),
        ([weight(8, 4)[::2]], False),
        ([weight(4).expand(4, 4)], False),
    ],
)
def test_only_one_contiguous_view_owns_its_storage(tensors, exclusive):
    views = [tensor.view(tensor.shape) for tensor in tensors] if exclusive else tensors
    (storage,) = found(*views)[1]
    assert storage.exclusive is exclusive
    assert storage.shape == (tuple(views[0].shape) if exclusive else (storage.read().numel(),))


def test_two_shapes_of_the_same_memory_do_not_own_it():
    base = weight(4, 4)
    assert not found(base, base.view(16))[1][0].exclusive
    assert not found(base, base[:2])[1][0].exclusive


def test_fresh_tensors_do_not_look_like_one_storage():
    empty = [torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0)]
    assert len(found(*empty)[1]) == 3


def test_file_written_by_torch_and_memory_mapped_is_readable(tmp_path):
    torch.save({"a": weight(5), "b": weight(7)}, tmp_path / "plain.pt")
    mapped = torch.load(tmp_path / "plain.pt", mmap=True, weights_only=True)
    assert [fingerprint(tensor) for tensor in rebuilt(*mapped.values())] == [
        fingerprint(weight(5)),
        fingerprint(weight(7)),
    ]


class Wrapped(torch.Tensor):
    """A subclass: its meaning is not in its bytes."""


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo on cpu"),
        (torch.empty(2, device="meta"), "layout torch.strided on meta"),
        (torch.zeros(2).as_subclass(Wrapped), "a .*Wrapped"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "dtype torch.float4_e2m1fn_x2"),
        (torch.ones(2, dtype=torch.complex64).conj(), "a lazily conjugated or negated tensor"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "a lazily conjugated or negated tensor"),
    ],
    ids=["sparse", "meta", "subclass", "float4", "conjugated", "negated"],
)
def test_tensor_that_is_not_plain_is_named(tensor, problem):
    with pytest.raises(UnstorableError, match=f"^0: expected a plain dense tensor, found {problem}"):
        found(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named():
    with pytest.raises(UnstorableError, match=r"^0: expected a plain dense tensor, found a nested tensor"):
        found(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_two_dtypes_of_the_same_memory_are_refused_as_torch_does():
    base = torch.zeros(4)
    with pytest.raises(UnstorableError, match=r"^1: expected one dtype for shared memory, found torch.int32, .* at 0"):
        found(base, base.view(torch.int32))
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save([base, base.view(torch.int32)], io.BytesIO())


@pytest.mark.parametrize(
    ("view", "match"),
    [
        (None, "tensor 0: expected a storage below 1"),
        ([], "tensor 0: expected a storage below 1"),
        ({}, "tensor 0: expected a storage below 1"),
        ({"storage": 1}, "tensor 0: expected a storage below 1"),
        ({"storage": -1}, "tensor 0: expected a storage below 1"),
        ({"storage": True}, "tensor 0: expected a storage below 1"),
        ({"storage": 0, "shape": 6}, "shape: expected a list"),
        ({"storage": 0, "shape": [2.0, 3]}, "shape: expected integers from 0 to"),
        ({"storage": 0, "shape": [-2, 3]}, "shape: expected integers from 0 to"),
        ({"storage": 0, "shape": [True, 3]}, "shape: expected integers from 0 to"),
        ({"storage": 0, "shape": [1] * 65}, "shape: expected a list of at most 64"),
        ({"storage": 0, "shape": [2, 4]}, "a view within the 6 elements"),
        ({"storage": 0, "shape": [6], "stride": [2]}, "a view within the 6 elements"),
        ({"storage": 0, "shape": [6], "stride": [-1]}, "stride: expected integers from 0 to"),
        ({"storage": 0, "shape": [6], "stride": [1, 1]}, "stride: expected 1 of them"),
        ({"storage": 0, "shape": [3], "offset": 4}, "a view within the 6 elements"),
        ({"storage": 0, "shape": [0], "offset": 7}, "a view within the 6 elements"),
        ({"storage": 0, "offset": "1"}, "offset: expected integers from 0 to"),
        ({"storage": 0, "shape": [1 << 40, 1 << 40], "stride": [0, 0]}, "shape: expected fewer than"),
        ({"storage": 0, "shape": [1 << 70], "stride": [0]}, "shape: expected integers from 0 to"),
        ({"storage": 0, "shape": [2], "stride": [1 << 61]}, "a view within the 6 elements"),
        ({"storage": 0, "shape": [0, 1 << 70]}, "shape: expected integers from 0 to"),
        ({"storage": 0, "shape": [1, 0], "stride": [1 << 70, 1]}, "stride: expected integers from 0 to"),
        ({"storage": 0, "requires_grad": True}, "requires_grad: expected a floating-point"),
        ({"storage": 0, "requires_grad": True, "parameter": True}, "requires_grad: expected a floating-point"),
    ],
    ids=repr,
)
def test_view_that_is_a_lie_is_refused(view, match):
    with pytest.raises(CorruptFileError, match=match):
        build_tensors([view], [torch.arange(6).view(2, 3)])


def test_views_that_are_no_list_are_refused():
    with pytest.raises(CorruptFileError, match=r"^the table of tensors: expected a list"):
        build_tensors({"0": {}}, [])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_built_on_the_storages_device(device):
    views, storages = found(weight(3, 4).t(), Parameter(weight(2)))
    tensors = build_tensors(views, [storage.read().to(device) for storage in storages])
    assert [(tensor.device.type, tensor.stride()) for tensor in tensors] == [(device, (1, 4)), (device, (1,))]
    assert isinstance(tensors[1], Parameter)
