"""README and docs say what was measured, point to files that exist, their Python parses, and the picture is true."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_trainweights.formats import FORMATS
from hf_trainweights_cli.main import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_trainweights"
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
IDS = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_tables_are_those_of_the_result_files(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = path.read_text(encoding="utf-8")
    assert tables.filled(text) == text


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def anchors(path: Path) -> set[str]:
    """Returns the anchors that the documentation's site gives the headings of a document."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    )
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_anchors_of_links_are_headings(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in anchors(path.parent / link[0] if link[0] else path)] == []


def test_each_generated_table_is_in_one_document() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = "\n".join(path.read_text(encoding="utf-8") for path in tables.DOCUMENTS)
    assert {name: text.count(f"<!-- {name}: ") for name in tables.TABLES if text.count(f"<!-- {name}: ") != 1} == {}


# A page is read on a few screens, and leads to others for measurements, files and reasons.
MOST_LINES = 200
# The one page that is longer: a specification, from which a reader of all formats is written.
SPECIFICATION = ROOT / "docs" / "format.md"


@pytest.mark.parametrize(
    "path", [path for path in (ROOT / "docs").rglob("*.md") if path != SPECIFICATION], ids=lambda path: path.stem
)
def test_a_page_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_python_examples_parse(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("room", ["", "checkpoint", "distributed", "exports", "formats"])
def test_the_reference_has_every_public_name(room: str) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    public = importlib.import_module(".".join(filter(None, ("hf_trainweights", room)))).__all__
    assert set(public) - {"TrainWeightsError"} - documented == set()  # errors have a page of their own


# Folders whose files a document may name; the package's own also by their path within it.
FOLDERS = {path.name for parent in (ROOT, PACKAGE) for path in parent.iterdir() if path.is_dir()} | {"native"}
FOLDERS -= {"build", "dist"}  # these are made
EXAMPLES = {"hf_trainweights/formats/float8_e5m2.py", "models/1.2.0/model.torchscript.pt"}  # a reader makes these
OF_OTHERS = {"tests/test_custom_models.py", "tests/test_quantization.py"}  # those of PEFT


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_code_that_a_document_names_exists(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = [span for span in re.findall(r"`([^`\n]+)`", text) if not _exists(span)]
    assert [span for span in missing if span not in EXAMPLES | OF_OTHERS] == []


def _exists(span: str) -> bool:
    """Return whether a file, module or constant that code in a text names is there; True for any other code."""
    if (file := re.fullmatch(r"(\w+)(?:/[\w.]+)+/?", span)) and file[1] in FOLDERS:
        homes = (ROOT, PACKAGE, *(native.parent for native in PACKAGE.rglob("native")))
        return any((home / f"{span.rstrip('/')}{suffix}").exists() for home in homes for suffix in ("", ".py"))
    if constant := re.fullmatch(r"(\w+)\.(_?[A-Z][A-Z0-9_]+)", span):
        modules = PACKAGE.rglob(f"{constant[1]}.py")
        return any(re.search(rf"\b{constant[2]}\b", module.read_text(encoding="utf-8")) for module in modules)
    if name := re.match(r"hf_trainweights(?:\.\w+)+", span):
        try:
            pkgutil.resolve_name(name[0])
        except (ImportError, AttributeError):
            return False
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_the_specification_has_each_format(name: str) -> None:
    assert name in SPECIFICATION.read_text(encoding="utf-8"), "describe how a reader dequantizes it"


@pytest.mark.parametrize("page", ["measured/checkpoints", "distributed"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(tests/\S+\.py)::(\w+)", text))
    assert len(named) > 5
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert missing == []


def test_the_readme_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt . && trainweights demo" in text
    assert 'pip install -c constraints.txt -e ".[test]" && pytest' in text


def commands_and_options() -> set[str]:
    """Return what the command line takes: each command with the names of those above it, and each option."""

    def visit(command: Any, path: str) -> Iterator[str]:
        for parameter in command.params:
            if parameter.param_type_name == "option" and path != "demo":
                yield max(parameter.opts, key=len)
        for name, inner in getattr(command, "commands", {}).items():
            yield f"{path} {name}".strip()
            yield from visit(inner, f"{path} {name}".strip())

    return set(visit(typer.main.get_command(app), ""))


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    pages = [ROOT / "docs" / "cli.md", *(ROOT / "docs" / "cli").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    known = commands_and_options()
    assert {name for name in known if name.startswith("--") and f"`{name}" not in text} == set()
    commands = {name for name in known if not name.startswith("--")}
    assert {name for name in commands if " " not in name and f"\n## {name}\n" not in text} == set()
    inner = {name.rpartition(" ")[2] for name in commands if " " in name}
    assert {name for name in inner if f"| `{name} " not in text} == set()
    said = set(re.findall(r"`(--[a-z-]+)", text))
    assert said - known == {"--help"}


def imports_between_rooms() -> set[tuple[str, str]]:
    """Return each room, and the command, with every other room that its modules import."""
    package = ROOT / "hf_trainweights"
    rooms = {path.stem for path in package.iterdir() if path.is_dir() or path.stem == "errors"}
    files = [(path.relative_to(package).parts[0].removesuffix(".py"), path) for path in package.rglob("*.py")]
    files += [("hf_trainweights_cli", path) for path in (ROOT / "hf_trainweights_cli").rglob("*.py")]
    pattern = re.compile(r"^ *from hf_trainweights(?:\.| import )(\w+)", re.MULTILINE)
    found = {(room, name) for room, path in files for name in pattern.findall(path.read_text(encoding="utf-8"))}
    return {(room, name) for room, name in found if room in {*rooms, "hf_trainweights_cli"} and name in rooms - {room}}


def test_the_picture_of_the_rooms_shows_who_imports_whom() -> None:
    picture = (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
    arrows = set(re.findall(r'id="(\w+)-imports-(\w+)"', picture))
    imports = imports_between_rooms()
    named = set(re.findall(r'class="name"[^>]*>(\w+)<', picture))
    assert {room for pair in imports for room in pair} <= named

    follows = arrows | {(room, "errors") for room in named}  # as the picture says of errors
    for _ in named:
        follows |= {(first, last) for first, middle in follows for start, last in follows if middle == start}
    assert imports - follows == set()
    # The command asks the package itself for what it does not import from a room.
    assert {(room, name) for room, name in arrows - imports if room != "hf_trainweights_cli"} == set()
