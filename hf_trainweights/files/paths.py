"""File names that come out of a file."""

from __future__ import annotations

import re


def is_safe_name(name: str) -> bool:
    """Return whether a relative file name, its parts joined by `/`, stays inside its directory on every system.

    Half of a surrogate pair, which JSON can hold and no file system, makes no such name.

    Examples:
        >>> is_safe_name("sub/model.safetensors"), is_safe_name("../model.safetensors")
        (True, False)
    """
    parts = name.split("/")
    return all(part not in ("", ".", "..") and not re.search(r"[\\:\x00-\x1f\ud800-\udfff]", part) for part in parts)
