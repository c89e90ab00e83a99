"""The names under which loaders look for weights."""

from __future__ import annotations

import re

# model.safetensors, model-00001-of-00002.safetensors, model.safetensors.index.json, each with .variant before the end
# of its stem; the same for pytorch_model.bin.
_WEIGHT_FILE = re.compile(
    r"(?P<family>model|pytorch_model)(?:\.(?P<variant>[^.]+?))?(?:-\d{5}-of-\d{5})?\.(?P<kind>safetensors|bin)"
    r"(?:\.index(?:\.(?P<index_variant>[^.]+))?\.json)?"
)


def is_weight_file(name: str, variant: str | None = None) -> bool:
    """Return whether a file name is one that Transformers looks for weights under, shards and indices included.

    Args:
        name: A file name without its directory.
        variant: The variant whose files are meant; None for those without.

    Example:
        >>> is_weight_file("model-00001-of-00002.safetensors"), is_weight_file("model.fp16.safetensors")
        (True, False)
    """
    match = _WEIGHT_FILE.fullmatch(name)
    return match is not None and (match["variant"] or match["index_variant"]) == variant
