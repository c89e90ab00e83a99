"""The C libraries that an installation compiles: which there are, and that they are those of the sources."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent

hatchling = pytest.importorskip("hatchling.plugin.utils", reason="pip removes hatchling after an installation")
interface = pytest.importorskip("hatchling.builders.hooks.plugin.interface")
# As `pip install` loads it, which is not an import.
hook = hatchling.load_plugin_from_script(
    str(ROOT / "hatch_build.py"), "hatch_build.py", interface.BuildHookInterface, "build_hook"
)
hatch_build = SimpleNamespace(**hook.initialize.__globals__)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the package that holds nothing but its C sources."""
    for native in (ROOT / "hf_trainweights").rglob("native"):
        shutil.copytree(native, tmp_path / native.relative_to(ROOT), ignore=shutil.ignore_patterns("*.so*"))
    return tmp_path


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_installed_libraries_are_what_the_sources_give(sources: Path) -> None:
    compiled = hatch_build._compile(sources)
    assert compiled == [library.path for library in hatch_build.LIBRARIES]
    for path in compiled:
        found = (ROOT / path).read_bytes() if (ROOT / path).exists() else b""
        assert (sources / path).read_bytes() == found, "pip install -e . compiles it again"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_does_not_compile_is_left_out_alone(sources: Path) -> None:
    broken = hatch_build.LIBRARIES[0]
    (sources / broken.path.parent / "interface.c").write_text("no C", encoding="utf-8")
    shared = [library.path for library in hatch_build.LIBRARIES if library.path.parent == broken.path.parent]
    assert hatch_build._compile(sources) == [each.path for each in hatch_build.LIBRARIES if each.path not in shared]
    assert not any((sources / path).exists() for path in shared)


def test_without_a_compiler_nothing_is_compiled(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert hatch_build._compile(sources) == []
