"""The walk over a model's blocks that chooses the codes of each weight with the inputs of its layer.

Three models run each block before the next one: the float model (`reference`), the model whose codes are being chosen
(`own`), and a model quantized without calibration (`plain`), which shows the gain of calibration. A `Stream` holds the
inputs of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.spill import Spill
from hf_trainweights.models.calibration.blocks import (
    ExpertInputs,
    Stopped,
    Stream,
    capture,
    fast_products,
    find_chains,
    inputs_of,
    one_by_one,
    without_caches,
    without_padding,
)
from hf_trainweights.models.calibration.feedback import Moments, quantize_experts_with_feedback, quantize_with_feedback
from hf_trainweights.models.calibration.finished import FinishedBlocks
from hf_trainweights.models.choosing.summary import Calibrated, Choice
from hf_trainweights.models.host.inputs import Batch
from hf_trainweights.models.host.models import holding
from hf_trainweights.models.loading.conversion import keep_in
from hf_trainweights.tensor.modules import parameter_places, substituted
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Much of the gain is lost with fewer tokens than this many times the inputs of a layer.
_ENOUGH_TOKENS = 4
# The gain is measured with the first batches alone: a third stream of all batches would take a fifth more time.
_JUDGED_BATCHES = 4

_logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Calibration:
    """The result of a walk: quantized weights, the reasons why other weights are not calibrated, and the gain."""

    weights: Mapping[str, QuantizedTensor]
    reasons: Mapping[str, str]
    gain: Calibrated


def calibrate(
    module: nn.Module, choices: Sequence[Choice], batches: Sequence[Batch], spill: Spill, finished: FinishedBlocks
) -> Calibration:
    """Choose the codes of finite float weights with inputs of their module, which stays as it was, also on an error.

    Blocks that `finished` has from an earlier call are taken from there. Blocks that this call finishes are added.
    """
    walk = _Walk(module, choices, batches, spill, finished)
    with (
        torch.no_grad(),
        holding(module.modules(), "training", False),
        one_by_one(module),
        without_caches(module),
        fast_products(module),
    ):
        chains = walk.chains()
        with logging.tqdm(total=sum(map(len, chains)), desc="Calibrating", unit="block") as bar:
            for chain in chains:
                walk.pass_chain(chain, bar)
    return walk.result()


def require_gain(choices: Sequence[Choice]) -> None:
    """Check that some weights are to have a format whose codes calibration can choose."""
    if not any(map(_gains, choices)):
        formats = ", ".join({str(choice.format) for choice in choices}) or "none"
        next_step = "Leave it out: formats of 8 bits gain nothing by it."
        raise ConfigError("calibration", "a format of 2 to 6 bits or coded", formats, next_step)


def _gains(choice: Choice) -> bool:
    """Return whether the codes of a weight's format can be chosen column by column."""
    sample = torch.ones(2, choice.stored_shape[-1], dtype=torch.float32)
    return choice.format is not None and choice.format.columns(sample, sample[0]) is not None


@dataclass(frozen=True)
class _Stage:
    """Weights whose layers get the same tensor, and this tensor in the float model by the number of each batch."""

    choices: list[Choice]
    inputs: dict[int, Tensor]


class _Walk:
    def __init__(
        self,
        module: nn.Module,
        choices: Sequence[Choice],
        batches: Sequence[Batch],
        spill: Spill,
        finished: FinishedBlocks,
    ):
        self._module, self._batches = module, dict(enumerate(batches))
        self._spill, self._finished = spill, finished
        self._places = parameter_places(module)
        self._reasons = {choice.name: "its module is in no block that the batches run once" for choice in choices}
        self._choices: dict[str, Choice] = {}
        for choice in choices:
            self._consider(choice)
        self._calibrated: dict[str, QuantizedTensor] = {}
        self._tokens = self._missing = 0
        self._names = {inner: name or type(inner).__name__ for name, inner in module.named_modules()}
        # The errors in the outputs of each block that was passed: quantized without calibration, and with it.
        self._errors: dict[nn.Module, tuple[float, float]] = {}

    def _consider(self, choice: Choice) -> None:
        """Take a weight for calibration, or note why not."""
        weight = choice.weight
        if not isinstance(choice.module, nn.Linear | Conv1D) and weight.dim() == 2:
            self._reasons[choice.name] = "its layer is no linear one"
        elif len(self._places[id(weight)]) > 1:
            self._reasons[choice.name] = "several layers share it"
        elif not _gains(choice):
            self._reasons[choice.name] = f"{choice.format} gains nothing by it"
        else:
            self._choices[choice.name] = choice

    def chains(self) -> list[list[nn.Module]]:
        """Return the chains of blocks that the batch with the most arguments runs, such as a batch with an image."""
        fullest = max(self._batches.values(), key=lambda batch: len(batch) if isinstance(batch, Mapping) else 1)
        return find_chains(self._module, {choice.module for choice in self._choices.values()}, fullest)

    def pass_chain(self, chain: Sequence[nn.Module], bar: Any) -> None:
        """Choose the codes of a chain of blocks."""
        if not any(self._inside(block) for block in chain):
            bar.update(len(chain))
            return
        reference = capture(self._module, chain, self._batches, self._spill)
        with self._substituted_in_turn(self._calibrated):
            own = capture(self._module, chain, self._batches, self._spill)
        judged = {batch: self._batches[batch] for batch in list(reference.hidden)[:_JUDGED_BATCHES]}
        with self._substituted_in_turn(self._plain(self._calibrated)):
            plain = capture(self._module, chain, judged, self._spill)
        for number, block in enumerate(chain):
            self._choose(block, number, reference, own)
            with self._substituted(self._calibrated_in(block)):
                own.advance(block, number)
            with self._substituted(self._plain(self._calibrated_in(block))):
                plain.advance(block, number)
            self._errors[block] = _relative(plain, reference, judged), _relative(own, reference, judged)
            bar.set_postfix(tokens=f"{self._tokens:,}")
            bar.update()

    def _choose(self, block: nn.Module, number: int, reference: Stream, own: Stream) -> None:
        """Choose the codes of a block, and let the float model's inputs pass it."""
        stages = self._pass(block, number, reference)
        inside = self._inside(block)
        finished = self._finished.read([(choice.name, choice.format, choice.weight) for choice in inside])
        if finished is None:
            for stage in stages:
                self._choose_stage(stage, block, number, own)
            for choice in inside:
                if choice.weight.dim() == 3:
                    self._choose_experts(choice, block, number, own)
            finished = self._finished.write({name: w.tensors for name, w in self._calibrated_in(block).items()})
        for choice in inside:
            if choice.name in finished:
                self._take(choice, finished[choice.name])

    def _inside(self, block: nn.Module) -> list[Choice]:
        modules = set(block.modules())
        return [choice for choice in self._choices.values() if choice.module in modules]

    def _pass(self, block: nn.Module, number: int, stream: Stream) -> list[_Stage]:
        """Let all batches of the float model pass a block; return its weights in the order of their calls."""
        linear = {choice.module: choice for choice in self._inside(block) if choice.weight.dim() == 2}
        stages: list[_Stage] = []
        for batch in stream.hidden:
            layers = [stage.choices[0].module for stage in stages] or linear
            # All calls are held until the block is done, so that no other tensor gets the id of an input.
            calls: list[tuple[nn.Module, Tensor, Tensor]] = []
            with inputs_of(layers, lambda layer, x, calls=calls: calls.append((layer, x, _copy_once(calls, x)))):
                output = stream.run(block, number, batch)
            if not stages:
                stages = self._stages(linear, [(layer, copy) for layer, _, copy in calls])
            seen = {layer: copy for layer, _, copy in calls}
            for stage in stages:
                x = seen.get(stage.choices[0].module)
                if x is not None:
                    stage.inputs[batch] = self._spill.keep(without_padding(x, self._batches[batch]))
            stream.hidden[batch] = self._spill.keep(output)
        for stage in stages:
            tokens = sum(map(len, stage.inputs.values()))
            self._tokens = max(self._tokens, tokens)
            self._missing = max(self._missing, _ENOUGH_TOKENS * _stored(stage.choices[0]).shape[1] - tokens)
        return stages

    def _stages(self, linear: Mapping[nn.Module, Choice], calls: Sequence[tuple[nn.Module, Tensor]]) -> list[_Stage]:
        """Group the weights whose layers get the same tensor, leaving out layers that do not run exactly once."""
        layers = [layer for layer, _ in calls]
        for layer, choice in linear.items():
            if layers.count(layer) != 1:
                self._reasons[choice.name] = (
                    "its layer runs several times" if layer in layers else "its layer is not called"
                )
        stages: dict[int, _Stage] = {}
        for layer, x in calls:
            if layers.count(layer) == 1:
                stages.setdefault(id(x), _Stage([], {})).choices.append(linear[layer])
        return list(stages.values())

    def _choose_stage(self, stage: _Stage, block: nn.Module, number: int, own: Stream) -> None:
        """Choose the codes of weights that get the same input."""
        weight = _stored(stage.choices[0])
        moments = Moments(weight.shape[1], weight.device, stage.choices[0].name)
        with self._substituted(self._calibrated_in(block)):
            for batch in own.hidden:
                x, reference = self._input(stage.choices[0], block, number, own, batch), stage.inputs.get(batch)
                if x is not None:
                    # A router may have sent other tokens here than in the float model: nothing is corrected then.
                    moments.add(x, x if reference is None or reference.shape != x.shape else reference)
        factor = moments.factor()
        for choice in stage.choices:
            assert choice.format is not None
            tensors = quantize_with_feedback(_stored(choice), choice.format, moments, factor)
            assert tensors is not None
            self._take(choice, tensors)

    def _choose_experts(self, choice: Choice, block: nn.Module, number: int, own: Stream) -> None:
        """Choose the codes of experts; the float model may send them other tokens, so nothing is corrected."""
        weight = choice.weight.detach()
        with self._substituted(self._calibrated_in(block)), ExpertInputs(weight, self._spill) as inputs:
            for batch in own.hidden:
                own.run(block, number, batch)
        if any(inputs.rows):
            assert choice.format is not None
            self._take(choice, quantize_experts_with_feedback(_stored(choice), choice.format, inputs.rows, choice.name))
        else:
            self._reasons[choice.name] = "its layer does not multiply by one expert after another"

    def _take(self, choice: Choice, tensors: dict[str, Tensor]) -> None:
        """Keep the stored tensors of a weight."""
        weight, form = _stored(choice), choice.format
        assert form is not None
        self._calibrated[choice.name] = QuantizedTensor(tensors, form, weight.shape, weight.dtype, choice.transposed)
        self._reasons.pop(choice.name, None)

    def _input(self, choice: Choice, block: nn.Module, number: int, stream: Stream, batch: int) -> Tensor | None:
        """Return the input of a weight's layer, without padding; None if the layer is not called."""
        inputs: list[Tensor] = []

        def see(layer: nn.Module, x: Tensor) -> None:
            inputs.append(x)
            raise Stopped

        with inputs_of([choice.module], see), contextlib.suppress(Stopped):
            stream.run(block, number, batch)
        return without_padding(inputs[0], self._batches[batch]) if inputs else None

    def _calibrated_in(self, block: nn.Module) -> dict[str, QuantizedTensor]:
        names = [choice.name for choice in self._inside(block)]
        return {name: self._calibrated[name] for name in names if name in self._calibrated}

    def _plain(self, names: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
        """Return the weights of these names, quantized without calibration."""
        chosen = (choice for choice in self._choices.values() if choice.name in names)
        return {choice.name: keep_in(self._spill, choice.quantize(choice.weight)) for choice in chosen}

    @contextlib.contextmanager
    def _substituted_in_turn(self, weights: Mapping[str, QuantizedTensor]) -> Iterator[None]:
        """Put the values of quantized weights into each block that was passed, but only while that block runs."""
        with contextlib.ExitStack() as hooks, contextlib.ExitStack() as running:

            def entered(block: nn.Module, args: Any) -> None:
                inside = {name: weights[name] for name in self._calibrated_in(block)}
                running.enter_context(self._substituted(inside))

            for block in self._errors:
                hooks.callback(block.register_forward_pre_hook(entered).remove)
                hooks.callback(block.register_forward_hook(lambda *_: running.close()).remove)
            yield

    def _substituted(self, weights: Mapping[str, QuantizedTensor]) -> contextlib.AbstractContextManager[None]:
        """Put the values of quantized weights into the module within the context."""
        pairs = [(choice.weight, weights[choice.name]) for choice in self._choices.values() if choice.name in weights]
        values = ((weight, nn.Parameter(other.dequantize(), requires_grad=False)) for weight, other in pairs)
        return substituted(self._places, values)

    def result(self) -> Calibration:
        """Return the result of the walk, and warn if there were few tokens."""
        if self._missing:
            wanted = f"{self._tokens + self._missing:,} would be {_ENOUGH_TOKENS} for each input of the largest layer"
            _logger.warning("Calibrated with %s tokens. More are worth more: %s.", f"{self._tokens:,}", wanted)
        errors = {self._names[block]: both for block, both in self._errors.items()}
        before, after = next(reversed(errors.values()), (0.0, 0.0))
        return Calibration(self._calibrated, self._reasons, Calibrated(self._tokens, before, after, errors))


def _stored(choice: Choice) -> Tensor:
    """Return a weight as it is stored, `[*, N, K]`."""
    weight = choice.weight.detach()
    return weight.transpose(-1, -2).contiguous() if choice.transposed else weight


def _copy_once(calls: Sequence[tuple[nn.Module, Tensor, Tensor]], x: Tensor) -> Tensor:
    """Return a copy of a layer's input: an earlier call's, if that call got the same tensor with the same values."""
    for _, earlier, copy in calls:
        if earlier is x and torch.equal(copy, x):
            return copy
    return x.clone()


def _relative(stream: Stream, reference: Stream, batches: Iterable[int]) -> float:
    """Return the norm of the error in a stream's hidden tensors, divided by the norm of the reference's."""
    errors = squares = 0.0
    for batch in batches:
        if batch in stream.hidden:
            hidden, expected = stream.hidden[batch].float(), reference.hidden[batch].float()
            errors += (hidden - expected).square().sum().item()
            squares += expected.square().sum().item()
    return (errors / squares) ** 0.5 if squares else 0.0
