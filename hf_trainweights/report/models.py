"""The sections of a report on a model: sizes, bits and errors layer by layer, and the worst weights."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trainweights.inspection.listing import total_bytes
from hf_trainweights.inspection.stored_tensors import StoredTensor
from hf_trainweights.report.charts import Bar, Dots, bar_chart, dot_chart, histogram, size, size_unit
from hf_trainweights.report.drawing import COLORS, Drawing
from hf_trainweights.report.measurements import Error, code_histogram, measure_error, weight_histogram
from hf_trainweights.report.page import Section, Table
from hf_trainweights.report.texts import TextMeasures
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_WORST = 10
_NO_ROWS = torch.empty(0, 0)
# A chart of more rows says less, and takes a browser long.
_MOST_ROWS = 120
# `model.layers.3.mlp.up_proj.weight` is of `model.layers.3`.
_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Measured:
    """A weight, and how far it is from its counterpart; None without one."""

    weight: StoredTensor
    error: Error | None

    @property
    def differs(self) -> bool:
        """Whether it has a counterpart and is not equal to it."""
        return self.error is not None and self.error.snr_db < math.inf


def measure_weights(
    weights: Mapping[str, StoredTensor], against: Mapping[str, StoredTensor], inputs: Mapping[str, Tensor] | None
) -> list[Measured]:
    """Measure each weight against the one of its name; `inputs` are rows that its layer multiplies, None for noise."""
    found = []
    for name, weight in weights.items():
        other = against.get(name)
        rows = None if inputs is None else inputs.get(name, _NO_ROWS)
        found.append(Measured(weight, measure_error(weight.values(), other.values(), rows) if other else None))
    return found


def model_sections(
    measured: Sequence[Measured], against: Mapping[str, StoredTensor], texts: TextMeasures | None = None
) -> list[Section]:
    """Return the sections on a model."""
    formats = _formats_of(measured)
    sections = [Section("With texts", [], f"{'; '.join(texts.lines())}. {_WITH_TEXTS}")] if texts else []
    sections += [
        Section("Sizes", [_total_chart(measured, against, formats), _format_table(measured, formats)]),
        Section("Layer by layer", [_layer_chart(measured, formats)]),
    ]
    if drawn := [each for each in measured if each.error and math.isfinite(each.error.snr_db)]:
        sections.append(Section("Error", [_error_chart(drawn)], _ERROR))
    sections.append(_worst_section(measured, _OF_TEXTS if texts else _OF_NOISE))
    head = ("weight", "format", "shape", "bits", "size", "SNR, dB", "output error")
    rows = [_row(each) for each in measured]
    sections.append(Section("All weights", [Table(head, rows, f"{len(rows)} weights")]))
    return sections


def describe_model(measured: Sequence[Measured], others: Mapping[str, StoredTensor]) -> list[str]:
    """Return in a few lines what a model takes, and how far it is from another one."""
    weights = [each.weight for each in measured]
    before = f"{_show_size(_stored_bytes(list(others.values())))} -> " if others else ""
    lines = [
        f"{len(weights)} weights, {before}{_show_size(_stored_bytes(weights))}, {_show_bits(weights)} bits per weight"
    ]
    for name in _formats_of(measured):
        members = [weight for weight in weights if weight.format == name]
        lines.append(f"  {name}: {len(members)}, {_show_size(_stored_bytes(members))}")
    differing = sorted((each.error.snr_db, each.weight.name) for each in measured if each.error and each.differs)
    if differing:
        lines += ["largest errors:", *(f"  {snr:.1f} dB  {name}" for snr, name in differing[: _WORST // 2])]
    if others:
        equal = sum(each.error is not None and each.error.snr_db == math.inf for each in measured)
        alone = sum(each.error is None for each in measured)
        lines.append(f"{equal} equal, {alone} without a counterpart")
    return lines


_WITH_TEXTS = (
    "This is what to judge a model by: codes that are chosen with texts make single weights worse and the model "
    "better. Below, output error is what rounding a weight changes in what its layer returns for these texts."
)
_OF_TEXTS = "what rounding this weight changes in its product with what its layer gets from the texts"
_OF_NOISE = "what rounding this weight changes in its product with Gaussian noise"
_ERROR = (
    "Signal to noise of each weight against its counterpart: a dot each, further left is worse, 6 dB are a factor of "
    "two. Rest the pointer on a dot for its name. The number is the worst of the row. Weights that are equal, "
    "and those of no finite ratio, such as with NaN, are not shown."
)


def _formats_of(measured: Sequence[Measured]) -> list[str]:
    """Return the formats that occur, in the order in which they first do."""
    return list(dict.fromkeys(each.weight.format for each in measured))


def _stored_bytes(weights: Sequence[StoredTensor]) -> int | None:
    """Return what weights take, None if that is not known of each."""
    return total_bytes(weight.stored_bytes for weight in weights)


def _show_size(count: int | None) -> str:
    """Return a size as people read it, `?` for None."""
    return "?" if count is None else size(count)


def _show_bits(weights: Sequence[StoredTensor]) -> str:
    """Return the bits that an element of some weights takes on average, `?` if that is not known."""
    count, numel = _stored_bytes(weights), sum(weight.tensor.numel() for weight in weights)
    return "?" if count is None or not numel else f"{8 * count / numel:.2f}"


def _total_chart(measured: Sequence[Measured], against: Mapping[str, StoredTensor], formats: Sequence[str]) -> Drawing:
    groups = {"this model": [each.weight for each in measured]}
    if against:
        groups = {"compared with": list(against.values()), **groups}
        formats = list(dict.fromkeys([*formats, *(weight.format for weight in against.values())]))
    return _size_chart("Bytes of the weights, by format", groups, formats, {})


def _layer_chart(measured: Sequence[Measured], formats: Sequence[str]) -> Drawing:
    groups = {name: [each.weight for each in members] for name, members in _layers(measured).items()}
    bits = {name: f", {_show_bits(members)} bits" for name, members in groups.items()}
    return _size_chart("Bytes of each layer, by format, and bits per weight", groups, formats, bits)


def _size_chart(
    title: str, groups: Mapping[str, Sequence[StoredTensor]], formats: Sequence[str], notes: Mapping[str, str]
) -> Drawing:
    """Return a chart of the largest groups of weights, a row each, in their order."""
    totals = {name: _stored_bytes(members) for name, members in groups.items()}
    largest = sorted(groups, key=lambda name: totals[name] or 0, reverse=True)[:_MOST_ROWS]
    unit, unit_name = size_unit(max((totals[name] or 0 for name in largest), default=1))
    legend = _legend(formats)
    bars = []
    for name in (name for name in groups if name in set(largest)):
        parts = [0.0] * len(legend)
        for weight in groups[name]:
            parts[min(formats.index(weight.format), len(legend) - 1)] += (weight.stored_bytes or 0) / unit
        bars.append(Bar(name, tuple(parts), _show_size(totals[name]) + notes.get(name, "")))
    left_out = len(groups) - len(bars)
    return bar_chart(title + (f" (the {left_out} smallest are left out)" if left_out else ""), bars, unit_name, legend)


def _legend(formats: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each color; the formats that are left have the last one."""
    return tuple(formats) if len(formats) <= COLORS else (*formats[: COLORS - 1], "others")


def _format_table(measured: Sequence[Measured], formats: Sequence[str]) -> Table:
    everything = [each.weight for each in measured]
    groups = {name: [weight for weight in everything if weight.format == name] for name in formats}
    rows = []
    for name, members in [*groups.items(), ("total", everything)]:
        elements = sum(weight.tensor.numel() for weight in members)
        rows.append((name, len(members), f"{elements:,}", _show_size(_stored_bytes(members)), _show_bits(members)))
    return Table(("format", "tensors", "weights", "size", "bits per weight"), rows)


def _error_chart(measured: Sequence[Measured]) -> Drawing:
    rows = []
    for name, members in _layers(measured).items():
        points = [
            (each.error.snr_db, f"{each.weight.name}: {each.error.snr_db:.1f} dB") for each in members if each.error
        ]
        rows.append(Dots(name, tuple(points), f"{min(value for value, _ in points):.1f} dB"))
    worst = sorted(rows, key=lambda row: min(value for value, _ in row.points))[:_MOST_ROWS]
    kept = [row for row in rows if row in worst]
    return dot_chart("Error of each layer's weights", kept, "signal to noise in dB; higher is better")


def _layers(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    layers: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        match = _BLOCK.match(each.weight.name)
        layers[match[1] if match else each.weight.name.rpartition(".")[0] or each.weight.name].append(each)
    return layers


def _worst_section(measured: Sequence[Measured], output_error: str) -> Section:
    differing = sorted((each for each in measured if each.differs), key=lambda each: each.error.snr_db)  # type: ignore
    if differing:
        chosen, title = differing[:_WORST], f"The worst {min(_WORST, len(differing))}"
    else:
        # Without a counterpart nothing is known to be worse; the largest quantized weights come before float ones.
        order = sorted(
            measured,
            key=lambda each: (isinstance(each.weight.tensor, QuantizedTensor), each.weight.tensor.numel()),
            reverse=True,
        )
        chosen, title = order[:_WORST], f"The largest {min(_WORST, len(order))}"
    head = ("weight", "bits", "SNR, dB", "output error", "values", "codes")
    text = (
        "Histograms: of the values, where a bin is as high as the logarithm of its count, and of the codes, which are "
        f"the values in units of their scales. Output error: {output_error}, relative to that product."
    )
    return Section(title, [Table(head, [_drawn_row(each) for each in chosen])], text)


def _drawn_row(each: Measured) -> tuple[object, ...]:
    name, form, shape, bits, count, snr, output = _row(each)
    tensor = each.weight.values()
    values = weight_histogram(tensor) if tensor.is_floating_point() else None
    codes = code_histogram(tensor)
    pictures = (
        values and histogram(f"values of {name}", values.counts, values.low, values.high, "value", log=True),
        codes and histogram(f"codes of {name}", codes.counts, codes.low + 0.5, codes.high - 0.5, "code"),
    )
    return (f"{name}: {form}, {shape}, {count}", bits, snr, output, *(picture or "" for picture in pictures))


def _row(each: Measured) -> tuple[str, ...]:
    weight, error = each.weight, each.error
    snr = "" if error is None else "equal" if error.snr_db == math.inf else f"{error.snr_db:.1f}"
    known = error is not None and error.output_error is not None and error.snr_db != math.inf
    output = f"{error.output_error:.2%}" if known and error is not None else ""
    shape = " x ".join(map(str, weight.tensor.shape)) or "one element"
    return weight.name, weight.format, shape, _show_bits([weight]), _show_size(weight.stored_bytes), snr, output
