"""What an export is made from: a model, or the directory of a saved one."""

from __future__ import annotations

import os

from torch import nn

from hf_trainweights.models.loading.saved_models import load_saved


def model_of(source: nn.Module | str | os.PathLike[str]) -> nn.Module:
    """Return a model as it is, or the one that was saved to a directory, in the dtypes it was saved in."""
    return source if isinstance(source, nn.Module) else load_saved(source)
