"""The contract of a codec. Subclass it in a module that pytest collects, and name the codec."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence, Set
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ROLES, Codec, EncodedTensor, References
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

SHAPES = [[], [0], [1], [7], [0, 5], [5, 0], [3, 5], [37, 129], [5, 4, 3, 3], [2, 2**17 + 3], [700, 200]]


def name_of(value: object) -> str:
    """Return the name of a parameter in a test's id."""
    return value.codec_id if isinstance(value, Codec) else str(value).removeprefix("torch.")


def random_bits(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of any bit patterns; of a bool only the two that are allowed."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, [count], dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def copied(references: References) -> dict[str, Tensor]:
    """Return copies of references, which decoding may write over."""
    return {name: reference.clone() for name, reference in references.items()}


def decode(
    codec: Codec, encoded: EncodedTensor, like: Tensor, references: References | None = None, **options: bool
) -> Tensor:
    """Decode, with the parameters sent through JSON."""
    params = json.loads(json.dumps(encoded.params))
    return codec.decode(encoded.payloads, params, list(like.shape), like.dtype, references, **options)


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors agree in shape, dtype and every bit."""
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    if not same_kind or not left.numel():
        return same_kind
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class CodecContract:
    """The promises of a codec to the files that it writes. The docstring of a red test tells how to keep one.

    Examples:
        >>> from hf_trainweights.checkpoint.codecs.exact import Planes
        >>> class TestPlanes(CodecContract):
        ...     codecs = (Planes(),)
    """

    codecs: ClassVar[Sequence[Codec]] = ()
    """The codecs, with the options that users will choose; each test runs on each."""

    optional_parameters: ClassVar[Set[str]] = frozenset()
    """The parameters that older files lack, without which `_decode` must do."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on each codec."""
        if "codec" in metafunc.fixturenames:
            assert self.codecs, f"{type(self).__name__}: list the codecs to test in `codecs`"
            metafunc.parametrize("codec", self.codecs, ids=name_of)

    def inputs(
        self, codec: Codec, shape: list[int], dtype: torch.dtype, seed: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a tensor like those that the codec is made for, and its references by name.

        References are tensors that a codec may store the difference from. Here the tensor has random bits. Its one
        reference is an anchor, which stands for the tensor in an earlier checkpoint: every third element differs.
        Override it for a lossy codec, or for other references.
        """
        del codec
        tensor = random_bits(shape, dtype, seed)
        anchor = tensor.clone()
        anchor.view(-1)[::3] = random_bits([anchor.view(-1)[::3].numel()], dtype, seed + 1)
        return tensor, {"anchor": anchor}

    def error(self, codec: Codec, original: Tensor, decoded: Tensor, references: References) -> float:
        """Return the largest error of an element in the unit of the codec's bound; here the absolute error."""
        del codec, references
        x, y = original.double(), decoded.double()
        exact = (x == y) | (x.isnan() & y.isnan())
        return (y - x).abs().masked_fill(exact, 0).max().item() if x.numel() else 0.0

    def test_it_is_registered_by_its_id(self, codec: Codec) -> None:
        """Files name the codec: call `register_codec`, in this package list it in `CODECS`."""
        assert CODECS.get(codec.codec_id) is type(codec)

    def test_roles_are_known_and_a_loss_spares_the_tensors_that_must_be_exact(self, codec: Codec) -> None:
        """A lossy codec serves neither buffers nor other tensors, whose meaning nobody knows."""
        assert codec.roles
        assert set(codec.roles) <= set(ROLES)
        assert codec.lossless or not {"buffer", "other"} & set(codec.roles)

    def test_a_second_moment_never_becomes_zero(self, codec: Codec) -> None:
        """The next update divides by its root, so a codec that rounds small values to 0 leaves exp_avg_sq out."""
        if "exp_avg_sq" not in codec.roles:
            pytest.skip("exp_avg_sq is not among its roles")
        exp_avg_sq = torch.logspace(-44, 0, 4096).view(64, 64)
        references = {"anchor": exp_avg_sq + 1e-3}
        assert (decode(codec, codec.encode(exp_avg_sq, references), exp_avg_sq, references) > 0).all()

    def test_decoding_is_exact_or_within_the_bound(self, codec: Codec) -> None:
        """A lossless codec returns every bit. A lossy one decodes while it encodes, and returns the largest error."""
        for dtype, shape in itertools.product(sorted(codec.dtypes, key=str), SHAPES):
            tensor, references = self.inputs(codec, shape, dtype)
            encoded = codec.encode(tensor, references)
            decoded = decode(codec, encoded, tensor, references)
            case = f"{dtype}, shape {shape}"
            assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype), case
            assert decoded.is_contiguous(), case
            # Then decoding may overwrite the anchor, which is a copy here.
            over_anchor = decode(codec, encoded, tensor, copied(references), is_anchor_spare=True)
            assert bits_equal(over_anchor, decoded), f"{case}, decoded over the anchor"
            if codec.lossless:
                assert encoded.bound is None, "a lossless codec has no bound"
                assert bits_equal(decoded, tensor), case
            else:
                assert encoded.bound is not None, "a lossy codec returns its bound"
                assert self.error(codec, tensor, decoded, references) <= encoded.bound, case

    def test_payloads_are_flat_bytes_that_share_no_memory_with_the_input(self, codec: Codec) -> None:
        """A payload is a new contiguous uint8 tensor of one dimension."""
        tensor, references = self.inputs(codec, [300, 300], torch.float32)
        before = {name: value.clone() for name, value in {"tensor": tensor, **references}.items()}
        encoded = codec.encode(tensor, references)
        for payload in encoded.payloads:
            assert (payload.dtype, payload.dim(), payload.is_contiguous()) == (torch.uint8, 1, True)
            payload.fill_(0)
        assert all(bits_equal(value, before[name]) for name, value in {"tensor": tensor, **references}.items())
        assert encoded.payload_bytes == sum(payload.numel() for payload in encoded.payloads)

    def test_a_decoded_tensor_shares_no_memory_with_payloads_and_references(self, codec: Codec) -> None:
        """Whoever changes a loaded tensor must change neither the file's bytes nor the anchor."""
        tensor, references = self.inputs(codec, [300, 300], torch.float32)
        encoded = codec.encode(tensor, references)
        copies = {name: reference.clone() for name, reference in references.items()}
        first = decode(codec, encoded, tensor, references)
        expected = first.clone()
        first.fill_(7)
        assert bits_equal(decode(codec, encoded, tensor, references), expected)
        assert all(bits_equal(references[name], reference) for name, reference in copies.items())

    def test_only_the_values_matter(self, codec: Codec) -> None:
        """Neither strides nor the default dtype change a byte, and the same input gives the same bytes."""
        tensor, references = self.inputs(codec, [60, 50], torch.float32)
        expected = codec.encode(tensor, references)
        values = decode(codec, expected, tensor, references)
        strided = {name: reference.t().contiguous().t() for name, reference in references.items()}
        views = (tensor.t().contiguous().t(), torch.stack([tensor, tensor], dim=-1)[..., 1], nn.Parameter(tensor))
        for view in (tensor, *views):
            _assert_same(codec.encode(view, strided), expected)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                _assert_same(codec.encode(tensor, references), expected)
                assert bits_equal(decode(codec, expected, tensor, references), values), dtype
            finally:
                torch.set_default_dtype(torch.float32)

    def test_tensors_that_it_does_not_encode_are_an_error(self, codec: Codec) -> None:
        """`Codec.encode` refuses all but dense tensors of `dtypes`; a subclass does not override it."""
        with pytest.raises(UnsupportedError, match=r"expected a dense tensor of one of .*sparse_coo"):
            codec.encode(torch.eye(3).to_sparse(), {})
        with pytest.raises(UnsupportedError, match=r"found torch.float4_e2m1fn_x2"):
            codec.encode(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), {})

    def test_references_of_another_shape_or_dtype_are_errors(self, codec: Codec) -> None:
        """`Codec` checks the references that `references` names."""
        tensor, references = self.inputs(codec, [6, 8], torch.float32)
        encoded = codec.encode(tensor, references)
        for name in codec.references:
            for wrong in (torch.zeros(8, 6), torch.zeros(6, 8, dtype=torch.int32)):
                with pytest.raises(ConfigError, match=rf"reference {name}: expected torch.float32, shape \[6, 8\]"):
                    codec.encode(tensor, {name: wrong})
                with pytest.raises(CorruptFileError, match=rf"reference {name}: expected torch.float32, shape"):
                    decode(codec, encoded, tensor, {name: wrong})

    def test_a_missing_reference_is_an_error_if_it_was_used(self, codec: Codec) -> None:
        """`_decode` asks for it with `cls.needed`. The codec uses all of its references for this tensor."""
        tensor = torch.rand(6, 8)
        encoded = codec.encode(tensor, {"anchor": tensor - 1e-3, "exp_avg_sq": tensor.square()})
        for name in codec.references:
            with pytest.raises(CorruptFileError, match=rf"reference {name}: expected the decoded tensor, found noth"):
                decode(codec, encoded, tensor)

    def test_references_that_it_has_no_use_for_are_ignored(self, codec: Codec) -> None:
        """A caller passes all references that it has, of any shape."""
        tensor, references = self.inputs(codec, [6, 8], torch.float32)
        others = {"exp_avg": torch.zeros(1), "momentum": torch.zeros(0)}
        _assert_same(codec.encode(tensor, {**others, **references}), codec.encode(tensor, references))

    def test_empty_tensors_of_any_strides_work(self, codec: Codec) -> None:
        """NumPy makes such tensors, and torch cannot view this one as bytes."""
        empty = torch.empty(0).as_strided([0, 3], [0, 0])
        references = {"anchor": empty, "exp_avg_sq": empty}
        encoded = codec.encode(empty, references)
        payloads = [payload if payload.numel() else payload.as_strided([0], [0]) for payload in encoded.payloads]
        assert codec.decode(payloads, encoded.params, [0, 3], torch.float32, references).shape == (0, 3)

    def test_conjugated_and_negated_views_are_resolved(self, codec: Codec) -> None:
        """`Codec.encode` passes `_encode` a plain tensor."""
        if torch.complex64 not in codec.dtypes:
            pytest.skip("complex64 is not among its dtypes")
        tensor = torch.randn(40, dtype=torch.complex64)
        for view in (tensor.conj(), tensor.conj().imag):
            assert torch.equal(decode(codec, codec.encode(view, {}), view), view)

    def test_truncated_and_extended_payloads_are_errors(self, codec: Codec) -> None:
        """Compare the length of each payload with the shape, or with a parameter, before you allocate."""
        shape = [70, 1000]
        tensor, references = self.inputs(codec, shape, torch.float32)
        encoded = codec.encode(tensor, references)
        for index, payload in enumerate(encoded.payloads):
            lengths = sorted({0, 1, 2, 3, 4, 5, len(payload) // 2, *range(max(len(payload) - 9, 0), len(payload))})
            changed = [payload[:length] for length in lengths if length < len(payload)]
            changed += [torch.cat([payload, payload.new_zeros(extra)]) for extra in (1, 2, 4, 100)]
            changed += [torch.cat([payload.new_zeros(1), payload])]
            for damaged in changed:
                payloads = [*encoded.payloads[:index], damaged, *encoded.payloads[index + 1 :]]
                # Some codecs let the codec planes encode one of their payloads, and pass its errors on.
                with pytest.raises(CorruptFileError, match=rf"codec {codec.codec_id}|codec planes"):
                    codec.decode(payloads, encoded.params, shape, tensor.dtype, references)

    def test_missing_swapped_and_extra_payloads_are_errors(self, codec: Codec) -> None:
        """`_decode` begins with `cls.check_count`."""
        shape = [70, 1000]
        tensor, references = self.inputs(codec, shape, torch.float32)
        encoded = codec.encode(tensor, references)
        payloads = encoded.payloads
        others = [[], payloads[:-1], [*payloads, payloads[0]]]
        others += [[payloads[1], payloads[0], *payloads[2:]]] if len(payloads) > 1 else []
        for damaged in others:
            with pytest.raises(CorruptFileError, match=r"codec .*payload|codec .*block"):
                codec.decode(damaged, encoded.params, shape, tensor.dtype, references)

    def test_missing_parameters_are_errors(self, codec: Codec) -> None:
        """`_decode` reads each parameter with `cls.param`, which checks its type and limits."""
        tensor, references = self.inputs(codec, [37, 129], torch.float32)
        encoded = codec.encode(tensor, references)
        for name in encoded.params.keys() - self.optional_parameters:
            rest = {key: value for key, value in encoded.params.items() if key != name}
            with pytest.raises(CorruptFileError, match=rf"parameter {name}: expected of type .*found None"):
                codec.decode(encoded.payloads, rest, [37, 129], tensor.dtype, references)


def _assert_same(left: EncodedTensor, right: EncodedTensor) -> None:
    assert (left.params, left.bound) == (right.params, right.bound)
    assert [payload.tolist() for payload in left.payloads] == [payload.tolist() for payload in right.payloads]
