"""The blocks of a model: where they stand, in which order they run, and what they are called with.

No model is known by name. A block is an element of an outermost nn.ModuleList or nn.Sequential that has weights to
quantize, or a layer outside of these, such as the head of a classifier. Blocks of which each gets what the one before
it returned form a chain, and are walked without running the rest of the model again.

A model keeps the weights of all experts of a layer in one parameter and multiplies by its parts, so that no module is
called whose input could be seen: what each expert gets is seen in the products of its part of the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.spill import Spill
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.models.budget.sensitivity import Batch, does_not_run, tensors_in
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Arguments of a call, with `_HIDDEN` in the place of the tensor that goes from block to block.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_HIDDEN = object()

PRODUCTS = frozenset(
    {F.linear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
)
"""The functions by which layers multiply rows with a weight."""
_ALL_PRODUCTS = PRODUCTS | {torch.addmm, F.scaled_dot_product_attention}
# As many as batches have. A product of so many rows in bfloat16 takes an EPYC of Zen 4 .44 times as long as one in
# float32; if oneDNN may not use AVX512_BF16 2.4 times as long, and with AVX2 alone 4.1 times.
_MANY_ROWS = 512


class Stopped(Exception):  # noqa: N818  (no error: it ends a forward pass whose rest is not needed)
    """A hook has seen all that it was put there for."""


@dataclass
class Stream:
    """What the blocks of a chain get: in the float model, or in one whose earlier weights are quantized.

    Args:
        spill: Where the hidden tensors lie.
        hidden: For each batch the tensor that goes from block to block.
        arguments: For each batch the call of each block, whose own hidden tensor does not count.
    """

    spill: Spill
    hidden: list[Tensor] = field(default_factory=list)
    arguments: list[list[Arguments]] = field(default_factory=list)

    def run(self, block: nn.Module, number: int, batch: int) -> Tensor:
        """Return the first tensor that a block returns for the one that has come to it; that one if it returns none."""
        args, kwargs = self.arguments[batch][number]
        hidden = self.hidden[batch]
        args = tuple(hidden if value is _HIDDEN else value for value in args)
        kwargs = {name: hidden if value is _HIDDEN else value for name, value in kwargs.items()}
        output = next(tensors_in(block(*args, **kwargs)), None)
        return hidden if output is None else output

    def advance(self, block: nn.Module, number: int) -> None:
        """Let all batches pass a block."""
        for batch in range(len(self.hidden)):
            self.hidden[batch] = self.spill.keep(self.run(block, number, batch))


def fast_products(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a CPU without instructions for the dtype of a module multiplies in float32."""
    dtypes = {each.dtype for each in module.parameters() if each.device.type == "cpu"}
    slow = any(product_dtype(dtype, _MANY_ROWS) != dtype for dtype in dtypes)
    return _Float32Products() if slow else contextlib.nullcontext()


class _Float32Products(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if func in _ALL_PRODUCTS and args else None
        if not isinstance(x, Tensor) or x.device.type != "cpu" or product_dtype(x.dtype, _MANY_ROWS) == x.dtype:
            return func(*args, **kwargs)
        wide = {name: _widened(value, x.dtype) for name, value in kwargs.items()}
        return func(*(_widened(value, x.dtype) for value in args), **wide).to(x.dtype)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of a dtype in float32, and any other value as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value


def run_model(module: nn.Module, batch: Batch) -> None:
    """Run a module on a batch without a cache, until it ends or a hook stops it; ConfigError: it does not run on it."""
    device = next(module.parameters()).device
    inputs = batch if isinstance(batch, Mapping) else {"": batch}
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    if isinstance(module, PreTrainedModel) and hasattr(module.config, "use_cache"):
        inputs = {"use_cache": False, **inputs}
    try:
        module(inputs[""]) if "" in inputs else module(**inputs)
    except Stopped:
        return
    except (ConfigError, Warning):
        raise
    except Exception as error:
        raise does_not_run(error) from error


def find_chains(module: nn.Module, owners: Iterable[nn.Module], batch: Batch) -> list[list[nn.Module]]:
    """Return the blocks that a forward pass runs once each, in its order, in chains."""
    blocks = _blocks(module, set(owners))
    calls: list[nn.Module] = []
    chained: dict[nn.Module, bool] = {}
    last: list[Tensor | None] = [None]

    def entered(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(block)
        found, _ = _take_hidden(args, kwargs)
        before = last[0]
        if found is not None:
            # A model may return a view, so identity is too much to ask.
            chained[block] = before is not None and found.dtype == before.dtype and torch.equal(found, before)

    def left(block: nn.Module, args: Any, output: Any) -> None:
        last[0] = next(tensors_in(output), None)

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(entered, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(left).remove)
        run_model(module, batch)
    chains: list[list[nn.Module]] = []
    for block in calls:
        if calls.count(block) > 1 or block not in chained:
            continue
        if chains and chained[block]:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def capture(module: nn.Module, chain: Sequence[nn.Module], batches: Sequence[Batch], spill: Spill) -> Stream:
    """Return what the blocks of a chain are called with; ConfigError: with a cache, which would grow at every call."""
    stream, calls = Stream(spill), list[Arguments]()

    def entered(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _refuse_caches(block, args, kwargs)
        found, others = _take_hidden(args, kwargs)
        if block is chain[0] and found is not None:
            stream.hidden.append(spill.keep(found))
        calls.append(others)
        if block is chain[-1]:
            raise Stopped

    with contextlib.ExitStack() as stack:
        for block in chain:
            stack.callback(block.register_forward_pre_hook(entered, with_kwargs=True).remove)
        for batch in batches:
            run_model(module, batch)
            stream.arguments.append(list(calls))
            calls.clear()
    return stream


@contextlib.contextmanager
def inputs_of(layers: Iterable[nn.Module], see: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Within it, call `see` with the layer and its input at each call of one of some layers."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(lambda layer, args: see(layer, args[0])).remove)
        yield


class ExpertInputs(TorchFunctionMode):
    """Within it, collects in `rows` what each expert of a layer's float weight `[E, *, *]` multiplies."""

    def __init__(self, weight: Tensor, spill: Spill):
        super().__init__()
        self._spill = spill
        self._weight = weight
        self._expert_bytes = weight.stride(0) * weight.element_size()
        self.rows: list[list[Tensor]] = [[] for _ in weight]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at a product of float tensors, and let it be done."""
        if func in PRODUCTS and len(args) > 1 and not isinstance(args[1], QuantizedTensor):
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, weight: Tensor) -> None:
        expert, rest = divmod(weight.data_ptr() - self._weight.data_ptr(), self._expert_bytes)
        if rest or not 0 <= expert < len(self.rows):
            return
        if weight.shape == self._weight.shape:
            # All experts at once: tokens that are not meant for one of them come to it as zeros.
            for number, each in enumerate(x):
                self._keep(number, each[each.any(dim=-1)])
        elif weight.numel() == self._weight[0].numel():
            self._keep(expert, x.reshape(-1, x.shape[-1]))

    def _keep(self, expert: int, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.rows[expert].append(self._spill.keep(x))


@contextlib.contextmanager
def one_by_one(module: nn.Module) -> Iterator[None]:
    """Let the models of Transformers in a module multiply by one expert after another, instead of all at once."""
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    saved = [(model.config, dict(vars(model.config))) for model in models]
    try:
        for model in models:
            with contextlib.suppress(ValueError):  # a model that has no such choice
                model.set_experts_implementation("eager")
        yield
    finally:
        for config, values in saved:
            vars(config).update(values)


def without_padding(values: Tensor, batch: Batch) -> Tensor:
    """Return the rows of a layer's input `[*, K]` that are no padding, as `[n, K]`."""
    rows = values.reshape(-1, values.shape[-1])
    for name, mask in batch.items() if isinstance(batch, Mapping) else ():
        is_mask = name.endswith("attention_mask") and isinstance(mask, Tensor)
        if is_mask and mask.dim() == 2 and mask.numel() == len(rows):
            return rows[mask.flatten().bool().to(rows.device)]
    return rows


def _take_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Arguments]:
    """Return the tensor that goes from block to block, the first among the arguments, and the others."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return value, ((*args[:place], _HIDDEN, *args[place + 1 :]), kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return value, (args, {**kwargs, name: _HIDDEN})
    return None, (args, kwargs)


def _blocks(module: nn.Module, owners: set[nn.Module]) -> list[nn.Module]:
    """Return the elements of the outermost containers that have owners in them, and the owners beside these.

    A module without such containers is one block.
    """
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential) and container not in inside:
            within = set(container.modules())
            if not owners.isdisjoint(within):
                inside |= within
                blocks += container.children()
    return [*blocks, *(owner for owner in owners if owner not in inside)] if blocks else [module]


def _refuse_caches(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        # Every cache of Transformers has this method, and no argument of another kind.
        if hasattr(value, "get_seq_length"):
            found = f"a {type(value).__name__} among the arguments of {type(block).__name__}"
            next_step = "Switch it off in the batches: attention would read the keys of an earlier pass."
            raise ConfigError("calibration", "blocks that run without a cache", found, next_step)
