"""What every codec promises, for every entry of the registry."""

import itertools

import pytest
import torch
from checkpoint.codecs.cases import (
    INSTANCES,
    SHAPES,
    bits_equal,
    decode,
    error,
    inputs,
    name_of,
    own,
)
from helpers import default_dtype

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

# torch says so of every complex32 tensor it makes.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

every_codec = pytest.mark.parametrize("codec", INSTANCES, ids=name_of)


def test_registry_names_each_codec_by_its_id():
    assert {codec_id: codec.codec_id for codec_id, codec in CODECS.items()} == {key: key for key in CODECS}


@every_codec
def test_roles_are_known_and_a_loss_spares_what_must_be_exact(codec):
    assert set(codec.roles) <= set(ROLES)
    assert codec.roles
    if not codec.lossless:
        assert not {"buffer", "other"} & set(codec.roles)


@pytest.mark.parametrize("codec", [each for each in INSTANCES if "exp_avg_sq" in each.roles], ids=name_of)
def test_a_second_moment_never_becomes_zero(codec):
    exp_avg_sq = torch.logspace(-44, 0, 4096).view(64, 64)
    references = {"anchor": exp_avg_sq + 1e-3}
    encoded = codec.encode(exp_avg_sq, references)
    assert (decode(codec, encoded, exp_avg_sq, references) > 0).all()


@pytest.mark.slow
@every_codec
def test_decoding_is_exact_or_within_the_bound(codec):
    for dtype, shape in itertools.product(sorted(codec.dtypes, key=str), SHAPES):
        assert_exact_or_within_the_bound(codec, dtype, shape)


def assert_exact_or_within_the_bound(codec, dtype, shape):
    tensor, references = inputs(codec, shape, dtype)
    encoded = codec.encode(tensor, references)
    decoded = decode(codec, encoded, tensor, references)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    assert decoded.is_contiguous()
    assert bits_equal(decode(codec, encoded, tensor, own(references)), decoded)
    if codec.lossless:
        assert encoded.bound is None
        assert bits_equal(decoded, tensor)
    else:
        assert error(codec, tensor, decoded, references) <= encoded.bound


@pytest.mark.parametrize("codec", [each for each in INSTANCES if "anchor" in each.references], ids=name_of)
def test_an_anchor_that_nobody_needs_lends_its_memory_and_any_other_is_only_read(codec):
    tensor, references = inputs(codec, [300, 300], torch.float32)
    encoded, given_up = codec.encode(tensor, references), own(references)
    assert bits_equal(decode(codec, encoded, tensor, references), decode(codec, encoded, tensor, references))
    assert decode(codec, encoded, tensor, given_up).data_ptr() == given_up["anchor"].data_ptr()


@pytest.mark.slow
@every_codec
def test_payloads_are_flat_bytes_that_share_nothing_with_the_input(codec):
    tensor, references = inputs(codec, [300, 300], torch.float32)
    before = {name: each.clone() for name, each in {"tensor": tensor, **references}.items()}
    encoded = codec.encode(tensor, references)
    for payload in encoded.payloads:
        assert payload.dtype == torch.uint8
        assert payload.dim() == 1
        assert payload.is_contiguous()
        payload.fill_(0)
    assert all(bits_equal(each, before[name]) for name, each in {"tensor": tensor, **references}.items())
    assert encoded.payload_bytes == sum(payload.numel() for payload in encoded.payloads)


@every_codec
def test_decoded_tensor_shares_nothing_with_payloads_and_references(codec):
    tensor, references = inputs(codec, [300, 300], torch.float32)
    encoded = codec.encode(tensor, references)
    kept = {name: each.clone() for name, each in references.items()}
    first = decode(codec, encoded, tensor, references)
    expected = first.clone()
    first.fill_(7)
    assert bits_equal(decode(codec, encoded, tensor, references), expected)
    assert all(bits_equal(references[name], each) for name, each in kept.items())


@pytest.mark.slow
@every_codec
def test_same_input_gives_same_bytes(codec):
    first, second = (codec.encode(*inputs(codec, [300, 300], torch.float32)) for _ in range(2))
    assert first.params == second.params
    assert first.bound == second.bound
    assert all(torch.equal(*pair) for pair in zip(first.payloads, second.payloads, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=name_of)
@every_codec
def test_the_default_dtype_changes_nothing(codec, dtype):
    tensor, references = inputs(codec, [40, 300], torch.float32)
    expected = codec.encode(tensor, references)
    with default_dtype(dtype):
        encoded = codec.encode(tensor, references)
        decoded = decode(codec, encoded, tensor, references)
    assert (encoded.params, encoded.bound) == (expected.params, expected.bound)
    assert all(torch.equal(*pair) for pair in zip(encoded.payloads, expected.payloads, strict=True))
    assert bits_equal(decoded, decode(codec, expected, tensor, references))


@pytest.mark.slow
@every_codec
def test_strides_do_not_matter(codec):
    tensor, references = inputs(codec, [60, 50], torch.float32)
    expected = codec.encode(tensor, references)
    transposed = tensor.t().contiguous().t()
    strided = torch.stack([tensor, tensor], dim=-1)[..., 1]
    for each in (transposed, strided, torch.nn.Parameter(tensor)):
        same = {name: reference.t().contiguous().t() for name, reference in references.items()}
        encoded = codec.encode(each, same)
        assert all(torch.equal(*pair) for pair in zip(encoded.payloads, expected.payloads, strict=True))
        assert bits_equal(decode(codec, encoded, each, same), decode(codec, expected, tensor, references))


@every_codec
def test_zeros_stay_zeros_and_take_next_to_nothing(codec):
    zeros = torch.zeros(512, 512)
    references = {"anchor": zeros, "exp_avg_sq": zeros}
    encoded = codec.encode(zeros, references)
    assert torch.equal(decode(codec, encoded, zeros, references), zeros)
    # A scale per row, or a few bytes per block.
    assert encoded.payload_bytes < zeros.nbytes / 100 or codec.codec_id == "raw"


@every_codec
def test_unsupported_tensors_are_an_error(codec):
    with pytest.raises(UnsupportedError, match=r"expected a dense tensor of one of .*sparse_coo"):
        codec.encode(torch.eye(3).to_sparse(), {})
    with pytest.raises(UnsupportedError, match=r"found torch.float4_e2m1fn_x2"):
        codec.encode(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), {})


@every_codec
def test_references_of_another_shape_or_dtype_are_errors(codec):
    tensor, references = inputs(codec, [6, 8], torch.float32)
    encoded = codec.encode(tensor, references)
    for name in codec.references:
        for wrong in (torch.zeros(8, 6), torch.zeros(6, 8, dtype=torch.int32)):
            with pytest.raises(ConfigError, match=rf"reference {name}: expected torch.float32, shape \[6, 8\]"):
                codec.encode(tensor, {name: wrong})
            with pytest.raises(CorruptFileError, match=rf"reference {name}: expected torch.float32, shape \[6, 8\]"):
                decode(codec, encoded, tensor, {name: wrong})


@every_codec
def test_missing_reference_is_an_error_where_it_was_used(codec):
    tensor = torch.rand(6, 8)
    references = {"anchor": tensor - 1e-3, "exp_avg_sq": tensor.square()}
    encoded = codec.encode(tensor, references)
    for name in codec.references:
        with pytest.raises(CorruptFileError, match=rf"reference {name}: expected the decoded tensor, found nothing"):
            decode(codec, encoded, tensor)


@every_codec
def test_references_that_are_not_used_are_ignored(codec):
    tensor, references = inputs(codec, [6, 8], torch.float32)
    others = {"exp_avg": torch.zeros(1), "momentum": torch.zeros(0)}
    encoded = codec.encode(tensor, {**others, **references})
    assert torch.equal(encoded.payloads[0], codec.encode(tensor, references).payloads[0])


@every_codec
def test_empty_tensors_of_any_strides_work(codec):
    # So does numpy make them; torch cannot view this one as bytes.
    empty = torch.empty(0).as_strided([0, 3], [0, 0])
    references = {"anchor": empty, "exp_avg_sq": empty}
    encoded = codec.encode(empty, references)
    payloads = [payload if payload.numel() else payload.as_strided([0], [0]) for payload in encoded.payloads]
    assert codec.decode(payloads, encoded.params, [0, 3], torch.float32, references).shape == (0, 3)


def test_conjugated_and_negated_views_are_resolved():
    tensor = torch.randn(40, dtype=torch.complex64)
    for codec in (each for each in INSTANCES if torch.complex64 in each.dtypes):
        for view in (tensor.conj(), tensor.conj().imag):
            assert torch.equal(decode(codec, codec.encode(view, {}), view), view)
