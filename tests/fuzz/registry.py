"""Every target, in the order of the reports."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets.encoded_files import EncodedBytes, EncodedPayloads, EncodedStructures

_TARGETS: tuple[type[Target], ...] = (EncodedBytes, EncodedStructures, EncodedPayloads)
TARGETS: dict[str, type[Target]] = {target.name: target for target in _TARGETS}
