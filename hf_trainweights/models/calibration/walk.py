"""The walk over a model's blocks that chooses the codes of each weight with the inputs it gets.

Three streams of inputs pass a block before the next one: that of the float model, that of the model whose codes are
being chosen, and that of one quantized without calibration, which tells what the calibration is worth.
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
from hf_trainweights.models.budget.measure import substituted
from hf_trainweights.models.budget.sensitivity import Batch
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
from hf_trainweights.models.host.models import holding
from hf_trainweights.models.loading.conversion import keep_in
from hf_trainweights.tensor.modules import parameter_places
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# With fewer tokens than so many times the inputs of a layer, much of the gain is lost.
_ENOUGH_TOKENS = 4
# What calibration is worth is told by the first batches alone: a third stream of all would take a fifth more time.
_JUDGED_BATCHES = 4

_logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Calibration:
    """What a walk has found: quantized weights, why others are quantized without calibration, and what it was worth."""

    weights: Mapping[str, QuantizedTensor]
    reasons: Mapping[str, str]
    gain: Calibrated


def calibrate(
    module: nn.Module, choices: Sequence[Choice], batches: Sequence[Batch], spill: Spill, finished: FinishedBlocks
) -> Calibration:
    """Choose the codes of finite float weights with inputs of their module, which even an error leaves as it was.

    Blocks that `finished` has from an earlier call are taken from there; those that this call finishes are added.
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
        found = ", ".join({str(each.format) for each in choices}) or "none"
        next_step = "Leave it out: formats of 8 bits gain nothing by it."
        raise ConfigError("calibration", "a format of 2 to 6 bits or coded", found, next_step)


def _gains(choice: Choice) -> bool:
    """Return whether the codes of a weight's format can be chosen column by column."""
    some = torch.ones(2, choice.stored_shape[-1], dtype=torch.float32)
    return choice.format is not None and choice.format.columns(some, some[0]) is not None


@dataclass(frozen=True)
class _Stage:
    """Weights whose layers get the same tensor, and that by the number of each batch in the float model."""

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
        self._found: dict[str, QuantizedTensor] = {}
        self._tokens = self._missing = 0
        self._names = {each: name or type(each).__name__ for name, each in module.named_modules()}
        # Of each block that was passed how far its outputs are off: quantized without calibration and with it.
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
        """Return the chains of blocks that a batch of the most arguments runs: one with an image, if there are some."""
        fullest = max(self._batches.values(), key=lambda batch: len(batch) if isinstance(batch, Mapping) else 1)
        return find_chains(self._module, {choice.module for choice in self._choices.values()}, fullest)

    def pass_chain(self, chain: Sequence[nn.Module], bar: Any) -> None:
        """Choose the codes of a chain of blocks."""
        if not any(self._inside(block) for block in chain):
            bar.update(len(chain))
            return
        reference = capture(self._module, chain, self._batches, self._spill)
        with self._substituted_in_turn(self._found):
            own = capture(self._module, chain, self._batches, self._spill)
        judged = {batch: self._batches[batch] for batch in list(reference.hidden)[:_JUDGED_BATCHES]}
        with self._substituted_in_turn(self._plain(self._found)):
            plain = capture(self._module, chain, judged, self._spill)
        for number, block in enumerate(chain):
            self._choose(block, number, reference, own)
            with self._substituted(self._found_in(block)):
                own.advance(block, number)
            with self._substituted(self._plain(self._found_in(block))):
                plain.advance(block, number)
            self._errors[block] = _relative(plain, reference, judged), _relative(own, reference, judged)
            bar.set_postfix(tokens=f"{self._tokens:,}")
            bar.update()

    def _choose(self, block: nn.Module, number: int, reference: Stream, own: Stream) -> None:
        """Choose the codes of a block, and let the float model's inputs pass it."""
        stages = self._pass(block, number, reference)
        inside = self._inside(block)
        kept = self._finished.read([(each.name, each.format, each.weight) for each in inside])
        if kept is None:
            for stage in stages:
                self._choose_stage(stage, block, number, own)
            for choice in inside:
                if choice.weight.dim() == 3:
                    self._choose_experts(choice, block, number, own)
            kept = self._finished.write({name: each.tensors for name, each in self._found_in(block).items()})
        for choice in inside:
            if choice.name in kept:
                self._take(choice, kept[choice.name])

    def _inside(self, block: nn.Module) -> list[Choice]:
        modules = set(block.modules())
        return [choice for choice in self._choices.values() if choice.module in modules]

    def _pass(self, block: nn.Module, number: int, stream: Stream) -> list[_Stage]:
        """Let all batches of the float model pass a block; return its weights in the order of their calls."""
        linear = {choice.module: choice for choice in self._inside(block) if choice.weight.dim() == 2}
        stages: list[_Stage] = []
        for batch in stream.hidden:
            layers = [stage.choices[0].module for stage in stages] or linear
            # All calls are held until the block is done, so that no other tensor gets the identity of an input.
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
        """Return those weights together that get the same tensor, if their layers run once."""
        layers = [layer for layer, _ in calls]
        for layer, choice in linear.items():
            if layers.count(layer) != 1:
                self._reasons[choice.name] = (
                    "its layer runs several times" if layer in layers else "its layer is not called"
                )
        found: dict[int, _Stage] = {}
        for layer, x in calls:
            if layers.count(layer) == 1:
                found.setdefault(id(x), _Stage([], {})).choices.append(linear[layer])
        return list(found.values())

    def _choose_stage(self, stage: _Stage, block: nn.Module, number: int, own: Stream) -> None:
        """Choose the codes of weights that get the same input."""
        weight = _stored(stage.choices[0])
        moments = Moments(weight.shape[1], weight.device, stage.choices[0].name)
        with self._substituted(self._found_in(block)):
            for batch in own.hidden:
                found, expected = self._input(stage.choices[0], block, number, own, batch), stage.inputs.get(batch)
                if found is not None:
                    # A router may have sent other tokens here than in the float model: nothing is corrected then.
                    moments.add(found, found if expected is None or expected.shape != found.shape else expected)
        factor = moments.factor()
        for choice in stage.choices:
            assert choice.format is not None
            tensors = quantize_with_feedback(_stored(choice), choice.format, moments, factor)
            assert tensors is not None
            self._take(choice, tensors)

    def _choose_experts(self, choice: Choice, block: nn.Module, number: int, own: Stream) -> None:
        """Choose the codes of experts; which tokens they get differs in the float model, so nothing is corrected."""
        weight = choice.weight.detach()
        with self._substituted(self._found_in(block)), ExpertInputs(weight, self._spill) as inputs:
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
        self._found[choice.name] = QuantizedTensor(tensors, form, weight.shape, weight.dtype, choice.transposed)
        self._reasons.pop(choice.name, None)

    def _input(self, choice: Choice, block: nn.Module, number: int, stream: Stream, batch: int) -> Tensor | None:
        """Return what a layer gets, without padding; None if it is not called."""
        got: list[Tensor] = []

        def see(layer: nn.Module, x: Tensor) -> None:
            got.append(x)
            raise Stopped

        with inputs_of([choice.module], see), contextlib.suppress(Stopped):
            stream.run(block, number, batch)
        return without_padding(got[0], self._batches[batch]) if got else None

    def _found_in(self, block: nn.Module) -> dict[str, QuantizedTensor]:
        return {each.name: self._found[each.name] for each in self._inside(block) if each.name in self._found}

    def _plain(self, names: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
        """Return weights quantized without calibration."""
        chosen = (choice for choice in self._choices.values() if choice.name in names)
        return {choice.name: keep_in(self._spill, choice.quantize(choice.weight)) for choice in chosen}

    @contextlib.contextmanager
    def _substituted_in_turn(self, weights: Mapping[str, QuantizedTensor]) -> Iterator[None]:
        """Let each block that was passed have the values of its quantized weights while it runs, and no other then."""
        with contextlib.ExitStack() as hooks, contextlib.ExitStack() as running:

            def entered(block: nn.Module, args: Any) -> None:
                inside = {name: weights[name] for name in self._found_in(block)}
                running.enter_context(self._substituted(inside))

            for block in self._errors:
                hooks.callback(block.register_forward_pre_hook(entered).remove)
                hooks.callback(block.register_forward_hook(lambda *_: running.close()).remove)
            yield

    def _substituted(self, weights: Mapping[str, QuantizedTensor]) -> contextlib.AbstractContextManager[None]:
        """Let the module have the values of quantized weights."""
        floats = [(choice.weight, weights[choice.name]) for choice in self._choices.values() if choice.name in weights]
        values = ((weight, nn.Parameter(each.dequantize(), requires_grad=False)) for weight, each in floats)
        return substituted(self._places, values)

    def result(self) -> Calibration:
        """Return what was found, with a warning where there were few tokens."""
        if self._missing:
            wanted = f"{self._tokens + self._missing:,} would be {_ENOUGH_TOKENS} for each input of the largest layer"
            _logger.warning("Calibrated with %s tokens. More are worth more: %s.", f"{self._tokens:,}", wanted)
        errors = {self._names[block]: each for block, each in self._errors.items()}
        before, after = next(reversed(errors.values()), (0.0, 0.0))
        return Calibration(self._found, self._reasons, Calibrated(self._tokens, before, after, errors))


def _stored(choice: Choice) -> Tensor:
    """Return a weight as it is stored, `[*, N, K]`."""
    weight = choice.weight.detach()
    return weight.transpose(-1, -2).contiguous() if choice.transposed else weight


def _copy_once(calls: Sequence[tuple[nn.Module, Tensor, Tensor]], x: Tensor) -> Tensor:
    """Return a copy of a layer's input, the one of an earlier call if that got the same tensor with the same values."""
    for _, earlier, copy in calls:
        if earlier is x and torch.equal(copy, x):
            return copy
    return x.clone()


def _relative(stream: Stream, reference: Stream, batches: Iterable[int]) -> float:
    """Return how far the hidden states of a stream are off, as the norm of the error over their own."""
    errors = squares = 0.0
    for batch in batches:
        if batch in stream.hidden:
            found, expected = stream.hidden[batch].float(), reference.hidden[batch].float()
            errors += (found - expected).square().sum().item()
            squares += expected.square().sum().item()
    return (errors / squares) ** 0.5 if squares else 0.0
