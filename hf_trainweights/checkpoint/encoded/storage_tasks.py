"""How each tensor of a tree is to be stored, and the storages of the tree -> bytes, as tasks that threads share.

Of the codecs in its plan, which a policy makes, a storage has the one that gives the fewest bytes. Tasks come in the
order in which a file holds their results. One is a storage, or a second moment with the first moment that refers to it,
or a part of a large storage: so what threads hold at once does not follow the largest tensor where its codec works in
chunks.
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
from hf_trainweights.checkpoint.encoded.decoder import Anchor, BaseWeights
from hf_trainweights.checkpoint.encoded.structure import TensorReport, payload_crc32
from hf_trainweights.checkpoint.encoded.tree import KeyPath, Storage, path_text
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.errors import QuantizationError, UnsupportedError

# With fewer elements than the first number a coder's headers outweigh its gain, with more than the second never.
_RAW_ELEMENTS = (64, 4096)
# Larger storages are encoded in parts of so many chunks, if their codec has chunks.
_LARGE_BYTES = 16 << 20
_CHUNKS = 4
# The largest error of an element of a weight, in the root mean square of that weight. Errors are uniform within it, so
# at this bound they have a twelfth of the weight's power. A larger bound comes from a wrong estimate of how far the
# weight moves, or from a rule for smaller weights; the weight is exact then.
_LARGEST_BOUND = 0.5
# A smaller mean change counts as none: its step would be too small for delta-uniform.
_SMALLEST_RMS = 2.0**-100


@dataclass(frozen=True)
class TensorPlan:
    """How to encode one tensor.

    Args:
        role: What it is, for the report.
        name: Its parameter's name, for the report.
        candidates: Codecs to try: the smallest result wins, the earlier one in a tie. A codec drops out if a
            reference named below is missing, if it refuses the tensor, or if it is lossy and the tensor is not
            contiguous or shares its memory. If none is left the tensor is stored exactly.
        anchor: Name of its reference in the anchor.
        exp_avg_sq: Path of its second moment in the same tree.
        steps_per_rms: Into how many steps a lossy mode divides the root mean square of a weight's first difference;
            0 for one that no mode rounds. The steps are filled in by `with_steps`.
        or_exact: Whether the candidates are tried beside these steps. Most bits of a half-precision weight do not
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
        """Whether every element comes back as it is."""
        return not self.steps_per_rms and all(codec.lossless for codec in self.candidates)

    def with_steps(self, rms: float) -> TensorPlan:
        """Return the plan with steps for how far a weight drifts, as measured at the first difference to an anchor.

        The steps stay fixed from then on. A weight that did not move is exact.
        """
        if not self.steps_per_rms or rms < _SMALLEST_RMS:
            return self
        rounded = DeltaUniform(step=rms / self.steps_per_rms)
        return replace(self, candidates=(*(self.candidates if self.or_exact else ()), rounded))


Plan = Mapping[KeyPath, TensorPlan]


def with_steps(plan: Plan, drift_rms: Mapping[str, float]) -> Plan:
    """Return the plan of a file with steps for how far each weight drifts, by name; one without an entry is exact."""
    return {path: each.with_steps(drift_rms.get(each.name, 0.0)) for path, each in plan.items()}


@dataclass(frozen=True)
class _Coded:
    """A storage that a codec has encoded, its pieces with their checksums; of a large one the last pieces."""

    index: int
    codec: Codec
    params: dict[str, Json]
    bound: float | None
    pieces: list[tuple[Tensor, int]]


@dataclass
class _LargeStorage:
    """A storage whose parts are encoded one after the other, and what is known of those that are done."""

    index: int
    codec: ChunkedCodec
    chunks: Chunks
    sizes: list[int] = field(default_factory=list)
    flags: list[bool] = field(default_factory=list)

    def finish(self) -> _Coded:
        """Return what is left when all parts are done: the rest of the piece that they are, and all other pieces."""
        return _coded(self.index, self.codec, self.chunks.finish(BlockWriter(), self.flags, self.sizes))


@dataclass(frozen=True)
class _Part:
    """Some chunks of a large storage, encoded."""

    storage: _LargeStorage
    blocks: Tensor
    crc32: int
    sizes: list[int]
    flags: list[bool]


def _kept_bytes(result: list[_Coded] | _Part) -> int:
    """Return how many bytes the result of a task takes up."""
    if isinstance(result, _Part):
        return result.blocks.numel()
    return sum(piece.numel() for coded in result for piece, _ in coded.pieces)


class StorageEncoder:
    """Encodes the storages of one file; `second_moments` are those of `encode_file`.

    Once all `pieces` were taken, `entries` are what the file says of each storage, `report` is what became of it, and
    `numbers` are the places of storages in both by their index.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        plan: Plan,
        anchor: Anchor | BaseWeights | None,
        second_moments: Mapping[str, Tensor],
    ):
        self._storages = storages
        self._plans = [_plan_of(storage, plan) for storage in storages]
        owners = {path: index for index, storage in enumerate(storages) for path in storage.paths}
        self._moments = {i: owners[each.exp_avg_sq] for i, each in enumerate(self._plans) if each.exp_avg_sq in owners}
        self._anchor = anchor
        self._second_moments = second_moments
        self.numbers: dict[int, int] = {}
        self.entries: list[dict[str, Json]] = []
        self.report: list[TensorReport] = []
        self._size_bytes = self._crc32 = 0  # of the parts of a large storage

    def pieces(self) -> Generator[tuple[Tensor, int, bool]]:
        """Yield what the payload consists of: pieces, their checksums, and whether each is more of the one before."""
        workers = worker_count(sum(storage.size_bytes for storage in self._storages))
        with contextlib.closing(in_order(self._tasks(), workers, _kept_bytes)) as results:
            for result in results:
                if isinstance(result, _Part):
                    yield from self._add_part(result)
                else:
                    for coded in result:
                        yield from self._add(coded)

    def _add_part(self, part: _Part) -> Iterator[tuple[Tensor, int, bool]]:
        yield self._counted(part.blocks, part.crc32)
        part.storage.sizes += part.sizes
        part.storage.flags += part.flags
        if len(part.storage.flags) == len(part.storage.chunks.ranges):
            yield from self._add(part.storage.finish())

    def _counted(self, piece: Tensor, crc32: int) -> tuple[Tensor, int, bool]:
        """Count a piece, or more of it, towards its storage."""
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
        # A codec that takes a planned reference is out if that is missing.
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

    def _tasks(self) -> Iterator[tuple[int, Callable[[], list[_Coded] | _Part]]]:
        """Yield what each task takes up in bytes, and what it does."""
        for unit in self._units():
            size_bytes = sum(self._storages[index].size_bytes for index in unit)
            large = self._large_storage(unit[0], size_bytes) if len(unit) == 1 else None
            if large is None:
                yield size_bytes, partial(self._encode, unit)
                continue
            parts = large.chunks.ranges
            for start in range(0, len(parts), _CHUNKS):
                yield size_bytes * _CHUNKS // len(parts), partial(_encode_part, large, start)

    def _units(self) -> Iterator[list[int]]:
        """Yield every index once, from a second moment to its first user together."""
        indices = range(len(self._storages))
        order = [*dict.fromkeys(each for index in indices for each in (self._moments.get(index, index), index))]
        places = {index: place for place, index in enumerate(order)}
        last: dict[int, int] = {}  # the place of its first user by that of a second moment
        for index in filter(self._moments.__contains__, order):
            last.setdefault(places[self._moments[index]], places[index])
        start = stop = 0
        for place in range(len(order)):
            stop = max(stop, last.get(place, place))
            if place == stop:
                yield order[start : stop + 1]
                start = stop = place + 1

    def _large_storage(self, index: int, size_bytes: int) -> _LargeStorage | None:
        """Cut a storage into chunks; None if it is not large, there is a choice of codecs, or its one has no chunks."""
        plan = self._plans[index]
        # A task that decodes an anchor as well does it in its own thread; the parts of a large storage wait for it.
        is_large = size_bytes > (1 if plan.anchor is None else 4) * _LARGE_BYTES
        if not is_large or len(plan.candidates) > 1 or not all(isinstance(c, ChunkedCodec) for c in plan.candidates):
            return None
        tensor, references = self._read(index)
        usable, exact, references = _candidates(tensor, self._storages[index], plan, references)
        codec, *others = usable or exact
        if others or not isinstance(codec, ChunkedCodec) or tensor.dtype not in codec.dtypes:
            return None
        return _LargeStorage(index, codec, codec.chunks(tensor, references))

    def _read(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a storage's elements and what it may be stored against in other files."""
        plan, tensor = self._plans[index], self._storages[index].read()
        references: dict[str, Tensor] = {}
        if self._anchor is not None and plan.anchor is not None and plan.anchor in self._anchor:
            reference = self._anchor.tensor(plan.anchor)
            # What a float out of range becomes as an integer depends on the machine.
            if reference.dtype == tensor.dtype or (reference.is_floating_point() and tensor.is_floating_point()):
                references["anchor"] = reference.to(tensor.dtype)
        if plan.role == "weight" and plan.name in self._second_moments:
            references["exp_avg_sq"] = self._second_moments[plan.name].detach().cpu()
        return tensor, references

    def _encode(self, unit: list[int]) -> list[_Coded]:
        """Encode some storages, of which later ones may refer to what decoding an earlier one gives."""
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
        """Encode a second and a first moment tile by tile, so that there is no decoded copy of the second.

        Nothing is returned, and nothing done, unless the unit is such a pair with a codec each that can do so.
        """
        storages = [self._storages[index] for index in unit]
        are_alike = len({each.shape for each in storages}) == 1 and all(each.exclusive for each in storages)
        match [self._plans[index].candidates for index in unit]:
            case [[LogRank1() as of_second], [UpdateSpace() as of_first]] if self._moments.get(unit[1]) == unit[0]:
                if not are_alike or not {each.source.dtype for each in storages} <= LOSSY_DTYPES:
                    return []
                exp_avg_sq, exp_avg = (each.read() for each in storages)
                encoder = TileEncoder(exp_avg, of_first.step)
                encoded = of_second.encode_tiles(exp_avg_sq, encoder.add)
                return [_coded(unit[0], of_second, encoded), _coded(unit[1], of_first, encoder.finish())]
        return []


def _encode_storage(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[Codec, EncodedTensor]:
    """Encode a storage by the codec of its plan with the smallest result; if none can be used, by an exact one.

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
    """Return the codecs of the plan that can be used, exact ones if none of them can, and the references that fit."""
    references = {name: each for name, each in references.items() if each.shape == tensor.shape}
    missing = {name for name in ("anchor", "exp_avg_sq") if getattr(plan, name) is not None} - references.keys()
    usable = [
        codec
        for codec in plan.candidates
        if not missing.intersection(codec.references) and (storage.exclusive or codec.lossless)
    ]
    exact: list[Codec] = [Raw()] if tensor.numel() < _RAW_ELEMENTS[1] else []
    if tensor.numel() >= _RAW_ELEMENTS[0]:
        exact.append(Planes())
    return usable, exact, references


def _smallest(tensor: Tensor, codecs: Sequence[Codec], references: References) -> tuple[Codec, EncodedTensor] | None:
    best: tuple[int, EncodedTensor] | None = None
    # Codecs with chunks come last: they give up once they have written more than another one needs.
    for place, codec in sorted(enumerate(codecs), key=lambda each: isinstance(each[1], ChunkedCodec)):
        most_bytes = math.inf if best is None else best[1].payload_bytes - (place > best[0])
        try:
            encoded = _encode_within(codec, tensor, references, most_bytes)
        except (QuantizationError, UnsupportedError):
            continue
        if encoded is not None and encoded.payload_bytes <= most_bytes and not _is_destroyed(tensor, codec, encoded):
            best = place, encoded
    return best and (codecs[best[0]], best[1])


def _is_destroyed(tensor: Tensor, codec: Codec, encoded: EncodedTensor) -> bool:
    """Return whether one step for a whole weight is so coarse that little of the weight is left."""
    if not isinstance(codec, DeltaUniform) or encoded.bound is None:
        return False
    # The first elements of nearly every weight prove it, so the others are seldom read.
    needed, flat = (encoded.bound / _LARGEST_BOUND) ** 2 * tensor.numel(), tensor.reshape(-1)
    total = 0.0
    for chunk in chunk_ranges(len(flat)):
        total += flat[chunk].double().nan_to_num_(0.0, 0.0, 0.0).square_().sum().item()
        if total >= needed:
            return False
    return True


def _encode_within(codec: Codec, tensor: Tensor, references: References, most_bytes: float) -> EncodedTensor | None:
    """Encode a tensor; None if chunks show early that it takes more bytes."""
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


def _encode_part(storage: _LargeStorage, start: int) -> _Part:
    writer, flags = storage.chunks.encode(storage.chunks.ranges[start : start + _CHUNKS])
    blocks, sizes = writer.blocks()
    return _Part(storage, blocks, payload_crc32([blocks]), sizes, flags)
