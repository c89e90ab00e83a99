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

_UNSIGNED = b'\n  "sha256": ""'


def sign_json(content: Mapping[str, Any]) -> bytes:
    """Return an object, its dataclasses as objects of their fields, as text that holds its own digest as `sha256`.

    Examples:
        >>> text = sign_json({"size_bytes": 3})
        >>> is_signed(text, json.loads(text)), is_signed(text.replace(b"3", b"4"), json.loads(text))
        (True, False)
    """
    # dataclasses.asdict would copy all of a large manifest.
    text = json.dumps({**content, "sha256": ""}, sort_keys=True, indent=2, default=vars) + "\n"
    unsigned = text.encode()
    # Only the object's own keys are indented by two spaces; writing the text twice takes a tenth of a small save.
    return unsigned.replace(_UNSIGNED, _UNSIGNED[:-1] + hashlib.sha256(unsigned).hexdigest().encode() + b'"')


def is_signed(text: bytes, content: Mapping[str, Any]) -> bool:
    """Return whether a text is exactly the one that `sign_json` returns for its content."""
    return sign_json(content) == text
