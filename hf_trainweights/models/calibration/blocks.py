"""The blocks of a model: which modules they are, in which order they run, and the arguments of their calls.

No model is known by name. A block is an element of an outermost nn.ModuleList or nn.Sequential that has weights to
quantize, or a layer outside of these, such as the head of a classifier. If each block gets the tensor that the block
before it returned, the hidden tensor, they form a chain: it is walked without running the rest of the model again.

A model keeps the weights of all experts of a layer in one parameter and multiplies by slices of it. So no module is
called whose input a hook could see. The inputs of an expert are seen in the products with its slice of the weight.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, TrainWeightsError
from hf_trainweights.files.spill import Spill
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.models.host.inputs import Batch, copied, does_not_run, tensors_in
from hf_trainweights.models.host.models import holding
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Arguments of the call of a block, with `_HIDDEN` in the place of the hidden tensor.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_HIDDEN = object()

PRODUCTS = frozenset(
    {F.linear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
)
"""The functions by which layers multiply rows with a weight."""
_ALL_PRODUCTS = PRODUCTS | {torch.addmm, F.scaled_dot_product_attention}
# The rows of a usual batch. A product of this many rows in bfloat16 takes an EPYC of Zen 4 .44 times as long as one in
# float32; if oneDNN may not use AVX512_BF16 2.4 times as long, and with AVX2 alone 4.1 times.
_MANY_ROWS = 512


class Stopped(Exception):  # noqa: N818  (no error: it ends a forward pass whose rest is not needed)
    """A hook has seen all that it was put there for."""


@dataclass
class Stream:
    """The inputs of the blocks of a chain: in the float model, or in one whose earlier weights are quantized.

    Args:
        spill: Holds the hidden tensors.
        hidden: The hidden tensor that the next block gets, by the number of each batch that runs the chain.
        arguments: The arguments of the call of each block, by the number of the batch.
    """

    spill: Spill
    hidden: dict[int, Tensor] = field(default_factory=dict)
    arguments: dict[int, list[Arguments]] = field(default_factory=dict)

    def run(self, block: nn.Module, number: int, batch: int) -> Tensor:
        """Run a block on a batch; return the first tensor in its output, or its hidden tensor if the output has none.

        The block gets copies, so it may change its arguments in place.
        """
        args, kwargs = copied(self.arguments[batch][number])
        hidden = copied(self.hidden[batch])
        args = tuple(hidden if value is _HIDDEN else value for value in args)
        kwargs = {name: hidden if value is _HIDDEN else value for name, value in kwargs.items()}
        try:
            output = next(tensors_in(block(*args, **kwargs)), None)
        except (Stopped, TrainWeightsError, Warning):
            raise
        except Exception as error:
            raise does_not_run(error) from error
        return hidden if output is None else output

    def advance(self, block: nn.Module, number: int) -> None:
        """Let all batches pass a block."""
        for batch in self.hidden:
            self.hidden[batch] = self.spill.keep(self.run(block, number, batch))


def fast_products(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a CPU without instructions for the dtype of a module multiplies in float32."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.device.type == "cpu"}
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
    """Return a tensor of this dtype in float32, and any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value


def run_model(module: nn.Module, batch: Batch) -> None:
    """Run a module on a batch until it ends or a hook stops it; ConfigError: it does not run on this batch."""
    device = next(module.parameters()).device
    inputs = copied(dict(batch) if isinstance(batch, Mapping) else {"": batch})
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    try:
        module(inputs[""]) if "" in inputs else module(**inputs)
    except Stopped:
        return
    except (ConfigError, Warning):
        raise
    except Exception as error:
        raise does_not_run(error) from error


@contextlib.contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Keep the models of Transformers in a module from making a cache, unless a call asks one of them for it.

    A model that holds others may not take `use_cache`, nor have it in its configuration, but the models in it do.
    """
    models = [model for model in module.modules() if isinstance(model, PreTrainedModel)]
    configs = {id(model.config): model.config for model in models if getattr(model.config, "use_cache", False)}

    def entered(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(model.forward).parameters)
        is_passed = kwargs.get("use_cache") is not None or "use_cache" in names[: len(args)]
        return args, kwargs if is_passed or "use_cache" not in names else {**kwargs, "use_cache": False}

    with holding(configs.values(), "use_cache", False), contextlib.ExitStack() as stack:
        for model in models:
            stack.callback(model.register_forward_pre_hook(entered, with_kwargs=True).remove)
        yield


def find_chains(module: nn.Module, owners: Iterable[nn.Module], batch: Batch) -> list[list[nn.Module]]:
    """Return the blocks that a forward pass runs once each, in the order of their calls, grouped in chains."""
    blocks = _blocks(module, set(owners))
    calls: list[nn.Module] = []
    chained: dict[nn.Module, bool] = {}
    last: list[Tensor | None] = [None]

    def entered(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(block)
        hidden, _ = _take_hidden(args, kwargs)
        before = last[0]
        if hidden is not None:
            # Values are compared, not identities: a model may pass a view on.
            chained[block] = before is not None and hidden.dtype == before.dtype and torch.equal(hidden, before)

    def left(block: nn.Module, args: Any, output: Any) -> None:
        # A copy: the model may change it in place before the next block gets it.
        last[0] = copied(next(tensors_in(output), None))

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


def capture(module: nn.Module, chain: Sequence[nn.Module], batches: Mapping[int, Batch], spill: Spill) -> Stream:
    """Return the inputs of a chain's blocks, for the batches that run each block once and in the chain's order."""
    stream, calls, copies = (
        Stream(spill),
        list[tuple[nn.Module, Tensor | None, Arguments]](),
        dict[int, tuple[Any, Any]](),
    )

    def entered(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, others = _take_hidden(args, kwargs)
        first = copy_to(spill, hidden) if block is chain[0] and hidden is not None else None
        calls.append((block, first, _copied_once(others, copies)))
        if block is chain[-1]:
            raise Stopped

    with contextlib.ExitStack() as stack:
        for block in chain:
            stack.callback(block.register_forward_pre_hook(entered, with_kwargs=True).remove)
        for number, batch in batches.items():
            run_model(module, batch)
            hidden = calls[0][1] if calls else None
            if hidden is not None and [block for block, _, _ in calls] == list(chain):
                stream.hidden[number], stream.arguments[number] = hidden, [others for _, _, others in calls]
            calls.clear()
            copies.clear()
    return stream


def copy_to(spill: Spill, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in a file if it is large."""
    tensor = tensor.detach()
    spilled = spill.keep(tensor)
    return tensor.clone() if spilled is tensor else spilled


@contextlib.contextmanager
def inputs_of(layers: Iterable[nn.Module], see: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Call `see` with the layer and its input at each call of one of `layers` within the context."""

    def entered(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(layer, next(tensors_in([args, kwargs])))

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(entered, with_kwargs=True).remove)
        yield


class ExpertInputs(TorchFunctionMode):
    """A mode that collects in `rows` the inputs of each expert of a layer's float weight `[E, *, *]`."""

    def __init__(self, weight: Tensor, spill: Spill):
        super().__init__()
        self._spill = spill
        self._weight = weight
        self._expert_bytes = weight.stride(0) * weight.element_size()
        self.rows: list[list[Tensor]] = [[] for _ in weight]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at the factors of a product of float tensors, and compute it."""
        if func in PRODUCTS and len(args) > 1 and not isinstance(args[1], QuantizedTensor):
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, weight: Tensor) -> None:
        expert, rest = divmod(weight.data_ptr() - self._weight.data_ptr(), self._expert_bytes)
        if rest or not 0 <= expert < len(self.rows):
            return
        if weight.shape == self._weight.shape:
            # All experts at once: for tokens that are not meant for it, an expert gets zeros.
            for number, tokens in enumerate(x):
                self._keep(number, tokens[tokens.any(dim=-1)])
        elif weight.numel() == self._weight[0].numel():
            self._keep(expert, x.reshape(-1, x.shape[-1]))

    def _keep(self, expert: int, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.rows[expert].append(copy_to(self._spill, x))


@contextlib.contextmanager
def one_by_one(module: nn.Module) -> Iterator[None]:
    """Make the models of Transformers in a module multiply by one expert after another, not by all at once."""
    models = [model for model in module.modules() if isinstance(model, PreTrainedModel)]
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
    """Return the hidden tensor, which is the first among the arguments, and the arguments without it."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return value, ((*args[:index], _HIDDEN, *args[index + 1 :]), kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return value, (args, {**kwargs, name: _HIDDEN})
    return None, (args, kwargs)


def _blocks(module: nn.Module, owners: set[nn.Module]) -> list[nn.Module]:
    """Return the elements of the outermost containers that hold any of the `owners`, and the owners in no container.

    If there is no such container, the module itself is the one block.
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


def _copied_once(value: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    """Return a copy of a value; a tensor or cache that came before gets the same copy again, which `copies` holds.

    The copy shows a cache as it came first. That is enough: a block reads only its own entries, which it makes itself.
    """
    if type(value) is dict:
        return {name: _copied_once(entry, copies) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied_once(entry, copies) for entry in value)
    _, earlier = copies.get(id(value), (None, None))
    if earlier is None or (isinstance(value, Tensor) and not torch.equal(earlier, value)):
        # The original is held too, so that no other object gets its id.
        copies[id(value)] = value, copied(value)
    return copies[id(value)][1]
