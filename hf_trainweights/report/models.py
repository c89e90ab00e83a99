"""Makes the sections of a report on a model: sizes, bits and errors layer by layer, and the worst weights."""

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

# The most weights that a report draws or names.
_WORST = 10
# The inputs of a weight that the texts did not reach: rows without columns fit no weight, so there is no output error.
_NO_ROWS = torch.empty(0, 0)
# More rows are hard to read, and a browser takes long to draw them.
_MOST_ROWS = 120
# Groups weights by layer: `model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`.
_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Measured:
    """The result of measuring a weight: its error against its counterpart, None if it has no counterpart."""

    weight: StoredTensor
    error: Error | None

    @property
    def differs(self) -> bool:
        """Whether it has a counterpart and is not equal to it."""
        return self.error is not None and self.error.snr_db < math.inf


def measure_weights(
    weights: Mapping[str, StoredTensor], against: Mapping[str, StoredTensor], inputs: Mapping[str, Tensor] | None
) -> list[Measured]:
    """Measure each weight against the weight of the same name in `against`.

    `inputs` are the rows that each weight's layer multiplies, by the name of the weight; None stands for noise.
    """
    measured = []
    for name, weight in weights.items():
        other = against.get(name)
        rows = None if inputs is None else inputs.get(name, _NO_ROWS)
        measured.append(Measured(weight, measure_error(weight.values(), other.values(), rows) if other else None))
    return measured


def model_sections(
    measured: Sequence[Measured], against: Mapping[str, StoredTensor], texts: TextMeasures | None = None
) -> list[Section]:
    """Return the sections of a report on a model, measured against the weights of another one, perhaps with texts."""
    formats = _formats_of(measured)
    sections = [Section("With texts", [], f"{'; '.join(texts.lines())}. {_WITH_TEXTS}")] if texts else []
    sections += [
        Section("Sizes", [_total_chart(measured, against, formats), _format_table(measured, formats)]),
        Section("Layer by layer", [_layer_chart(measured, formats)]),
    ]
    if drawn := [result for result in measured if result.error and math.isfinite(result.error.snr_db)]:
        sections.append(Section("Error", [_error_chart(drawn)], _ERROR))
    sections.append(_worst_section(measured, _OF_TEXTS if texts else _OF_NOISE))
    head = ("weight", "format", "shape", "bits", "size", "SNR, dB", "output error")
    rows = [_row(result) for result in measured]
    sections.append(Section("All weights", [Table(head, rows, f"{len(rows)} weights")]))
    return sections


def describe_model(measured: Sequence[Measured], others: Mapping[str, StoredTensor]) -> list[str]:
    """Summarize in a few lines the sizes of a model's weights, and their errors against another model."""
    weights = [result.weight for result in measured]
    before = f"{_show_size(_stored_bytes(list(others.values())))} -> " if others else ""
    lines = [
        f"{len(weights)} weights, {before}{_show_size(_stored_bytes(weights))}, {_show_bits(weights)} bits per weight"
    ]
    for name in _formats_of(measured):
        members = [weight for weight in weights if weight.format == name]
        lines.append(f"  {name}: {len(members)}, {_show_size(_stored_bytes(members))}")
    errors = sorted((result.error.snr_db, result.weight.name) for result in measured if result.error and result.differs)
    if errors:
        lines += ["largest errors:", *(f"  {snr:.1f} dB  {name}" for snr, name in errors[: _WORST // 2])]
    if others:
        equal = sum(result.error is not None and result.error.snr_db == math.inf for result in measured)
        alone = sum(result.error is None for result in measured)
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
    """Return each format once, in the order of its first weight."""
    return list(dict.fromkeys(result.weight.format for result in measured))


def _stored_bytes(weights: Sequence[StoredTensor]) -> int | None:
    """Return the total bytes of weights, None if the bytes of one are unknown."""
    return total_bytes(weight.stored_bytes for weight in weights)


def _show_size(count: int | None) -> str:
    """Return a size as text, `?` for None."""
    return "?" if count is None else size(count)


def _show_bits(weights: Sequence[StoredTensor]) -> str:
    """Return the mean bits per element of weights as text, `?` if their bytes are unknown."""
    count, numel = _stored_bytes(weights), sum(weight.tensor.numel() for weight in weights)
    return "?" if count is None or not numel else f"{8 * count / numel:.2f}"


def _total_chart(measured: Sequence[Measured], against: Mapping[str, StoredTensor], formats: Sequence[str]) -> Drawing:
    groups = {"this model": [result.weight for result in measured]}
    if against:
        groups = {"compared with": list(against.values()), **groups}
        formats = list(dict.fromkeys([*formats, *(weight.format for weight in against.values())]))
    return _size_chart("Bytes of the weights, by format", groups, formats, {})


def _layer_chart(measured: Sequence[Measured], formats: Sequence[str]) -> Drawing:
    groups = {name: [result.weight for result in members] for name, members in _layers(measured).items()}
    bits = {name: f", {_show_bits(members)} bits" for name, members in groups.items()}
    return _size_chart("Bytes of each layer, by format, and bits per weight", groups, formats, bits)


def _size_chart(
    title: str, groups: Mapping[str, Sequence[StoredTensor]], formats: Sequence[str], notes: Mapping[str, str]
) -> Drawing:
    """Draw a row for each of the largest groups of weights, in the order of `groups`; a note follows its size."""
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
    """Return a name for each color; formats beyond the number of colors share the last color."""
    return tuple(formats) if len(formats) <= COLORS else (*formats[: COLORS - 1], "others")


def _format_table(measured: Sequence[Measured], formats: Sequence[str]) -> Table:
    all_weights = [result.weight for result in measured]
    groups = {name: [weight for weight in all_weights if weight.format == name] for name in formats}
    rows = []
    for name, members in [*groups.items(), ("total", all_weights)]:
        elements = sum(weight.tensor.numel() for weight in members)
        rows.append((name, len(members), f"{elements:,}", _show_size(_stored_bytes(members)), _show_bits(members)))
    return Table(("format", "tensors", "weights", "size", "bits per weight"), rows)


def _error_chart(measured: Sequence[Measured]) -> Drawing:
    rows = []
    for name, members in _layers(measured).items():
        errors = [(result.error.snr_db, result.weight.name) for result in members if result.error]
        points = tuple((snr, f"{weight_name}: {snr:.1f} dB") for snr, weight_name in errors)
        rows.append(Dots(name, points, f"{min(snr for snr, _ in errors):.1f} dB"))
    worst = sorted(rows, key=lambda row: min(value for value, _ in row.points))[:_MOST_ROWS]
    in_layer_order = [row for row in rows if row in worst]
    return dot_chart("Error of each layer's weights", in_layer_order, "signal to noise in dB; higher is better")


def _layers(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    layers: dict[str, list[Measured]] = defaultdict(list)
    for result in measured:
        match = _BLOCK.match(result.weight.name)
        layers[match[1] if match else result.weight.name.rpartition(".")[0] or result.weight.name].append(result)
    return layers


def _worst_section(measured: Sequence[Measured], output_error: str) -> Section:
    differing = sorted((result for result in measured if result.differs), key=lambda result: result.error.snr_db)  # type: ignore
    if differing:
        chosen, title = differing[:_WORST], f"The worst {min(_WORST, len(differing))}"
    else:
        # There are no errors to sort by, so show the largest weights, quantized ones before float ones.
        order = sorted(
            measured,
            key=lambda result: (isinstance(result.weight.tensor, QuantizedTensor), result.weight.tensor.numel()),
            reverse=True,
        )
        chosen, title = order[:_WORST], f"The largest {min(_WORST, len(order))}"
    head = ("weight", "bits", "SNR, dB", "output error", "values", "codes")
    text = (
        "Histograms: of the values, where a bin is as high as the logarithm of its count, and of the codes, which are "
        f"the values in units of their scales. Output error: {output_error}, relative to that product."
    )
    return Section(title, [Table(head, [_drawn_row(result) for result in chosen])], text)


def _drawn_row(result: Measured) -> tuple[object, ...]:
    name, form, shape, bits, count, snr, output = _row(result)
    tensor = result.weight.values()
    values = weight_histogram(tensor) if tensor.is_floating_point() else None
    codes = code_histogram(tensor)
    pictures = (
        values and histogram(f"values of {name}", values.counts, values.low, values.high, "value", log=True),
        codes and histogram(f"codes of {name}", codes.counts, codes.low + 0.5, codes.high - 0.5, "code"),
    )
    return (f"{name}: {form}, {shape}, {count}", bits, snr, output, *(picture or "" for picture in pictures))


def _row(result: Measured) -> tuple[str, ...]:
    weight, error = result.weight, result.error
    snr = "" if error is None else "equal" if error.snr_db == math.inf else f"{error.snr_db:.1f}"
    has_output = error is not None and error.output_error is not None and error.snr_db != math.inf
    output = f"{error.output_error:.2%}" if has_output and error is not None else ""
    shape = " x ".join(map(str, weight.tensor.shape)) or "one element"
    return weight.name, weight.format, shape, _show_bits([weight]), _show_size(weight.stored_bytes), snr, output
