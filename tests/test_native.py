"""The C libraries that an installation compiles: which there are, and that they are those of the sources."""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_trainweights.checkpoint.codecs.coding import compiled as compiled_levels
from hf_trainweights.files import byte_planes
from hf_trainweights.formats import compiled_search
from hf_trainweights.kernels import compiled

ROOT = Path(__file__).parent.parent

hatchling = pytest.importorskip("hatchling.plugin.utils", reason="pip removes hatchling after an installation")
interface = pytest.importorskip("hatchling.builders.hooks.plugin.interface")
# As `pip install` loads it, which is not an import.
hook = hatchling.load_plugin_from_script(
    str(ROOT / "hatch_build.py"), "hatch_build.py", interface.BuildHookInterface, "build_hook"
)
hatch_build = SimpleNamespace(**hook.initialize.__globals__)
X86, ARM = (hatch_build.LIBRARIES[each] for each in (("linux", "x86_64"), ("linux", "aarch64")))


def use_machine(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the package that holds nothing but its C sources."""
    for native in (ROOT / "hf_trainweights").rglob("native"):
        shutil.copytree(native, tmp_path / native.relative_to(ROOT), ignore=shutil.ignore_patterns("*.so*"))
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_installed_libraries_are_what_the_sources_give(sources: Path) -> None:
    compiled = hatch_build._compile(sources)
    assert compiled == [library.path for library in hatch_build.LIBRARIES[sys.platform, platform.machine()]]
    for path in compiled:
        found = (ROOT / path).read_bytes() if (ROOT / path).exists() else b""
        assert (sources / path).read_bytes() == found, "pip install -e . compiles it again"


PRODUCTS = "avx2.so, avx_vnni.so, avx512.so, avx512_bf16.so, amx.so"

# A compiler that is called like clang and refuses what it refuses. Objects and libraries hold how it was called.
CLANG = """
for output; do :; done
case " $* " in *" -fno-tree-pre "*) echo "error: unknown argument: '-fno-tree-pre'" >&2; exit 1 ;; esac
if [ "$1" = -shared ]; then
    shift
    while [ "$1" != -o ]; do cat "$1"; shift; done > "$output"
    exit
fi
echo "$*" > "$output"
case " $* " in *" -fopenmp "*) echo __kmpc_fork_call >> "$output" ;; esac
while [ "$1" != -c ]; do shift; done
if grep -q "no C" "$2"; then echo "in file x.c:" >&2; echo "x.c:1: error: no C" >&2; exit 1; fi
"""


@pytest.fixture
def clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `CC` name that compiler, in two words, on Linux and x86-64."""
    use_machine("linux", "x86_64", monkeypatch)
    (tmp_path / "of two words").write_text(CLANG, encoding="utf-8")
    monkeypatch.setenv("CC", f"sh '{tmp_path / 'of two words'}'")


@pytest.mark.slow
@pytest.mark.usefixtures("clang")
def test_a_compiler_with_threads_of_its_own_makes_libraries_of_one_thread(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hatch_build._compile(sources) == [library.path for library in X86]
    assert capsys.readouterr().err == (
        f"hf_trainweights: compiled {PRODUCTS}, op.so, search.so, levels.so, planes.so ({PRODUCTS}, search.so: on one "
        "thread, because this compiler does not take its threads from PyTorch's OpenMP library)\n"
    )
    for library in X86:
        calls = (sources / library.path).read_text()
        assert set(library.flags) - set(calls.split()) <= {"-fopenmp", "-fno-tree-pre"}
        # PyTorch's library has no such functions, and a library that asks for them does not load.
        assert "__kmpc" not in calls


@pytest.mark.slow
@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64")])
def test_on_arm_there_is_one_library_of_products(
    system: str, machine: str, sources: Path, clang: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(system, machine, monkeypatch)
    assert hatch_build._compile(sources) == [library.path for library in ARM]
    assert ARM[0].path.name == "neon.so"
    assert "-march=armv8.2-a+dotprod" in (sources / ARM[0].path).read_text()


def test_a_compiler_without_openmp_makes_libraries_of_one_thread(
    sources: Path, clang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_machine("darwin", "arm64", monkeypatch)
    refusing = 'case " $* " in *" -fopenmp "*) echo "error: unsupported option" >&2; exit 1 ;; esac\n'
    (tmp_path / "of two words").write_text(refusing + CLANG, encoding="utf-8")
    assert hatch_build._compile(sources) == [library.path for library in ARM]
    assert "(neon.so, search.so: on one thread" in capsys.readouterr().err
    assert "-fopenmp" not in (sources / ARM[0].path).read_text()


def test_elsewhere_nothing_is_compiled(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_machine("darwin", "x86_64", monkeypatch)
    assert hatch_build._compile(sources) == []
    assert "neither Linux on x86-64 or ARM nor macOS on ARM" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("clang")
def test_what_does_not_compile_is_left_out_alone_and_named(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = X86[0]
    (sources / broken.path.parent / "interface.c").write_text("no C", encoding="utf-8")
    shared = [library.path for library in X86 if "interface.c" in library.sources]
    assert hatch_build._compile(sources) == [each.path for each in X86 if each.path not in shared]
    assert not any((sources / path).exists() for path in shared)
    assert capsys.readouterr().err == (
        f"hf_trainweights: compiled op.so, search.so, levels.so, planes.so ({PRODUCTS}: x.c:1: error: no C; search.so: "
        "on one thread, because this compiler does not take its threads from PyTorch's OpenMP library)\n"
    )


def test_without_a_compiler_nothing_is_compiled(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert hatch_build._compile(sources) == []
    assert capsys.readouterr().err == "hf_trainweights: compiled nothing (there is no C compiler no-such-compiler)\n"


@pytest.mark.parametrize(
    ("native", "number"),
    [
        ("kernels", compiled.ABI),
        ("formats", compiled_search._ABI),
        ("checkpoint/codecs", compiled_levels._ABI),
        ("files", byte_planes._ABI),
    ],
)
def test_the_number_of_an_interface_is_that_of_its_sources(native: str, number: int) -> None:
    sources = (ROOT / "hf_trainweights" / native / "native").iterdir()
    texts = [path.read_text(encoding="utf-8") for path in sources if path.suffix in (".c", ".h")]
    found = [each for text in texts for each in re.findall(r"#define ABI (\d+)|int abi\(void\) { return (\d+)", text)]
    assert ["".join(each) for each in found] == [str(number)]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_clang_makes_every_library_with_the_names_that_gcc_gives(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that is compiled for several kinds of CPU may get another name, by which Python does not find it."""
    monkeypatch.setenv("CC", "clang")
    paths = hatch_build._compile(sources)
    assert paths == [library.path for library in hatch_build.LIBRARIES[sys.platform, platform.machine()]]
    for path in paths:
        assert functions_of(ROOT / path) == functions_of(sources / path), path


def functions_of(library: Path) -> set[str]:
    """Return the functions that a library exports, without those that a compiler adds by itself."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    found = {line.split()[-1] for line in listed.splitlines()}
    return {name for name in found if not name.startswith("_") and "." not in name}
