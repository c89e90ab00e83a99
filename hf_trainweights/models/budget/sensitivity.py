"""How much a relative error of each weight changes what a model returns, told by gradients and without data.

Rounding changes a weight W by noise of the relative size t. To second order the outputs then change by t² |W|² / n
times the squared norm of their derivative by W: the trace of its Fisher information, if they are logits. A forward pass
on random tokens and a backward pass in a random direction measure that norm for all weights at once.
`benchmarks.sensitivity` compares it with what noise in one weight after another really changes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.models import holding, is_cache
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Keyword arguments of a model, or a tensor as its only argument.
Batch = Mapping[str, Tensor] | Tensor

_SEED = 0
# Twice as many tokens would gain MiniLM .02 dB and a small Llama .06 dB at twice the time and memory. Sequences apart
# add no noise to each other, so one direction does: a second one would gain .01 dB.
_SEQUENCES, _TOKENS = 2, 32
# Rows of a float weight that are widened at a time.
_WIDENED_ROWS = 4096
# Rows that tell the mean square of a weight: if one row's is 30 % off, theirs is 2 %, a fiftieth of a bit.
_SQUARED_ROWS = 256


def random_tokens(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a batch of random tokens for a model, the same at every call; none for one that takes no tokens alone."""
    if not isinstance(model, PreTrainedModel) or model.main_input_name != "input_ids":
        return []
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, nn.Embedding):
        return []
    generator = torch.Generator().manual_seed(_SEED)
    names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
    shape = (_SEQUENCES, _TOKENS)
    return [{name: torch.randint(embeddings.num_embeddings, shape, generator=generator) for name in names}]


def does_not_run(error: Exception) -> ConfigError:
    """Return the error for a batch on which a module raises whatever its own code raises."""
    expected, found = "inputs that the module runs on", f"{type(error).__name__}: {error}"
    return ConfigError("calibration", expected, found[:300], "Pass what model(**batch) takes.")


def sensitivities(model: nn.Module, weights: Sequence[Choice], batches: Iterable[Batch]) -> dict[str, float]:
    """Return how much the outputs of a model change for a relative error of each weight, in any unit, to two digits.

    A weight on which no output depends through the call of its module has none, such as an embedding. The model is left
    as it was.
    """
    measured = {choice.name: 0.0 for choice in weights}
    generator = torch.Generator().manual_seed(_SEED)
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(model.modules(), "training", False))
        # Gradients reach the modules of the model, but no parameter.
        stack.enter_context(holding(model.parameters(), "requires_grad", False))
        for embedding in (each for each in model.modules() if isinstance(each, nn.Embedding)):
            stack.callback(embedding.register_forward_hook(_let_gradients_through).remove)
        stack.enter_context(_Float32Linears())
        for choice in weights:
            if not isinstance(choice.module, nn.Embedding):
                handle = choice.module.register_forward_hook(_Recorder(choice, measured))
                stack.callback(handle.remove)
        device = next(model.parameters()).device
        for batch in batches:
            inputs = {"": batch} if isinstance(batch, Tensor) else dict(batch)
            inputs = {name: _to_differentiate(value, device) for name, value in inputs.items()}
            with torch.enable_grad():
                output = model(inputs[""]) if "" in inputs else model(**inputs)
                _random_derivative(output, generator).backward()
    return {name: float(f"{value:.1e}") for name, value in measured.items() if value}


class _Float32Linear(torch.autograd.Function):
    """`F.linear` by products in float32 of a weight of 16 bits, some rows of which are widened at a time.

    Where a CPU has no instructions for 16 bits, PyTorch's own way takes 4 to 9 times as long, and 30 to 65 times for a
    gradient: docs/performance.md, "The gradient of x".
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""
        ctx.weight, ctx.shape = weight, x.shape
        rows = _rows(x)
        output = torch.cat([rows @ weight[part].float().t() for part in _parts(weight)], dim=-1)
        output = output if bias is None else output.add_(bias)
        return output.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of x."""
        rows = gradient.reshape(-1, len(ctx.weight))
        total = torch.zeros(len(rows), ctx.weight.shape[1], dtype=torch.float32)
        for part in _parts(ctx.weight):
            total.addmm_(rows[:, part].float(), ctx.weight[part].float())
        return total.view(ctx.shape).to(gradient.dtype), None, None


def _parts(weight: Tensor) -> list[slice]:
    return [slice(start, start + _WIDENED_ROWS) for start in range(0, len(weight), _WIDENED_ROWS)]


class _Float32Linears(TorchFunctionMode):
    """Within it, float weights are multiplied in float32 where that takes less time."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _multiplies_slowly(args[1]):
            return _Float32Linear.apply(*args, *[None] * (3 - len(args)))
        return func(*args, **kwargs or {})


def _multiplies_slowly(weight: Tensor) -> bool:
    """Return whether a weight is of floats of 16 bits for which its CPU has no instructions."""
    if isinstance(weight, QuantizedTensor) or weight.device.type != "cpu":
        return False
    return product_dtype(weight.dtype, _SEQUENCES * _TOKENS) != weight.dtype


class _Recorder:
    """A forward hook that adds to `measured` the squared derivatives of what follows by the weight of a module."""

    def __init__(self, choice: Choice, measured: dict[str, float]):
        self.name, self.measured = choice.name, measured
        self.mean_square = _mean_square(choice.weight) if choice.weight.dim() == 2 else None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Let the output tell its gradient; for its size alone it does not stay in memory."""
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if self.mean_square is None:
            output.register_hook(partial(self._add_of_experts, _rows(output.detach()).square().sum(-1)))
        else:
            output.register_hook(partial(self._add, x.detach(), self.mean_square))

    def _add(self, x: Tensor, mean_square: float, gradient: Tensor) -> None:
        """Add |g' x|², of which no matrix as large as the weight is made."""
        gradients, inputs = _rows(gradient), _rows(x)
        self.measured[self.name] += (mean_square * ((gradients @ gradients.T) * (inputs @ inputs.T)).sum()).item()

    def _add_of_experts(self, sizes: Tensor, gradient: Tensor) -> None:
        """Add what the sizes of outputs tell, relative to which errors are: nobody knows which rows each expert got."""
        gradients = _rows(gradient)
        self.measured[self.name] += ((gradients.square().sum(-1) * sizes).sum() / gradients.shape[-1]).item()


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).float()


def _random_derivative(output: Any, generator: torch.Generator) -> Tensor:
    """Return a number whose gradient is a random combination of the gradients of all outputs.

    For logits it is one of log-probabilities of tokens drawn from the model itself, else one of outputs of norm 1.
    """
    logits = getattr(output, "logits", None)
    first = (
        logits if isinstance(logits, Tensor) else next(each for each in tensors_in(output) if each.is_floating_point())
    )
    values = first.float().reshape(-1, first.shape[-1])
    if logits is None:
        values = F.normalize(values, dim=-1)
        noise = torch.randn(values.shape, dtype=torch.float32, generator=generator)
        return (values * noise.to(values.device)).sum()
    chances = values.detach().softmax(-1).cpu()
    drawn = torch.multinomial(chances, 1, generator=generator).to(values.device)
    signs = (torch.randint(2, drawn.shape, generator=generator) * 2 - 1).to(values.device)
    return (values.log_softmax(-1).gather(-1, drawn) * signs).sum()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns, in their order."""
    if isinstance(output, Tensor):
        yield output
    for each in output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ():
        yield from tensors_in(each)


def copied(value: Any) -> Any:
    """Return a value with a copy of each tensor and cache in it: a module may change these, and the original stays."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_cache(value):
        return copy.deepcopy(value)
    if type(value) is dict:
        return {name: copied(entry) for name, entry in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def _let_gradients_through(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()


def _to_differentiate(value: Any, device: torch.device) -> Any:
    value = copied(value)
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.requires_grad_() if value.is_floating_point() else value


def _mean_square(weight: Tensor) -> float:
    """Return the mean square of a matrix, told from some of its rows, evenly spaced."""
    values = weight.detach()
    transposed = isinstance(values, QuantizedTensor) and values.transposed
    values = values.t() if transposed else values
    values = values[:: -(-len(values) // _SQUARED_ROWS)]
    values = values.dequantize() if isinstance(values, QuantizedTensor) else values
    return values.float().square().mean().item()
