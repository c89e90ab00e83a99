"""`Codec`: encodes a tensor as a few byte arrays ("payloads") and JSON parameters, and decodes them to a tensor.

The law: **a `codec_id` never changes meaning; a changed encoding is a new id.** So later versions decode every file
that was ever written. Multi-byte numbers are little-endian, as in every file that torch and safetensors write.

A codec knows neither names nor files. `encode` and `decode` make the checks that every codec needs, then call the
subclass's `_encode` and `_decode`. The input of `decode` may be hostile. So every codec checks its parameters and
lengths before it allocates memory, and reports damage as `CorruptFileError`, never as an error of torch, numpy or zstd.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, Union

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

Json: TypeAlias = Union[str, int, float, bool, list["Json"], dict[str, "Json"], None]  # noqa: UP007 (recursive)
Params: TypeAlias = Mapping[str, Json]
References: TypeAlias = Mapping[str, Tensor]

# Every dtype whose elements are whole bytes; the lossless codecs take them all.
_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex32 complex64 complex128 bool uint8 uint16 uint32 uint64 int8 int16 int32 int64"
)
ALL_DTYPES: frozenset[torch.dtype] = frozenset(getattr(torch, name) for name in _DTYPE_NAMES.split())
# Positive states that an optimizer divides by, or by whose root it divides. None of them may become zero by rounding.
SQUARES = ("exp_avg_sq", "maximum", "sum", "norm")
ROLES = ("weight", "exp_avg", *SQUARES, "momentum", "factor", "iterate", "buffer", "other")
"""The roles of tensors in a checkpoint: a parameter, a module's buffer, a state of an optimizer, or anything else.

`planning/optimizers.py` says which state of which optimizer has which role.
"""

# The limits of torch. Below them the product of a shape's sizes is exact in torch's 64-bit arithmetic.
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 56
# The key of `_decode`'s references under which an anchor stands that may be written over.
_SPARE = "spare memory"
# The dtypes of the lossy codecs, which compute in float32 and round once to the tensor's dtype.
LOSSY_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class EncodedTensor:
    """One encoded tensor.

    Args:
        payloads: One-dimensional contiguous uint8 tensors on the CPU; any of them may be empty.
        params: JSON that `decode` needs besides payloads, shape, dtype and references. Floats survive `repr`.
        bound: None if decoding is bit-exact. Else the largest error of a decoded element, measured by decoding
            every element. Each lossy codec documents the unit of its bound.
    """

    payloads: list[Tensor]
    params: dict[str, Json]
    bound: float | None = None

    @property
    def payload_bytes(self) -> int:
        """Size of all payloads."""
        return sum(payload.numel() for payload in self.payloads)


class Codec(ABC):
    """Turns tensors into bytes and back. Subclasses are frozen dataclasses whose fields are the user's options.

    Attributes:
        codec_id: The name in files. It never changes meaning.
        lossless: Whether decoding is bit-exact.
        roles: For which of `ROLES` a user may choose the codec. A lossy codec names only roles in which its error does
            no harm: never buffers or others, and exp_avg_sq only if it rounds no small value to zero.
        references: Names of the other tensors that encoding and decoding need or may use, always DECODED values:
            `"anchor"` (same shape and dtype as the tensor) and `"exp_avg_sq"` (same shape).
        hints: Names of other tensors that encoding may use and decoding does without; same shape, any dtype of
            `LOSSY_DTYPES`.
        dtypes: The dtypes that the codec can encode. Any other dtype is an `UnsupportedError`.
    """

    codec_id: ClassVar[str]
    lossless: ClassVar[bool]
    roles: ClassVar[tuple[str, ...]]
    references: ClassVar[tuple[str, ...]] = ()
    hints: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[frozenset[torch.dtype]] = ALL_DTYPES

    def encode(self, tensor: Tensor, references: References | None = None) -> EncodedTensor:
        """Encode a tensor of one of `dtypes`, any shape, strides and device; the same input gives the same bytes.

        The tensor is only read, and payloads share no memory with it. `references` are decoded tensors by name. A codec
        ignores the references that it has no use for. ConfigError: a reference that the codec needs is missing or does
        not fit. UnsupportedError: this codec cannot encode the dtype or layout.
        """
        return self._encode(*self._checked(tensor, references))

    def _checked(self, tensor: Tensor, references: References | None) -> tuple[Tensor, References]:
        """Check the arguments of `encode`; return the tensor and the references in use, contiguous on the CPU."""
        if tensor.dtype not in self.dtypes or tensor.layout != torch.strided:
            expected = f"a dense tensor of one of {', '.join(sorted(str(dtype) for dtype in self.dtypes))}"
            kind, next_step = f"{tensor.dtype}, {tensor.layout}", "Use a lossless codec for this tensor."
            raise UnsupportedError(f"codec {self.codec_id}", expected, kind, next_step)
        usable_names = (*self.references, *self.hints)
        used = {name: references[name] for name in usable_names if references and name in references}
        for name, reference in used.items():
            problem = _reference_problem(name, reference, tensor.shape, tensor.dtype)
            if problem:
                raise ConfigError(f"codec {self.codec_id}, reference {name}", *problem, "Pass the decoded tensor.")
        return _plain(tensor), {name: _plain(reference) for name, reference in used.items()}

    @classmethod
    def decode(
        cls,
        payloads: Sequence[Tensor],
        params: Params,
        shape: Sequence[int],
        dtype: torch.dtype,
        references: References | None = None,
        *,
        is_anchor_spare: bool = False,
    ) -> Tensor:
        """Decode an `EncodedTensor` to a new contiguous CPU tensor; the references must be those of its encoding.

        `references` are only read. If `is_anchor_spare`, the caller no longer needs the anchor, and the codec may write
        the result over it: the first write to fresh memory takes half as long as decoding a difference.
        CorruptFileError: payloads, parameters, shape, dtype or references do not fit, or one is missing.
        """
        is_plain = len(shape) <= _MOST_DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)
        if not is_plain or math.prod(shape) >= _MOST_ELEMENTS:
            raise cls.corrupt("shape", f"at most {_MOST_DIMENSIONS} sizes >= 0", repr(list(shape)[:9])[:80])
        if dtype not in cls.dtypes:
            raise cls.corrupt("dtype", "one this codec can decode", str(dtype))
        for index, payload in enumerate(payloads):
            _check_payload(cls, index, payload)
        used = {name: references[name] for name in cls.references if references and name in references}
        for name, reference in used.items():
            problem = _reference_problem(name, reference, shape, dtype)
            if problem:
                raise cls.corrupt(f"reference {name}", *problem)
        plain_payloads = [_plain(payload) for payload in payloads]
        plain_references = {name: _plain(reference) for name, reference in used.items()}
        if is_anchor_spare and "anchor" in used:
            plain_references[_SPARE] = plain_references["anchor"]
        try:
            decoded = cls._decode(plain_payloads, params, torch.Size(shape), dtype, plain_references)
        except MemoryError as error:
            raise cls.corrupt("shape", "a tensor that fits into memory", repr(list(shape))[:80]) from error
        if dtype == torch.bool and (decoded.view(torch.uint8) > 1).any():
            raise cls.corrupt("elements", "0 or 1 in each byte of a bool", "another number")
        return decoded

    @abstractmethod
    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        """Encode a checked, contiguous CPU tensor."""

    @classmethod
    @abstractmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        """Decode. `decode` has checked payloads, shape, dtype and references one by one, not against each other."""

    @classmethod
    def corrupt(cls, part: str, expected: str, found: str) -> CorruptFileError:
        """Return the error to raise when `part` of an encoded tensor is not as `encode` wrote it."""
        next_step = "The data are damaged: restore them from a copy."
        return CorruptFileError(f"codec {cls.codec_id}, {part}", expected, found, next_step)

    @classmethod
    def check_count(cls, payloads: Sequence[Tensor], expected: int) -> None:
        """Check the number of payloads; CorruptFileError: it is not `expected`."""
        if len(payloads) != expected:
            raise cls.corrupt("payloads", str(expected), str(len(payloads)))

    @classmethod
    def param(
        cls, params: Params, name: str, kind: type, smallest: float = -math.inf, largest: float = math.inf
    ) -> Any:
        """Return `params[name]`; a number must lie between `smallest` and `largest`.

        CorruptFileError: the parameter is missing, not exactly of type `kind`, NaN, infinite, or out of the limits.
        """
        value = params.get(name)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise cls.corrupt(f"parameter {name}", f"of type {kind.__name__}, finite", repr(value)[:80])
        if isinstance(value, int | float) and not smallest <= value <= largest:
            raise cls.corrupt(f"parameter {name}", f"{smallest} to {largest}", repr(value)[:80])
        return value

    @staticmethod
    def spare_memory(references: References) -> Tensor | None:
        """Return the anchor if a codec may decode to it, or None."""
        return references.get(_SPARE)

    @classmethod
    def needed(cls, references: References, name: str) -> Tensor:
        """Return a reference that decoding needs; CorruptFileError: it is missing."""
        if name not in references:
            raise cls.corrupt(f"reference {name}", "the decoded tensor", "nothing")
        return references[name]


def _plain(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor without gradient or lazy conjugation; a view where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # An empty tensor counts as contiguous with any strides, but with some strides torch cannot view it as bytes.
    return plain if plain.numel() else torch.empty(plain.shape, dtype=plain.dtype)


def _check_payload(codec: type[Codec], index: int, payload: Tensor) -> None:
    if not isinstance(payload, Tensor):
        raise codec.corrupt(f"payload {index}", "a tensor", type(payload).__name__)
    is_cpu_bytes = payload.dtype == torch.uint8 and payload.device.type == "cpu"
    if not (is_cpu_bytes and payload.dim() == 1 and payload.is_contiguous()):
        kind = f"{payload.dtype}, shape {list(payload.shape)}, {payload.device}"
        raise codec.corrupt(f"payload {index}", "a contiguous 1-D uint8 tensor on the CPU", kind)


def _reference_problem(
    name: str, reference: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> tuple[str, str] | None:
    """Return a description of the expected and of the actual reference, or None if `reference` fits the tensor."""
    same_dtype = reference.dtype == dtype if name == "anchor" else reference.dtype in LOSSY_DTYPES
    if list(reference.shape) == list(shape) and same_dtype and reference.device.type == "cpu":
        return None
    return (
        f"{dtype}, shape {list(shape)}, on cpu",
        f"{reference.dtype}, {list(reference.shape)}, {reference.device}",
    )
