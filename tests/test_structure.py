"""The source itself: imports go one way, files and functions stay small, docstrings say what is raised."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE, COMMAND = "hf_trainweights", "trainweights_cli"
ROOT = Path(__file__).parent.parent

# A line may import itself and the lines above it, never those below. The package's `__init__` imports any.
LAYERS = [
    {"errors"},
    {"formats"},
    {"kernels"},
    {"identity"},
    {"quantized_tensor"},
    {"quantized_products"},
    {"quantized_ops"},
    {"state_dict"},
    {"weight_files", "weight_digests"},
    {"placeholders"},
    {"config"},
    {"selection"},
    {"modules"},
    {"conversion"},
    {"model_card"},
    {"hub"},
    {"saving"},
    {"quantizer"},
    {"quantize"},
    {"model_directory"},
    {"inspection", "model_difference"},
    {"compressed_tensors"},
    {"export"},
    {"demo_model"},
    {"demo"},
]
CHECKPOINT_LAYERS = [
    {"codecs"},
    {"storages"},
    {"structure"},
    {"atomic"},
    {"anchors", "manifest"},
    {"layout"},
    {"encoded"},
    {"encode"},
    {"policy"},
    {"buffers", "discovery", "module_state"},
    {"plain_weights"},
    {"anchoring"},
    {"store"},
    {"inplace"},
    {"contents"},
    {"difference"},
    {"state"},
    {"manager", "versions"},
    {"callback"},
    {"__init__"},
]
CHECKPOINT_MAY_IMPORT = {"errors", "formats", "quantized_tensor", "state_dict", "weight_digests"}
MAY_IMPORT_CHECKPOINT = {"inspection", "model_difference"}
MAY_IMPORT_TRANSFORMERS = {
    "config",
    "selection",
    "conversion",
    "model_card",
    "saving",
    "quantizer",
    "quantize",
    "model_directory",
    "compressed_tensors",
    "export",
    "demo_model",
    "demo",
    "checkpoint.callback",
}
# These work without Transformers, so they import it only inside the function that needs it.
MAY_IMPORT_TRANSFORMERS_LAZILY = {"modules"}
# The attribute that holds an entry's name. It is written to files, so it must be what the registry calls it.
REGISTRIES = {"formats": ("FORMATS", "name"), "checkpoint.codecs": ("CODECS", "codec_id")}
# Importing these takes seconds, for which `--help` should not wait.
SLOW_TO_IMPORT = {PACKAGE, "torch", "transformers"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

Definition = ast.FunctionDef | ast.ClassDef
TOP_LEVEL = {"__init__", "__main__"}
SOURCES = {
    ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
COMMAND_SOURCES = {f"{COMMAND}.{path.stem}": path for path in sorted((ROOT / COMMAND).glob("*.py"))}
ALL_SOURCES = SOURCES | COMMAND_SOURCES


def parse(module: str) -> ast.Module:
    return ast.parse(ALL_SOURCES[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Yield the dotted name of all that `module` imports, and whether not before a function is called."""

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

    return visit(parse(module), lazy=False)


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


def layer(dotted: str) -> str:
    """Return the layer of a module: `formats.int8` is in `formats`, `checkpoint.store` in itself."""
    parts = dotted.split(".")
    return ".".join(parts[:2]) if parts[0] == "checkpoint" else parts[0]


def allowed(importer: str) -> set[str]:
    """Return the layers that the layer `importer` may import."""
    checkpoint = [{f"checkpoint.{name}" for name in line} for line in CHECKPOINT_LAYERS]
    lines, others = (
        (checkpoint, CHECKPOINT_MAY_IMPORT)
        if importer.startswith("checkpoint.")
        else (LAYERS, set().union(*checkpoint) if importer in MAY_IMPORT_CHECKPOINT else set())
    )
    places = [place for place, line in enumerate(lines) if importer in line]
    assert places, f"add {importer} to the table at the top of {__file__}"
    return set().union(others, *lines[: places[0] + 1])


@pytest.mark.parametrize("module", [name for name in SOURCES if name not in TOP_LEVEL])
def test_imports_go_one_way(module: str) -> None:
    ours = [name for name, _ in imports(module) if name.split(".")[0] == PACKAGE]
    assert {layer(name.removeprefix(f"{PACKAGE}.")) for name in ours} <= allowed(layer(module))


@pytest.mark.parametrize("module", SOURCES)
def test_transformers_is_imported_only_where_the_table_says(module: str) -> None:
    lazy = {lazily for name, lazily in imports(module) if name.split(".")[0] == "transformers"}
    if layer(module) in MAY_IMPORT_TRANSFORMERS_LAZILY:
        assert lazy <= {True}
    elif layer(module) not in MAY_IMPORT_TRANSFORMERS | TOP_LEVEL:
        assert lazy == set()


def test_triton_is_imported_when_its_kernels_are_first_used() -> None:
    kernels = "kernels.triton_products"
    used = {(module, name.split(".")[0]) for module in SOURCES for name, _ in imports(module)}
    assert {module for module, name in used if name == "triton"} == {kernels}
    assert [module for module in SOURCES for name, _ in imports(module) if kernels in name] == []


@pytest.mark.parametrize("module", COMMAND_SOURCES)
def test_the_command_imports_the_library_only_when_it_runs(module: str) -> None:
    assert {name for name, lazy in imports(module) if name.split(".")[0] in SLOW_TO_IMPORT and not lazy} == set()


@pytest.mark.parametrize("module", SOURCES)
def test_the_library_does_not_need_the_command(module: str) -> None:
    used = {name for name, _ in imports(module) if name.split(".")[0] == COMMAND}
    assert used == ({f"{COMMAND}.main.main"} if module == "__main__" else set())


@pytest.mark.parametrize("module", ALL_SOURCES)
def test_modules_and_functions_are_short(module: str) -> None:
    lines = ALL_SOURCES[module].read_text(encoding="utf-8").splitlines()
    functions = [node for node in ast.walk(parse(module)) if isinstance(node, ast.FunctionDef)]
    assert len(lines) < MAX_MODULE_LINES
    assert [node.name for node in functions if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("module", SOURCES)
def test_docstrings_say_what_is_raised(module: str) -> None:
    top = public(parse(module).body)
    methods = [method for node in top if isinstance(node, ast.ClassDef) for method in public(node.body)]
    functions = [node for node in top + methods if isinstance(node, ast.FunctionDef)]
    unsaid = [(node.name, error) for node in functions for error in raised(node) if error not in raises(node)]
    exported = {name.rpartition(".")[2] for name, _ in imports("__init__")}
    silent = [node.name for node in functions if node.name in exported and node.args.args and not raises(node)]
    assert [node.name for node in top if not ast.get_docstring(node)] == []
    assert unsaid == []
    assert silent == []


@pytest.mark.parametrize("module", [name for name in REGISTRIES if f"{name}.__init__" in SOURCES])
def test_registry_keys_are_the_names_of_the_entries(module: str) -> None:
    registry_name, attribute = REGISTRIES[module]
    registry = getattr(import_module(f"{PACKAGE}.{module}"), registry_name)
    assert registry
    assert [getattr(entry, attribute) for entry in registry.values()] == list(registry)
