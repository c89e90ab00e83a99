"""Modules that show torch.compile the plain tensors of their quantized weights.

A program is the graph of ops that torch.compile makes of a model's code; Dynamo traces the code. If an input of a
program is a tensor of a subclass, the program takes it apart into plain tensors at every call. That takes 3 us a
quantized weight, longer than a small product; a plain tensor takes a tenth of it. So a module that gets a quantized
weight also gets another class, a subclass of its class with a property for each parameter. The property returns the
parameter, as ever. Only while Dynamo traces, the program gets plain tensors, which are attributes of the module and
share the memory of the stored tensors, and makes a quantized weight of them (`make_in_program`). Gradients, autocast
and all ops are therefore those of the quantized weight. "Showing" a weight is to set these attributes.

No program keeps the tensors of a former weight, because each change of a weight shows it again:

- the module's `_parameters` is a dict that notices writes: FSDP2, accelerate and `torch.func` write to it directly;
- a weight knows its modules, because `weight.scale = ...` and `weight.data = ...` give it other stored tensors;
- `module.to(...)` and `load_state_dict` may exchange the insides of two weights by `torch.utils.swap_tensors`, so
  their methods show all weights of the module at the end.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import importlib.metadata
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import product_op
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# By name, the number of stored tensors of each parameter of a module; 0 for one that is not quantized.
Counts = tuple[tuple[str, int], ...]

_PACKAGE = "hf_trainweights"

# The names of the attributes that Dynamo reads begin with this.
_PREFIX = "_traced_"


class TracedModule(nn.Module):
    """A base of the classes that modules with quantized weights get; the other base is the class that they had."""

    # The class that the module had, and gets back with its last quantized weight.
    own_class: type[nn.Module]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with _showing_again(self):
            return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with _showing_again(self):
            super()._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        show_weights(replica)
        return replica

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__ or not isinstance(reduced[2], dict):  # type: ignore[attr-defined]
            return reduced
        state = {name: value for name, value in reduced[2].items() if not name.startswith(_PREFIX)}
        return _make_again, (self.own_class,), state | {"_parameters": dict(self._parameters)}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        watch_parameters(self)
        show_weights(self)


def _make_again(own_class: type[nn.Module]) -> nn.Module:
    """Make the module of a copy or a pickle, which shows its weights when it gets its state."""
    traced_class = _traced_class(own_class, ())
    return traced_class.__new__(traced_class)


class _TracedParameters(dict[str, Any]):
    """The parameters of a module that shows its weights again after each change of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def changed(self) -> None:
        """Show the module's weights, if these are still its parameters."""
        module = self._module()
        if module is not None and module.__dict__.get("_parameters") is self:
            show_weights(module)


def _and_show(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def write_and_show(parameters: _TracedParameters, *args: Any, **kwargs: Any) -> Any:
        result = write(parameters, *args, **kwargs)
        parameters.changed()
        return result

    # Dynamo interrupts its program for this function (a graph break), and reads the new attributes after it.
    return torch.compiler.disable(write_and_show)


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_TracedParameters, _name, _and_show(getattr(dict, _name)))


def watch_parameters(module: nn.Module) -> None:
    """Let a module show Dynamo the quantized weights that it gets from then on."""
    if type(module._parameters) is dict:
        module.__dict__["_parameters"] = _TracedParameters(module)


def show_weights(module: nn.Module) -> None:
    """Give a module the class and the attributes that show Dynamo the parameters that it has now."""
    own, own_class = module.__dict__, getattr(type(module), "own_class", type(module))
    parameters = own["_parameters"]
    names = [name for name in parameters if not hasattr(own_class, name) and f"{_PREFIX}{name}".isidentifier()]
    counts = tuple((name, _count(parameters[name])) for name in names)
    if not any(count for _, count in counts):
        counts = ()
    shown: dict[str, Any] = {}
    for name, count in counts if _change_class(module, own_class, counts) else ():
        weight = parameters[name]
        shown[f"{_PREFIX}{name}"] = _describe(weight.format, weight.dtype, weight.transposed) if count else weight
        if count:
            shown |= zip(_attributes(name, count), weight.held.aliases, strict=True)
            weight.modules.add(module)
    for name in [name for name in own if name.startswith(_PREFIX) and name not in shown]:
        del own[name]
    own |= shown


def _count(parameter: object) -> int:
    """Return the number of stored tensors of a quantized weight that can be shown; 0 for any other parameter."""
    return len(parameter.tensors) if type(parameter) is QuantizedTensor and not parameter.is_traced else 0


def _change_class(module: nn.Module, own_class: type[nn.Module], counts: Counts) -> bool:
    """Give a module the class for these parameters, and return whether it has it."""
    traced_class = _traced_class(own_class, counts) if counts else own_class
    # The class is left alone if another library has put its own on top. That of `fully_shard` derives from ours and
    # still shows the weights. That of a parametrized module is the one that PyTorch removes later, and it must find it.
    is_parametrized = "parametrizations" in vars(module)["_modules"]
    if not is_parametrized and (type(module) is own_class or "own_class" in vars(type(module))):
        # Python refuses to change the class of a module if the class has slots.
        with contextlib.suppress(TypeError):
            module.__class__ = traced_class
    return isinstance(module, traced_class)


@functools.cache
def _traced_class(own_class: type[nn.Module], counts: Counts) -> type[nn.Module]:
    """Return a subclass of `own_class` with a property for each of these parameters."""
    members: dict[str, Any] = {"own_class": own_class, "__doc__": own_class.__doc__}
    # People, Transformers and accelerate read names of classes.
    members |= {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    # Weights are shown all or none. Whether they are shown now, the attribute of the first quantized one tells: that of
    # another parameter may be None, as that of a missing bias is.
    first = next((name for name, count in counts if count), "")
    for name, count in counts:
        members |= {name: property(_getter(name, count, f"{_PREFIX}{first}")), f"{_PREFIX}{name}": None}
    make: Any = type(own_class)
    return make(own_class.__name__, (TracedModule, own_class), members)


def _attributes(name: str, count: int) -> list[str]:
    """Return the names of the attributes for the stored tensors of a weight."""
    return [f"{_PREFIX}{name}_{index}" for index in range(count)]


# Names are written into the code of each property. From variables of a closure, Dynamo would read them at every call.
_GETTER = """
def get(module):
    if torch.compiler.is_dynamo_compiling() and module.{switch} is not None and not torch.compiler.is_exporting():
        return {shown}
    return _read(module, {name!r})
"""


def _getter(name: str, count: int, switch: str) -> Callable[[nn.Module], Any]:
    """Return the function of a parameter's property. The attribute `switch` is None while no weight is shown."""
    shown = f"module.{_PREFIX}{name}"
    if count:
        stored = ", ".join(f"module.{attribute}" for attribute in _attributes(name, count))
        shown = f"make_in_program({shown}, {stored})"
    names: dict[str, Any] = {}
    exec(_GETTER.format(switch=switch, shown=shown, name=name), globals(), names)
    return names["get"]


def _read(module: nn.Module, name: str) -> Any:
    try:
        return module._parameters[name]
    except KeyError as error:
        raise AttributeError(name) from error  # Python asks `__getattr__` of nn.Module then


@torch.compiler.allow_in_graph
def make_in_program(description: str, *stored: Tensor) -> QuantizedTensor:
    """Return the weight of a description and stored tensors. Dynamo puts the call of this function into the program."""
    let_compilers_cache_programs(make_in_program, product_op.describe())
    form, dtype, transposed = _parse(description)
    held = Held(dict(zip(form.tensor_names, stored, strict=True)))
    return QuantizedTensor.from_held(held, form, form.shape_of(stored[0]), dtype, transposed)


@functools.cache
def let_compilers_cache_programs(function: Callable[..., Any], state: str) -> None:
    """Let PyTorch keep programs on disk that call a function, as long as the function computes the same.

    PyTorch does not see into a function that is allowed in its graphs. It keeps a program with such a call only if it
    is told a text that changes whenever the function does. It asks for it when it compiles, so the function itself
    calls this when it is traced; after the first time this does nothing.

    Args:
        function: The function, which is allowed in graphs.
        state: A text that changes with everything on which its result depends beside the arguments and the version of
            the package.
    """
    key, version = f"{function.__module__}.{function.__name__}", importlib.metadata.version(_PACKAGE)
    settings: Any = importlib.import_module("torch._inductor.config")
    with contextlib.suppress(AttributeError):  # another release of torch has another name
        # A new dict, because PyTorch does not see that one was written to.
        cacheable = {**settings.unsafe_marked_cacheable_functions, key: f"{version}, {state}"}
        settings.unsafe_marked_cacheable_functions = cacheable


@functools.lru_cache
def _describe(form: Format, dtype: torch.dtype, transposed: bool) -> str:
    return json.dumps([form.get_config(), str(dtype).removeprefix("torch."), transposed])


@functools.lru_cache
def _parse(description: str) -> tuple[Format, torch.dtype, bool]:
    config, dtype, transposed = json.loads(description)
    return get_format(config), getattr(torch, dtype), transposed


@contextlib.contextmanager
def _showing_again(module: nn.Module) -> Iterator[None]:
    """Let all modules that have the weights of a module show them again at the end."""
    owners = {module}
    for weight in module._parameters.values():
        if type(weight) is QuantizedTensor:
            owners |= set(weight.modules)
    yield
    for owner in owners:
        show_weights(owner)
