"""The part of a model's config.json that says how its quantized weights are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import open_regular_file

CONFIG_NAME = "config.json"


def quantization_sha256(directory: Path) -> str | None:
    """Return the SHA-256 of a directory's `quantization_config` as canonical JSON; None where there is none.

    Canonical JSON has sorted keys, no spaces, and ASCII only.
    """
    file = directory / CONFIG_NAME
    try:
        with open_regular_file(file) as stream:
            described = json.loads(stream.read()).get("quantization_config")
    except FileNotFoundError:
        return None
    except CorruptFileError:
        raise
    except (ValueError, AttributeError, RecursionError) as error:
        next_step = "Download it again, or save the model again from its source."
        raise CorruptFileError(str(file), "a JSON object", repr(error)[:200], next_step) from error
    if described is None:
        return None
    return hashlib.sha256(json.dumps(described, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
