"""Mutations of what torch.save writes: other opcodes, other globals, and calls that show when they are made."""

from __future__ import annotations

import io
import random
import zipfile

from tests.fuzz.mutate_bytes import change_bytes
from tests.fuzz.target import CANARY

# Relative: a worker is in its own directory.
_CANARY = CANARY.encode()
_GLOBALS = [
    *(b"cposix\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\nexec\n", b"cbuiltins\ngetattr\n", b"cbuiltins\nopen\n"),
    *(b"chf_trainweights\ndecode_file\n", b"chf_trainweights\nverify_model\n", b"chf_trainweights\nQuantizedTensor\n"),
    *(b"ctorch\nload\n", b"ctorch._utils\n_rebuild_tensor\n", b"ccollections\nOrderedDict\n", b"ctorch\nTensor\n"),
]
_OPCODES = [b"R", b"b", b"o", b"\x81", b"i", b"0", b"2", b"t", b"}", b"]", b"s", b"u", b"e", b"a", b"h\x00", b"Q", b"N"]


def _touch(quoted: bytes) -> bytes:
    """Return a pickle that makes the canary's file, if it is run by an unpickler that allows all globals."""
    return quoted + b"X" + len(_command(quoted)).to_bytes(4, "little") + _command(quoted) + b"\x85R0"


def _command(name: bytes) -> bytes:
    return b"touch " + _CANARY if b"system" in name else b"open('" + _CANARY + b"', 'w')"


def change_pickle(rng: random.Random, data: bytes) -> bytes:
    """Return a file whose pickle is another; its length changes, so that a zip file is written anew."""
    if not data.startswith(b"PK"):
        return _changed(rng, data)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = _changed(rng, content)
            new.writestr(name, content)
    return changed.getvalue()


def _changed(rng: random.Random, pickled: bytes) -> bytes:
    change = rng.randrange(6)
    position = rng.randrange(2, len(pickled))
    if change == 0:
        return change_bytes(rng, pickled, rng.choice((1, 1, 2, 8)))
    if change == 1:  # another opcode
        return pickled[:position] + rng.choice(_OPCODES) + pickled[position + rng.randrange(2) :]
    if change == 2:  # another global in the place of one
        lines = [at for at in range(len(pickled)) if pickled.startswith((b"ctorch", b"chf_", b"ccoll"), at)]
        start = rng.choice(lines) if lines else position
        stop = pickled.find(b"\n", pickled.find(b"\n", start) + 1) + 1
        return pickled[:start] + rng.choice(_GLOBALS) + pickled[stop:] if stop else pickled[:start]
    if change == 3:  # a call that shows when it is made
        call = _touch(rng.choice(_GLOBALS[:3]))
        return pickled[:2] + call + pickled[2:]
    if change == 4:
        return pickled[:position] + b"." + pickled[position:]
    stop = rng.randrange(position, min(position + 64, len(pickled)) + 1)
    return pickled[:stop] + pickled[position:]
