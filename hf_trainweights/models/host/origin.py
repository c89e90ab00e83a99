"""Where a model of Transformers was loaded from."""

from __future__ import annotations

from torch import nn


def model_origin(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the directory or name on the Hub that a model's weights came from, and the commit; None where unknown.

    Transformers 5.17 keeps the commit, 5.23 does not.

    Examples:
        >>> model_origin(nn.Linear(1, 1))
        (None, None)
    """
    get_base_model = getattr(model, "get_base_model", None)
    config = getattr(get_base_model() if callable(get_base_model) else model, "config", None)
    name, commit = (getattr(config, key, None) for key in ("_name_or_path", "_commit_hash"))
    return (name if isinstance(name, str) and name else None), (commit if isinstance(commit, str) else None)
