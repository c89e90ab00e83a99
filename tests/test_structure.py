"""The source itself: imports go one way, files and functions stay small, docstrings say what is raised."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the first of them parses all sources

PACKAGE, COMMAND = "hf_trainweights", "hf_trainweights_cli"
ROOT = Path(__file__).parent.parent

# The rooms: each may import those above it, never those below. The package's `__init__` imports any.
ROOMS = (
    "errors",  # what goes wrong
    "lazy",  # names that are imported when they are asked for
    "notebook",  # tables as HTML
    "native_library",  # functions in C, where they were compiled
    "formats",  # a float weight as plain tensors, and back
    "files",  # bytes on disk
    "kernels",  # products of plain tensors
    "tensor",  # the quantized weight
    "models",  # a Transformers model
    "cache",  # keys and values of attention
    "exports",  # layouts that others read
    "imports",  # layouts that others wrote
    "checkpoint",  # training state
    "inspection",  # what lies on disk
    "report",  # pictures of a model or a run
    "testing",  # contracts of formats and codecs, for tests alone
)
# Likewise the rooms of `models`, and below them the modules beside them: the doors, which import any.
MODEL_ROOMS = (
    "host",  # private names of Transformers
    "choosing",  # what becomes of each weight
    "loading",  # weights as they arrive
    "saving",  # files, the card, the Hub
    "budget",  # formats chosen for a limit
    "calibration",  # codes chosen with texts
)
# Likewise the rooms of `checkpoint`; and its layouts on disk know nothing of each other.
CHECKPOINT_ROOMS = (
    "codecs",  # a tensor as bytes
    "encoded",  # a file
    "planning",  # what a tensor is, and how it is stored
    "manifest",  # the files of a checkpoint
    "dcp",  # a directory of torch.distributed.checkpoint, read
    "run",  # what all checkpoints of a run share
    "whole",  # a checkpoint in whole files
    "sharded",  # a checkpoint of several ranks
    "zero",  # a checkpoint of DeepSpeed
    "directory",  # any of them: found, cleaned, made small or plain
    "loop",  # a loop of one's own
    "trainer",  # a Trainer
    "versions",  # finished models
)
MAY_IMPORT_TRANSFORMERS = {
    *("models", "exports", "imports", "report.texts", "checkpoint.trainer.callback"),
    *("cache.kv_cache", "cache.generation"),
}
# `.ci/run` does not repeat these tests on the oldest Transformers.
TESTS_WITHOUT_TRANSFORMERS = ("formats", "checkpoint/codecs")
# The modules of Transformers that its documentation shows. Names of any other, and these attributes, are private.
PUBLIC_TRANSFORMERS = {
    *("transformers", "transformers.pytorch_utils", "transformers.quantizers.auto", "transformers.quantizers.base"),
    *("transformers.trainer_utils", "transformers.utils", "transformers.utils.quantization_config"),
}
PRIVATE_ATTRIBUTES = {
    *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save", "_hf_peft_config_loaded"),
    *("all_tied_weights_keys", "get_modules_to_not_convert", "_weight_conversions", "quantization_operation"),
    *("_original_source_patterns", "_original_target_patterns", "scope_prefix", "base_model_prefix"),
    *("collected_tensors", "layer_targets", "get_expanded_tied_weights_keys"),
}
# The attribute that holds an entry's name. It is written to files, so it must be what the registry calls it.
REGISTRIES = {"formats": ("FORMATS", "name"), "checkpoint.codecs": ("CODECS", "codec_id")}
# Importing these takes seconds, for which `--help` should not wait.
SLOW_TO_IMPORT = {PACKAGE, "torch", "transformers"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

Definition = ast.FunctionDef | ast.ClassDef
TOP_LEVEL = {"__init__", "__main__", "diffusers", "distributed"}  # the last two: public names from any room
SOURCES = {
    ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
COMMAND_SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted((ROOT / COMMAND).rglob("*.py"))
}
ALL_SOURCES = SOURCES | COMMAND_SOURCES


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse(ALL_SOURCES[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> list[tuple[str, bool]]:
    """Return the dotted name of all that `module` imports, and whether not before a function is called."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = [PACKAGE, *module.split(".")][: -child.level] if child.level else []
                origin = ".".join([*parents, *([child.module] if child.module else [])])
                yield from ((f"{origin}.{alias.name}", lazy) for alias in child.names)
            else:
                yield from visit(child, lazy or isinstance(child, ast.FunctionDef) or for_types_alone(child))

    return list(visit(parse(module), lazy=False))


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def public(nodes: Iterable[ast.AST]) -> list[Definition]:
    return [node for node in nodes if isinstance(node, Definition) and not node.name.startswith("_")]


def raises(node: Definition) -> str:
    """Return the section of a docstring that says what is raised, empty if there is none."""
    return (ast.get_docstring(node) or "").partition("Raises:\n")[2]


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the names of the exceptions that leave `function` from its own raise statements."""
    tries = [node for node in ast.walk(function) if isinstance(node, ast.Try) and node.handlers]
    caught = {inner for node in tries for statement in node.body for inner in ast.walk(statement)}
    thrown = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node not in caught)
    called = (node.func if isinstance(node, ast.Call) else node for node in thrown)
    return {node.id for node in called if isinstance(node, ast.Name) and node.id[0].isupper()}


def room(dotted: str) -> str:
    return dotted.partition(".")[0]


def imported_modules(module: str) -> set[str]:
    """Return the modules of the package that `module` imports before a function is called."""
    names = {name.partition(".")[2] for name, lazy in imports(module) if not lazy and room(name) == PACKAGE}
    candidates = (
        (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__") for name in names
    )
    return {next(each for each in several if each in SOURCES) for several in candidates}


def test_imports_go_one_way() -> None:
    for module in SOURCES.keys() - TOP_LEVEL:
        ours = {room(name.removeprefix(f"{PACKAGE}.")) for name, _ in imports(module) if room(name) == PACKAGE}
        assert ours <= set(ROOMS[: ROOMS.index(room(module)) + 1]), module


def inner_imports(parent: str) -> Iterator[tuple[str, str, set[str]]]:
    """Return each module of a room's rooms, the one that it is in, and those that it imports from."""
    start = f"{PACKAGE}.{parent}."
    for module in (each for each in SOURCES if each.startswith(f"{parent}.") and each != f"{parent}.__init__"):
        used = {room(name.removeprefix(start)) for name, _ in imports(module) if name.startswith(start)}
        yield module, module.split(".")[1], used


def test_imports_between_the_rooms_of_checkpoints_go_one_way() -> None:
    for module, own, used in inner_imports("checkpoint"):
        others = {"whole", "sharded", "zero"} - {own} if own in ("sharded", "zero") else set()
        allowed = {*CHECKPOINT_ROOMS[: CHECKPOINT_ROOMS.index(own) + 1]} - others
        assert used <= allowed, module


def test_imports_between_the_rooms_of_models_go_one_way() -> None:
    for module, own, used in inner_imports("models"):
        if own in MODEL_ROOMS:
            assert used <= {*MODEL_ROOMS[: MODEL_ROOMS.index(own) + 1]}, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imported_modules(module) - {module} for module in SOURCES if module not in TOP_LEVEL}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_transformers_is_imported_only_where_the_table_says() -> None:
    importing = {module for module in SOURCES if any(room(name) == "transformers" for name, _ in imports(module))}
    assert {module for module in importing if not {room(module), module} & MAY_IMPORT_TRANSFORMERS} == set()


@pytest.mark.parametrize("folder", TESTS_WITHOUT_TRANSFORMERS)
def test_tests_that_no_version_of_transformers_changes_import_nothing_of_it(folder: str) -> None:
    files = list((ROOT / "tests" / folder).rglob("*.py"))
    assert files
    for path in files:
        source = path.read_text(encoding="utf-8")
        assert re.findall(r"^\s*(?:from|import) (?:transformers|accelerate|architectures)", source, re.MULTILINE) == []


def test_private_names_of_transformers_are_used_by_the_host_alone() -> None:
    for module in SOURCES:
        if module.startswith("models.host."):
            continue
        origins = {name if name == "transformers" else name.rpartition(".")[0] for name, _ in imports(module)}
        nodes = list(ast.walk(parse(module)))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        private = {origin for origin in origins if room(origin) == "transformers"} - PUBLIC_TRANSFORMERS
        assert private | names & PRIVATE_ATTRIBUTES == set(), module


def test_pytest_is_imported_by_the_contracts_alone() -> None:
    assert {room(module) for module in SOURCES for name, _ in imports(module) if room(name) == "pytest"} == {"testing"}


def test_triton_is_imported_when_its_kernels_are_first_used() -> None:
    kernels = {"kernels.triton_attention", "kernels.triton_products"}
    used = {(module, name.split(".")[0]) for module in SOURCES for name, _ in imports(module)}
    assert {module for module, name in used if name == "triton"} == kernels
    assert [module for module in SOURCES for name, _ in imports(module) if any(each in name for each in kernels)] == []


def test_the_command_imports_the_library_only_when_it_runs() -> None:
    work = {each for each in COMMAND_SOURCES if each.startswith(f"{COMMAND}.demo.") and not each.endswith(".command")}
    shell = COMMAND_SOURCES.keys() - work
    at_once = {(module, name) for module in shell for name, lazy in imports(module) if not lazy}
    assert {pair for pair in at_once if pair[1].split(".")[0] in SLOW_TO_IMPORT} == set()
    assert {pair for pair in at_once if pair[1].rpartition(".")[0] in work} == set()


def test_the_library_does_not_need_the_command() -> None:
    used = {(module, name) for module in SOURCES for name, _ in imports(module) if name.split(".")[0] == COMMAND}
    assert used == {("__main__", f"{COMMAND}.main.main")}


def test_modules_and_functions_are_short() -> None:
    for module, path in ALL_SOURCES.items():
        functions = [node for node in ast.walk(parse(module)) if isinstance(node, ast.FunctionDef)]
        assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_MODULE_LINES, module
        long = [node.name for node in functions if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES]
        assert long == [], module


def test_every_public_name_has_a_docstring() -> None:
    for module in SOURCES:
        assert [node.name for node in public(parse(module).body) if not ast.get_docstring(node)] == [], module


def test_docstrings_of_exported_names_say_what_is_raised() -> None:
    exported, found = set(import_module(PACKAGE).__all__), set()
    values = [getattr(import_module(PACKAGE), name) for name in exported]
    places = {(value.__module__, value.__name__) for value in values}
    for module in SOURCES:
        dotted = f"{PACKAGE}.{module}"
        for node in (node for node in public(parse(module).body) if (dotted, node.name) in places):
            found.add(node.name)
            methods = public(node.body) if isinstance(node, ast.ClassDef) else [node]
            functions = [method for method in methods if isinstance(method, ast.FunctionDef)]
            unsaid = [(each.name, error) for each in functions for error in raised(each) if error not in raises(each)]
            silent = [node.name for each in functions if each is node and each.args.args and not raises(each)]
            assert unsaid + silent == [], module
    assert len(found) > len(exported) / 2  # some show themselves under the package's name


@pytest.mark.parametrize("module", [name for name in REGISTRIES if f"{name}.__init__" in SOURCES])
def test_registry_keys_are_the_names_of_the_entries(module: str) -> None:
    registry_name, attribute = REGISTRIES[module]
    registry = getattr(import_module(f"{PACKAGE}.{module}"), registry_name)
    assert registry
    assert [getattr(entry, attribute) for entry in registry.values()] == list(registry)
