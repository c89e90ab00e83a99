"""What the names of the fields of a configuration do not tell, by model type."""

from __future__ import annotations

from typing import Any

SPECIAL: dict[str, Any] = {}
