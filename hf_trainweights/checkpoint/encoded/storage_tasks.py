"""`TensorPlan`, the codecs that a tensor may have, and `StorageEncoder`, which encodes storages in several threads.

A policy makes the plans. Each storage is encoded by the codec of its plan that gives the fewest bytes. Tasks come in
the order in which a file holds their results. A task encodes one storage, or a second moment together with the first
moment that refers to it, or some chunks (a section) of a large storage. So the memory of all threads does not grow with
the largest tensor if its codec works in chunks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Json, References
from hf_trainweights.checkpoint.codecs.coding.blocks import BlockWriter, ChunkedCodec, Chunks, chunk_ranges
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import Planes, Raw
from hf_trainweights.checkpoint.codecs.moments import LogRank1, TileEncoder, UpdateSpace
from hf_trainweights.checkpoint.encoded.decoder import AnyAnchor
from hf_trainweights.checkpoint.encoded.storages import Storage
from hf_trainweights.checkpoint.encoded.structure import TensorReport, payload_crc32
from hf_trainweights.checkpoint.encoded.tree import KeyPath, path_text
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.errors import QuantizationError, UnsupportedError

# A coder's headers outweigh its gain for fewer elements than the first number, and never for more than the second.
_RAW_ELEMENTS = (64, 4096)
# Storages of more bytes are encoded in sections of `_CHUNKS` chunks, if their codec has chunks.
_LARGE_BYTES = 16 << 20
_CHUNKS = 4
# The largest allowed error of an element, in units of the root mean square of its weight. Errors are uniform within it,
# so at this bound they have a twelfth of the weight's power. A larger bound comes from a wrong estimate of how far the
# weight moves, or from a rule that suits larger weights. Then the weight is stored exactly.
_LARGEST_BOUND = 0.5
# A weight whose root mean square change is smaller counts as unchanged: delta-uniform has no such small step.
_SMALLEST_RMS = 2.0**-100


@dataclass(frozen=True)
class TensorPlan:
    """How to encode one tensor.

    Args:
        role: One of `ROLES`, for the report.
        name: Its parameter's name, for the report.
        candidates: Codecs to try: the smallest result wins, the earlier one in a tie. A codec drops out if a
            reference named below is missing, if it refuses the tensor, or if it is lossy and the tensor is not
            contiguous or shares its memory. If no codec is left, the tensor is stored exactly.
        anchor: Name of its reference in the anchor.
        exp_avg_sq: Path of its second moment in the same tree.
        steps_per_rms: The number of steps into which a lossy mode divides the root mean square of a weight's first
            difference to an anchor; 0 for a tensor without such steps. `with_steps` adds the codec that uses them.
        or_exact: Whether the candidates are tried beside that codec. Most bits of a half-precision weight do not
            change between saves, and an anchor may move so little that steps take more bits than floats.
    """

    role: str
    name: str
    candidates: tuple[Codec, ...]
    anchor: str | None = None
    exp_avg_sq: KeyPath | None = None
    steps_per_rms: int = 0
    or_exact: bool = False

    @property
    def uses_anchor(self) -> bool:
        """Whether the tensor may be stored as a difference to the anchor."""
        return any("anchor" in codec.references for codec in self.candidates)

    @property
    def is_lossless(self) -> bool:
        """Whether decoding returns every element unchanged."""
        return not self.steps_per_rms and all(codec.lossless for codec in self.candidates)

    def with_steps(self, rms: float) -> TensorPlan:
        """Return the plan with a codec that rounds to steps of rms / steps_per_rms.

        `rms` is that of the weight's first difference to an anchor, so the steps stay fixed from then on. A weight that
        did not change stays exact.
        """
        if not self.steps_per_rms or rms < _SMALLEST_RMS:
            return self
        rounding = DeltaUniform(step=rms / self.steps_per_rms)
        return replace(self, candidates=(*(self.candidates if self.or_exact else ()), rounding))


Plan = Mapping[KeyPath, TensorPlan]


def with_steps(plan: Plan, drift_rms: Mapping[str, float]) -> Plan:
    """Call `TensorPlan.with_steps` for each tensor; `drift_rms` has `rms` by name. Weights without it stay exact."""
    return {path: tensor.with_steps(drift_rms.get(tensor.name, 0.0)) for path, tensor in plan.items()}


@dataclass(frozen=True)
class _Coded:
    """An encoded storage, its pieces with their checksums. For a large storage, the pieces after its sections."""

    index: int
    codec: Codec
    params: dict[str, Json]
    bound: float | None
    pieces: list[tuple[Tensor, int]]


@dataclass
class _LargeStorage:
    """A storage that is encoded in sections, with stored block sizes and flags of the finished sections."""

    index: int
    codec: ChunkedCodec
    chunks: Chunks
    sizes: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)

    def finish(self) -> _Coded:
        """Return the rest of the first piece, which the sections began, and all other pieces."""
        return _coded(self.index, self.codec, self.chunks.finish(BlockWriter(), self.flags, self.sizes))


@dataclass(frozen=True)
class _Section:
    """Some encoded chunks of a large storage."""

    storage: _LargeStorage
    blocks: Tensor
    crc32: int
    sizes: list[int]
    flags: list[int]


def _result_bytes(result: list[_Coded] | _Section) -> int:
    """Return the size of a task's result."""
    if isinstance(result, _Section):
        return result.blocks.numel()
    return sum(piece.numel() for coded in result for piece, _ in coded.pieces)


class StorageEncoder:
    """Encodes the storages of one file; `second_moments` is that argument of `encode_file`.

    When `pieces` is exhausted, `entries` describe the storages for the file's structure, and `report` describes them
    for people. Both are in the order of the file: `numbers` has the index in them by the index of a storage.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        plan: Plan,
        anchor: AnyAnchor | None,
        second_moments: Mapping[str, Tensor],
    ):
        self._storages = storages
        self._plans = [_plan_of(storage, plan) for storage in storages]
        owners = {path: index for index, storage in enumerate(storages) for path in storage.paths}
        # The index of the second moment by that of the storage that refers to it.
        self._moments = {i: owners[plan.exp_avg_sq] for i, plan in enumerate(self._plans) if plan.exp_avg_sq in owners}
        self._anchor = anchor
        self._second_moments = second_moments
        self.numbers: dict[int, int] = {}
        self.entries: list[dict[str, Json]] = []
        self.report: list[TensorReport] = []
        self._size_bytes = self._crc32 = 0  # of the unfinished piece, and of all pieces of its storage so far

    def pieces(self) -> Generator[tuple[Tensor, int, bool]]:
        """Yield the pieces of the payload, their checksums, and whether each continues the piece before it."""
        workers = worker_count(sum(storage.size_bytes for storage in self._storages))
        with contextlib.closing(in_order(self._tasks(), workers, _result_bytes)) as results:
            for result in results:
                if isinstance(result, _Section):
                    yield from self._add_section(result)
                else:
                    for coded in result:
                        yield from self._add(coded)

    def _add_section(self, section: _Section) -> Iterator[tuple[Tensor, int, bool]]:
        yield self._counted(section.blocks, section.crc32)
        section.storage.sizes += section.sizes
        section.storage.flags += section.flags
        if len(section.storage.flags) == len(section.storage.chunks.ranges):
            yield from self._add(section.storage.finish())

    def _counted(self, piece: Tensor, crc32: int) -> tuple[Tensor, int, bool]:
        """Add a piece, or a section of one, to the size and checksum, and return it as `pieces` yields it."""
        continues = self._size_bytes > 0
        self._crc32 = zlib_ng.crc32_combine(self._crc32, crc32, piece.numel())
        self._size_bytes += piece.numel()
        return piece, crc32, continues

    def _add(self, coded: _Coded) -> Iterator[tuple[Tensor, int, bool]]:
        storage, plan = self._storages[coded.index], self._plans[coded.index]
        sizes: list[Json] = []
        for piece, crc32 in coded.pieces:
            yield self._counted(piece, crc32)
            sizes.append(self._size_bytes)
            self._size_bytes = 0
        entry: dict[str, Json] = {
            "codec": coded.codec.codec_id,
            "dtype": str(storage.source.dtype).removeprefix("torch."),
            "shape": list(storage.shape),
            "sizes": sizes,
            "crc32": self._crc32,
        }
        self._crc32 = 0
        if coded.params:
            entry["params"] = coded.params
        # The codec has used each planned reference that it takes, for it drops out if one is missing.
        if "anchor" in coded.codec.references and self._anchor is not None and plan.anchor is not None:
            entry["anchor"] = self._anchor.stored_name(plan.anchor)
        moment = self._moments.get(coded.index)
        if "exp_avg_sq" in coded.codec.references and moment is not None:
            entry["exp_avg_sq"] = self.numbers[moment]
        if coded.bound is not None:
            entry["bound"] = coded.bound
        self.numbers[coded.index] = len(self.entries)
        self.entries.append(entry)
        self.report.append(TensorReport.of(entry, path_text(storage.paths[0]), plan.name, plan.role))

    def _tasks(self) -> Iterator[tuple[int, Callable[[], list[_Coded] | _Section]]]:
        """Yield the memory that each task needs, in bytes, and the function that does it."""
        for unit in self._units():
            size_bytes = sum(self._storages[index].size_bytes for index in unit)
            large = self._large_storage(unit[0], size_bytes) if len(unit) == 1 else None
            if large is None:
                yield size_bytes, partial(self._encode, unit)
                continue
            ranges = large.chunks.ranges
            for start in range(0, len(ranges), _CHUNKS):
                yield size_bytes * _CHUNKS // len(ranges), partial(_encode_section, large, start)

    def _units(self) -> Iterator[list[int]]:
        """Group the storages into tasks, in the order of the file, each a list of indices.

        A second moment comes before the storages that refer to it, in one task with the first of these.
        """
        indices = range(len(self._storages))
        order = [*dict.fromkeys(i for index in indices for i in (self._moments.get(index, index), index))]
        positions = {index: position for position, index in enumerate(order)}
        first_users: dict[int, int] = {}  # positions in `order`, by the position of a second moment
        for index in filter(self._moments.__contains__, order):
            first_users.setdefault(positions[self._moments[index]], positions[index])
        start = stop = 0
        for position in range(len(order)):
            stop = max(stop, first_users.get(position, position))
            if position == stop:
                yield order[start : stop + 1]
                start = stop = position + 1

    def _large_storage(self, index: int, size_bytes: int) -> _LargeStorage | None:
        """Cut a storage into chunks; None if it is not large, has several codecs, or its only codec has no chunks."""
        plan = self._plans[index]
        # An anchor is decoded here, in the thread that hands out tasks, while all sections wait. A storage that is not
        # large decodes its anchor in its own task. So the limit is higher if there is an anchor.
        is_large = size_bytes > (1 if plan.anchor is None else 4) * _LARGE_BYTES
        if not is_large or len(plan.candidates) > 1 or not all(isinstance(c, ChunkedCodec) for c in plan.candidates):
            return None
        tensor, references = self._read(index)
        usable, exact, references = _candidates(tensor, self._storages[index], plan, references)
        codec, *others = usable or exact
        if others or not isinstance(codec, ChunkedCodec):
            return None
        return _LargeStorage(index, codec, codec.chunks(tensor, references))

    def _read(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a storage's elements, and its references and hints from other files."""
        plan, tensor = self._plans[index], self._storages[index].read()
        references: dict[str, Tensor] = {}
        if self._anchor is not None and plan.anchor is not None and plan.anchor in self._anchor:
            reference = self._anchor.tensor(plan.anchor)
            # A float is not cast to an integer: for floats out of range the result depends on the machine.
            if reference.dtype == tensor.dtype or (reference.is_floating_point() and tensor.is_floating_point()):
                references["anchor"] = reference.to(tensor.dtype)
        if plan.role == "weight" and plan.name in self._second_moments:
            references["exp_avg_sq"] = self._second_moments[plan.name].detach().cpu()
        return tensor, references

    def _encode(self, unit: list[int]) -> list[_Coded]:
        """Encode the storages of a task. Later ones may refer to an earlier one, by its decoded elements."""
        coded = self._encode_moments(unit)
        if coded:
            return coded
        decoded: dict[int, Tensor] = {}
        moments = {index: self._moments[index] for index in unit if index in self._moments}
        for index in unit:
            tensor, references = self._read(index)
            if moments.get(index) in decoded:
                references["exp_avg_sq"] = decoded.pop(moments[index])
            codec, encoded = _encode_storage(tensor, self._storages[index], self._plans[index], references)
            if index in moments.values():
                arguments = encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references
                decoded[index] = tensor if codec.lossless else codec.decode(*arguments)
            coded.append(_coded(index, codec, encoded))
        return coded

    def _encode_moments(self, unit: list[int]) -> list[_Coded]:
        """Encode a second and a first moment by tiles, which takes no decoded copy; return [] for any other task."""
        storages = [self._storages[index] for index in unit]
        are_alike = len({storage.shape for storage in storages}) == 1 and all(s.exclusive for s in storages)
        match [self._plans[index].candidates for index in unit]:
            case [[LogRank1() as log_rank1], [UpdateSpace() as update_space]] if self._moments.get(unit[1]) == unit[0]:
                are_plain = type(update_space) is UpdateSpace and are_alike
                if not are_plain or not {storage.source.dtype for storage in storages} <= LOSSY_DTYPES:
                    return []
                exp_avg_sq, exp_avg = (storage.read() for storage in storages)
                encoder = TileEncoder(exp_avg, update_space.step)
                encoded = log_rank1.encode_tiles(exp_avg_sq, encoder.add)
                return [_coded(unit[0], log_rank1, encoded), _coded(unit[1], update_space, encoder.finish())]
        return []


def _encode_storage(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[Codec, EncodedTensor]:
    """Encode a storage by the codec of its plan with the smallest result, or exactly if its plan has no usable codec.

    UnsupportedError: no codec takes the dtype; it names the key path.
    """
    usable, exact, references = _candidates(tensor, storage, plan, references)
    best = _smallest(tensor, usable, references) or _smallest(tensor, exact, {})
    if best is None:
        raise UnsupportedError(path_text(storage.paths[0]), "a dtype that planes takes", str(tensor.dtype), "Cast it.")
    return best


def _candidates(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[list[Codec], list[Codec], References]:
    """Return the usable codecs of the plan, exact codecs in case all of them fail, and the references that fit."""
    references = {name: reference for name, reference in references.items() if reference.shape == tensor.shape}
    missing = {name for name in ("anchor", "exp_avg_sq") if getattr(plan, name) is not None} - references.keys()
    taking = [codec for codec in plan.candidates if tensor.dtype in codec.dtypes]
    exclusive = [codec for codec in taking if storage.exclusive or codec.lossless]
    usable = [codec for codec in exclusive if not missing.intersection(codec.references)]
    exact: list[Codec] = [Raw()] if tensor.numel() < _RAW_ELEMENTS[1] else []
    if tensor.numel() >= _RAW_ELEMENTS[0]:
        exact.append(Planes())
    return usable, exact, references


def _smallest(tensor: Tensor, codecs: Sequence[Codec], references: References) -> tuple[Codec, EncodedTensor] | None:
    """Return the codec with the smallest result, the earlier one in a tie, and the result; None if all codecs fail."""
    best: tuple[int, EncodedTensor] | None = None
    # Codecs with chunks come last, because they stop as soon as they have written more than the best codec so far.
    for index, codec in sorted(enumerate(codecs), key=lambda item: isinstance(item[1], ChunkedCodec)):
        most_bytes = math.inf if best is None else best[1].payload_bytes - (index > best[0])
        try:
            encoded = _encode_within(codec, tensor, references, most_bytes)
        except (QuantizationError, UnsupportedError):
            continue
        if encoded is not None and encoded.payload_bytes <= most_bytes and not _is_destroyed(tensor, codec, encoded):
            best = index, encoded
    return best and (codecs[best[0]], best[1])


def _is_destroyed(tensor: Tensor, codec: Codec, encoded: EncodedTensor) -> bool:
    """Return whether a weight's step is so coarse that its error exceeds `_LARGEST_BOUND`."""
    if not isinstance(codec, DeltaUniform) or encoded.bound is None:
        return False
    # The first elements of nearly every weight prove that it is not, so the others are seldom read.
    enough, flat = (encoded.bound / _LARGEST_BOUND) ** 2 * tensor.numel(), tensor.reshape(-1)
    sum_of_squares = 0.0
    for chunk in chunk_ranges(len(flat)):
        sum_of_squares += flat[chunk].double().nan_to_num_(0.0, 0.0, 0.0).square_().sum().item()
        if sum_of_squares >= enough:
            return False
    return True


def _encode_within(codec: Codec, tensor: Tensor, references: References, most_bytes: float) -> EncodedTensor | None:
    """Encode a tensor, or return None if its first chunks take more than `most_bytes` already."""
    if not isinstance(codec, ChunkedCodec):
        return codec.encode(tensor, references)
    chunks = codec.chunks(tensor, references)
    writer, flags = chunks.encode(chunks.ranges, most_bytes)
    return chunks.finish(writer, flags) if len(flags) == len(chunks.ranges) else None


def _plan_of(storage: Storage, plan: Plan) -> TensorPlan:
    exact = TensorPlan("other", path_text(storage.paths[0]), ())
    return next((plan[path] for path in storage.paths if path in plan), exact)


def _coded(index: int, codec: Codec, encoded: EncodedTensor) -> _Coded:
    pieces = [(piece, payload_crc32([piece])) for piece in encoded.payloads]
    return _Coded(index, codec, encoded.params, encoded.bound, pieces)


def _encode_section(storage: _LargeStorage, start: int) -> _Section:
    writer, flags = storage.chunks.encode(storage.chunks.ranges[start : start + _CHUNKS])
    blocks, sizes = writer.blocks()
    return _Section(storage, blocks, payload_crc32([blocks]), sizes, flags)
