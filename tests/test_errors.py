"""Errors: each says four things, is the builtin a caller would catch, and survives a process boundary."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest

from hf_trainweights import TrainWeightsError, errors
from hf_trainweights.errors import did_you_mean

BUILTINS = {
    "ConfigError": ValueError,
    "QuantizationError": ValueError,
    "UnsupportedError": NotImplementedError,
    "CorruptFileError": ValueError,
    "SaveError": OSError,
    "MissingAnchorError": FileNotFoundError,
    "UnstorableError": TypeError,
}
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, TrainWeightsError) and cls is not TrainWeightsError
]


def make(cls: type[TrainWeightsError]) -> TrainWeightsError:
    return cls("model/config.json", "version 1", "version 2", "Install a newer release.")


def test_every_error_is_in_the_table() -> None:
    assert {cls.__name__ for cls in CLASSES} == set(BUILTINS)


@pytest.mark.parametrize("name", BUILTINS)
def test_each_error_is_the_builtin_a_caller_would_expect(name: str) -> None:
    for caught in (BUILTINS[name], TrainWeightsError):
        with pytest.raises(caught, match="expected version 1, found version 2"):
            raise make(getattr(errors, name))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_message_says_where_what_and_what_next(cls: type[TrainWeightsError]) -> None:
    error = make(cls)
    assert str(error) == "model/config.json: expected version 1, found version 2. Install a newer release."
    assert (error.where, error.expected, error.found, error.next_step) == (
        "model/config.json",
        "version 1",
        "version 2",
        "Install a newer release.",
    )


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_cross_process_boundaries_whole(cls: type[TrainWeightsError], protocol: int) -> None:
    error = make(cls)
    for copied in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is cls
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


@pytest.mark.parametrize(
    ("found", "next_step"),
    [("in8", 'Did you mean "int8"?'), ("gptq", "Choose one."), (8, "Choose one."), (None, "Choose one.")],
)
def test_the_nearest_known_name_is_the_next_step(found: object, next_step: str) -> None:
    assert did_you_mean(found, ["int8", "int4"], "Choose one.") == next_step


def _refuses_by_any_error(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler of Exception ends by raising another error from it."""
    is_any = isinstance(handler.type, ast.Name) and handler.type.id == "Exception"
    return is_any and isinstance(handler.body[-1], ast.Raise) and handler.body[-1].cause is not None


def test_no_warning_becomes_a_refusal() -> None:
    """Filters of a caller may raise the warnings of other libraries, which say nothing of a file or a model."""
    refusals, faults = 0, []
    for path in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            for number, handler in enumerate(handlers):
                if _refuses_by_any_error(handler):
                    refusals += 1
                    before = [
                        name for other in handlers[:number] for name in ast.walk(other) if isinstance(name, ast.Name)
                    ]
                    faults += [] if "Warning" in {name.id for name in before} else [f"{path.name}:{handler.lineno}"]
    assert faults == []
    assert refusals > 10
