"""Settings every test runs under: offline, one thread, quiet; and which cases the default run leaves out."""

import gc
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before transformers and huggingface_hub are imported: that is when both read their environment.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from covering import covering

if TYPE_CHECKING:
    from stock_reader import StockReader
    from xdist.scheduler import WorkStealingScheduling


def pytest_collection() -> None:
    """Prepare what tests import. A process that only hands out tests does not come here: it need not wait for it.

    The garbage collector would look through all modules again and again while tests are collected, and find nothing.
    """
    gc.disable()
    import torch
    import transformers

    # Tiny tensors gain nothing from threads, and test processes side by side lose from them.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    # PyTorch's build with CUDA pretends to have a GPU once a program is traced. A first backward after that would start
    # a thread for it, and backward would fail in all forks of this process.
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "WorkStealingScheduling | None":
    """Give each process neighbours, so that few build what the tests of a module share, unless one chose otherwise."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def pytest_configure() -> None:
    """Have temporary directories in memory, where there is enough of it.

    Saves force what they write to the disk, for which tests would wait as long as for all else that they do. What a
    disk keeps when the machine stops is simulated.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


@pytest.hookimpl(tryfirst=True)  # before pytest picks tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive what `@pytest.mark.covering(strength)` leaves out of a function's cases."""
    functions: defaultdict[tuple[Path, object, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and isinstance(item, pytest.Function) and not item.get_closest_marker("exhaustive"):
            functions[item.path, item.cls, item.originalname, *mark.args].append(item)
    for (*_, strength), cases in functions.items():
        taken = set(covering([_values(case) for case in cases], strength))
        for number, case in enumerate(cases):
            if number not in taken:
                case.add_marker(pytest.mark.exhaustive)


def _values(case: pytest.Function) -> list[tuple[int, ...]]:
    """Return which values a case has, one entry for each `parametrize` and each fixture with parameters."""
    identities = {name: id(value) for name, value in case.callspec.params.items()}  # values need not be hashable
    names_of = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [re.split(r"\s*,\s*", names) if isinstance(names, str) else list(names) for names in names_of]
    apart = identities.keys() - {name for names in together for name in names}
    return [tuple(identities[name] for name in names) for names in [*together, *([name] for name in sorted(apart))]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip what adds adapters where Transformers refuses the installed PEFT: 5.24 asks for one that is not released."""
    try:
        return (yield)
    except ValueError as error:
        if "The version of PEFT you are using is not compatible" in str(error):
            pytest.skip(str(error))
        raise


def pytest_collection_finish() -> None:
    """Take modules and tests out of what the garbage collector looks through: a quarter of a second, many times."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the models that README, docs and docstrings speak of; tests copy or link them."""
    from sample_directories import write_sample_directories  # it imports the package, which few tests need this early

    directory = tmp_path_factory.mktemp("samples")
    write_sample_directories(directory)
    return directory


@pytest.fixture(scope="session")
def reader() -> Iterator["StockReader"]:
    """Yield the process that reads models without this package."""
    from stock_reader import stock_reader  # it needs what the package needs

    with stock_reader() as reader:
        yield reader


@pytest.fixture
def without_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways of an installation without a C compiler."""
    from cpus import use_library

    from hf_trainweights.checkpoint.codecs.coding import compiled as codecs
    from hf_trainweights.files import byte_planes
    from hf_trainweights.formats import compiled_search as search

    use_library(None, monkeypatch)
    for module, load in ((codecs, "library"), (search, "_load"), (byte_planes, "compiled")):
        monkeypatch.setattr(module, load, lambda: None)
