"""Mutations of bytes: flips, overwritten and repeated stretches, cuts and splices."""

from __future__ import annotations

import random

_NUMBERS = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\1\0\0\0", b"\0\0\0\x80"]


def change_bytes(rng: random.Random, data: bytes, count: int | None = None) -> bytes:
    """Return bytes of the same length, some of them changed.

    Args:
        rng: Decides which.
        data: Any bytes.
        count: How many changes; None for a few at random.
    """
    changed = bytearray(data)
    for _ in range(count or rng.choice((1, 1, 2, 4, 16, 64))) if data else ():
        position = rng.randrange(len(changed))
        change = rng.randrange(5)
        if change == 0:
            changed[position] ^= 1 << rng.randrange(8)
        elif change == 1:
            changed[position] = rng.randrange(256)
        elif change == 2:
            changed[position] = rng.choice((0, 255, 127, 128))
        elif change == 3:
            source = rng.randrange(len(changed))
            length = min(rng.randrange(1, 32), len(changed) - position, len(changed) - source)
            changed[position : position + length] = changed[source : source + length]
        elif len(changed) >= 4:
            position = rng.randrange(len(changed) - 3)
            changed[position : position + 4] = rng.choice(_NUMBERS)
    return bytes(changed)


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """Return bytes of which one, two or eight bits are flipped."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    """Return the beginning of some bytes."""
    return data[: rng.randrange(len(data))] if data else data


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the beginning of some bytes, and the end of others."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def damage(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return bytes as a damaged file has them; the more so the more often the damage is small.

    Args:
        rng: Decides how.
        data: The file.
        other: Another file of the same kind, for splices.
    """
    kind = rng.random()
    if kind < 0.55:
        return flip_bits(rng, data)
    if kind < 0.7:
        return change_bytes(rng, data)
    return cut(rng, data) if kind < 0.85 else splice(rng, data, other)
