"""A JSON object that carries its own digest, so that a flipped bit in the file itself is found as well.

The text is UTF-8 with sorted keys, two spaces of indentation and a newline at the end. Its `sha256` is the digest of
the same text with an empty string in its place. Exactly these bytes are accepted when it is read. A digest finds
damage, not forgery: anyone can compute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def sign_json(content: Mapping[str, Any]) -> bytes:
    """Return an object as text that holds its own digest.

    Args:
        content: Values that JSON can hold; a dataclass in it becomes the object of its fields. A `sha256` is replaced.

    Returns:
        The bytes to write.

    Examples:
        >>> text = sign_json({"size_bytes": 3})
        >>> is_signed(text, json.loads(text)), is_signed(text.replace(b"3", b"4"), json.loads(text))
        (True, False)
    """
    unsigned = {**content, "sha256": ""}
    return _text({**unsigned, "sha256": hashlib.sha256(_text(unsigned)).hexdigest()})


def is_signed(text: bytes, content: Mapping[str, Any]) -> bool:
    """Return whether a text is exactly the one that `sign_json` returns for its content.

    Args:
        text: The bytes of a file.
        content: What `json.loads` returned for them.
    """
    return sign_json(content) == text


def _text(value: Mapping[str, Any]) -> bytes:
    # dataclasses.asdict would copy all of a large manifest.
    return (json.dumps(value, sort_keys=True, indent=2, default=vars) + "\n").encode()
