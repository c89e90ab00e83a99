"""The walk over a model's blocks that chooses the codes of each weight with the inputs it gets.

Three streams of inputs pass a block before the next one: that of the float model, that of the model whose codes are
being chosen, and that of one quantized without calibration, which tells what the calibration is worth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.budget.plan import stored_shape, weight_of
from hf_trainweights.models.budget.sensitivity import Batch
from hf_trainweights.models.calibration.blocks import (
    Stopped,
    Stream,
    capture,
    find_chains,
    inputs_of,
    without_padding,
)
from hf_trainweights.models.calibration.experts import ExpertInputs, one_by_one, quantize_experts_with_feedback
from hf_trainweights.models.calibration.feedback import quantize_with_feedback
from hf_trainweights.models.calibration.moments import Moments
from hf_trainweights.models.choosing.summary import Calibrated, Choice
from hf_trainweights.tensor.modules import parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# With fewer tokens than so many times the inputs of a layer, much of the gain is lost.
_ENOUGH_TOKENS = 4

_logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Calibration:
    """What a walk has found.

    Args:
        weights: The quantized weights, by name.
        reasons: Why the others are to be quantized without calibration, by name.
        gain: What it was worth.
    """

    weights: Mapping[str, QuantizedTensor]
    reasons: Mapping[str, str]
    gain: Calibrated


def calibrate(module: nn.Module, choices: Sequence[Choice], batches: Sequence[Batch]) -> Calibration:
    """Choose the codes of weights with inputs of their module.

    Args:
        module: A module whose weights are loaded. It is in the same state afterwards, also after an error.
        choices: The weights to quantize, float and finite, and their formats.
        batches: Inputs of the module, at least one.

    Raises:
        ConfigError: The module does not run on the batches, or needs a cache to run.
    """
    walk = _Walk(module, choices, batches)
    with torch.no_grad(), _evaluating(module), one_by_one(module):
        chains = walk.chains()
        with logging.tqdm(total=sum(map(len, chains)), desc="Calibrating", unit="block") as bar:
            for chain in chains:
                walk.pass_chain(chain, bar)
    return walk.result()


def require_gain(choices: Sequence[Choice]) -> None:
    """Check that some weights are to have a format whose codes calibration can choose.

    Args:
        choices: The weights to quantize.

    Raises:
        ConfigError: None has such a format.
    """
    if not any(map(_gains, choices)):
        expected, found = (
            "a format of 2 to 6 bits or coded",
            ", ".join({str(each.format) for each in choices}) or "none",
        )
        raise ConfigError("calibration", expected, found, "Leave it out: formats of 8 bits gain nothing by it.")


def _gains(choice: Choice) -> bool:
    """Return whether the codes of a weight's format can be chosen column by column."""
    some = torch.ones(2, stored_shape(choice)[-1])
    return choice.format is not None and choice.format.columns(some, some[0]) is not None


class _Walk:
    def __init__(self, module: nn.Module, choices: Sequence[Choice], batches: Sequence[Batch]):
        self._module, self._batches = module, batches
        self._places = parameter_places(module)
        self._reasons = {choice.name: "its module is in no block that the batches run once" for choice in choices}
        self._choices: dict[str, Choice] = {}
        for choice in choices:
            self._consider(choice)
        self._found: dict[str, QuantizedTensor] = {}
        self._tokens = self._missing = 0
        # The last block's errors, squared and relative: quantized without calibration and with it.
        self._errors = (0.0, 0.0)

    def _consider(self, choice: Choice) -> None:
        """Take a weight for calibration, or note why not."""
        weight = weight_of(choice)
        if not isinstance(choice.module, nn.Linear | Conv1D) and weight.dim() == 2:
            self._reasons[choice.name] = "its layer is no linear one"
        elif len(self._places[id(weight)]) > 1:
            self._reasons[choice.name] = "several layers share it"
        elif not _gains(choice):
            self._reasons[choice.name] = f"{choice.format} gains nothing by it"
        else:
            self._choices[choice.name] = choice

    def chains(self) -> list[list[nn.Module]]:
        """Return the chains of blocks."""
        return find_chains(self._module, {choice.module for choice in self._choices.values()}, self._batches[0])

    def pass_chain(self, chain: Sequence[nn.Module], bar: Any) -> None:
        """Choose the codes of a chain of blocks."""
        if not any(self._inside(block) for block in chain):
            bar.update(len(chain))
            return
        reference = capture(self._module, chain, self._batches)
        with self._substituted(self._found):
            own = capture(self._module, chain, self._batches)
        with self._substituted(self._plain(self._found)):
            plain = capture(self._module, chain, self._batches)
        for number, block in enumerate(chain):
            for stage in self._stages(block, number, reference):
                self._pass_stage(stage, block, number, reference, own)
                bar.set_postfix(tokens=f"{self._tokens:,}")
            for choice in self._inside(block):
                if weight_of(choice).dim() == 3:
                    self._pass_experts(choice, block, number, own)
            reference.advance(block, number)
            with self._substituted(self._found_in(block)):
                own.advance(block, number)
            with self._substituted(self._plain(self._found_in(block))):
                plain.advance(block, number)
            bar.update()
        self._errors = _relative(plain, reference), _relative(own, reference)

    def _inside(self, block: nn.Module) -> list[Choice]:
        modules = set(block.modules())
        return [choice for choice in self._choices.values() if choice.module in modules]

    def _stages(self, block: nn.Module, number: int, stream: Stream) -> list[list[Choice]]:
        """Return the weights of a block in the order of their calls, those together that get the same tensor."""
        linear = {choice.module: choice for choice in self._inside(block) if weight_of(choice).dim() == 2}
        seen: dict[int, list[Choice]] = {}
        held: list[Tensor] = []
        calls: list[nn.Module] = []

        def see(layer: nn.Module, x: Tensor) -> None:
            held.append(x)  # so that no other tensor gets its identity
            if layer not in calls:
                seen.setdefault(id(x), []).append(linear[layer])
            calls.append(layer)

        with inputs_of(linear, see):
            stream.run(block, number, 0)
        for choice in linear.values():
            count = calls.count(choice.module)
            if count != 1:
                self._reasons[choice.name] = "its layer runs several times" if count else "its layer is not called"
        stages = ([choice for choice in stage if calls.count(choice.module) == 1] for stage in seen.values())
        return [stage for stage in stages if stage]

    def _pass_stage(
        self, stage: Sequence[Choice], block: nn.Module, number: int, reference: Stream, own: Stream
    ) -> None:
        """Choose the codes of weights that get the same input."""
        weight = _stored(stage[0])
        moments = Moments(weight.shape[1], weight.device)
        for batch in range(len(self._batches)):
            expected = self._input(stage[0], block, number, reference, batch)
            with self._substituted(self._found_in(block)):
                moments.add(self._input(stage[0], block, number, own, batch), expected)
        self._tokens = max(self._tokens, moments.tokens)
        self._missing = max(self._missing, _ENOUGH_TOKENS * weight.shape[1] - moments.tokens)
        factor = moments.factor()
        for choice in stage:
            weight, form = _stored(choice), choice.format
            assert form is not None
            tensors = quantize_with_feedback(weight, form, moments, factor)
            assert tensors is not None
            self._take(choice, tensors)

    def _pass_experts(self, choice: Choice, block: nn.Module, number: int, own: Stream) -> None:
        """Choose the codes of experts; which tokens they get differs in the float model, so nothing is corrected."""
        with self._substituted(self._found_in(block)), ExpertInputs(weight_of(choice).detach()) as inputs:
            for batch in range(len(self._batches)):
                own.run(block, number, batch)
        if any(inputs.rows):
            assert choice.format is not None
            self._take(choice, quantize_experts_with_feedback(_stored(choice), choice.format, inputs.rows))
        else:
            self._reasons[choice.name] = "its layer does not multiply by one expert after another"

    def _take(self, choice: Choice, tensors: dict[str, Tensor]) -> None:
        """Keep the stored tensors of a weight."""
        weight, form = _stored(choice), choice.format
        assert form is not None
        self._found[choice.name] = QuantizedTensor(tensors, form, weight.shape, weight.dtype, choice.transposed)
        del self._reasons[choice.name]

    def _input(self, choice: Choice, block: nn.Module, number: int, stream: Stream, batch: int) -> Tensor:
        """Return what a layer gets, without padding."""
        got: list[Tensor] = []

        def see(layer: nn.Module, x: Tensor) -> None:
            got.append(x)
            raise Stopped

        with inputs_of([choice.module], see), contextlib.suppress(Stopped):
            stream.run(block, number, batch)
        return without_padding(got[0], self._batches[batch]) if got else _nothing(choice)

    def _found_in(self, block: nn.Module) -> dict[str, QuantizedTensor]:
        return {each.name: self._found[each.name] for each in self._inside(block) if each.name in self._found}

    def _plain(self, names: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
        """Return weights quantized without calibration."""
        chosen = (choice for choice in self._choices.values() if choice.name in names)
        return {
            choice.name: QuantizedTensor.quantize(weight_of(choice), choice.format, choice.transposed, choice.name)
            for choice in chosen
            if choice.format is not None
        }

    @contextlib.contextmanager
    def _substituted(self, weights: Mapping[str, QuantizedTensor]) -> Iterator[None]:
        """Let the module have the values of quantized weights."""
        floats = [
            (weight_of(choice), weights[choice.name]) for choice in self._choices.values() if choice.name in weights
        ]
        try:
            for weight, quantized in floats:
                values = nn.Parameter(quantized.dequantize(), requires_grad=False)
                put_parameter(self._places[id(weight)], values)
            yield
        finally:
            for weight, _ in floats:
                put_parameter(self._places[id(weight)], weight)  # type: ignore[arg-type]  (it was a parameter before)

    def result(self) -> Calibration:
        """Return what was found, with a warning where there were few tokens."""
        if self._missing:
            wanted = f"{self._tokens + self._missing:,} would be {_ENOUGH_TOKENS} for each input of the largest layer"
            _logger.warning("Calibrated with %s tokens. More are worth more: %s.", f"{self._tokens:,}", wanted)
        before, after = self._errors
        return Calibration(self._found, self._reasons, Calibrated(self._tokens, before, after))


def _stored(choice: Choice) -> Tensor:
    """Return a weight as it is stored, `[*, N, K]`."""
    weight = weight_of(choice).detach()
    return weight.transpose(-1, -2).contiguous() if choice.transposed else weight


def _nothing(choice: Choice) -> Tensor:
    weight = _stored(choice)
    return weight.new_empty((0, weight.shape[1]))


def _relative(stream: Stream, reference: Stream) -> float:
    """Return how far the hidden states of a stream are off, as the norm of the error over their own."""
    errors = squares = 0.0
    for found, expected in zip(stream.hidden, reference.hidden, strict=True):
        errors += (found.float() - expected.float()).square().sum().item()
        squares += expected.float().square().sum().item()
    return (errors / squares) ** 0.5 if squares else 0.0


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout off."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for each, mode in modes:
            each.training = mode
