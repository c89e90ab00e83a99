"""File names that come out of a file."""

from __future__ import annotations

import re


def is_safe_name(name: str) -> bool:
    """Return whether a relative file name stays inside its directory on every system.

    Args:
        name: The name as it stands in a manifest or journal, its parts joined by `/`.

    Returns:
        False for absolute names, `..`, empty parts, backslashes, drive letters, control characters, and what
        is no text: half of a surrogate pair, which JSON can hold and no file system.

    Raises:
        TypeError: `name` is no string.

    Examples:
        >>> is_safe_name("sub/model.safetensors"), is_safe_name("../model.safetensors")
        (True, False)
    """
    parts = name.split("/")
    return all(part not in ("", ".", "..") and not re.search(r"[\\:\x00-\x1f\ud800-\udfff]", part) for part in parts)
