"""Settings every test runs under: offline, one thread, quiet; and which tests are slow."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before transformers and huggingface_hub are imported: that is when both read their environment.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from slow_tests import mark_slow

# Tiny tensors gain nothing from threads, and test processes side by side lose from them.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.hookimpl(tryfirst=True)  # before pytest picks tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the models that README, docs and docstrings speak of; tests copy or link them."""
    from sample_directories import write_sample_directories  # it imports the package, which few tests need this early

    directory = tmp_path_factory.mktemp("samples")
    write_sample_directories(directory)
    return directory


@pytest.fixture
def without_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the ways of an installation without a C compiler."""
    from hf_trainweights.checkpoint.codecs import compiled as codecs
    from hf_trainweights.files import byte_planes
    from hf_trainweights.kernels import compiled

    def forget() -> None:
        compiled.find.cache_clear()
        compiled.most_rows.cache_clear()

    for module, load in ((compiled, "_load"), (codecs, "_load"), (byte_planes, "compiled")):
        monkeypatch.setattr(module, load, lambda: None)
    forget()
    yield
    monkeypatch.undo()
    forget()
