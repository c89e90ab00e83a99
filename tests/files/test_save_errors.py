import errno
import os

import pytest
from safetensors import SafetensorError

from hf_trainweights.errors import SaveError
from hf_trainweights.files.atomic import save_errors

# Error number to what the reader should do about it.
NEXT_STEPS = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EACCES: "Check its permissions",
    errno.EPERM: "Check its permissions",
    errno.EROFS: "Check its permissions",
    errno.EIO: "The disk reports an error",
    errno.ENOENT: "Create it, or check its path",
    errno.ENOTDIR: "remove what is in the way",
    errno.ENODEV: "Check the disk",
}


def raised_by(error, tmp_path):
    with (
        pytest.raises(SaveError, match=f"^{tmp_path}: expected .* It is as it was") as caught,
        save_errors(tmp_path, "It is as it was."),
    ):
        raise error
    assert caught.value.__cause__ is error
    return caught.value.next_step


@pytest.mark.parametrize("number", NEXT_STEPS, ids=errno.errorcode.get)
def test_the_next_step_fits_what_the_system_refused(number, tmp_path):
    next_step = raised_by(OSError(number, os.strerror(number)), tmp_path)
    assert NEXT_STEPS[number] in next_step
    assert ("space" in next_step) == (number in (errno.ENOSPC, errno.EDQUOT))


@pytest.mark.parametrize("number", NEXT_STEPS, ids=errno.errorcode.get)
@pytest.mark.parametrize("text", ["I/O error: refused (os error {})", "IoError(Os {{ code: {}, kind: Refused }})"])
def test_what_safetensors_could_not_write_has_the_same_next_step(text, number, tmp_path):
    assert NEXT_STEPS[number] in raised_by(SafetensorError(text.format(number)), tmp_path)


def test_what_has_no_number_is_the_disk(tmp_path):
    assert "Check the disk" in raised_by(SafetensorError("refused"), tmp_path)


def test_other_errors_pass(tmp_path):
    with pytest.raises(KeyError, match="w"), save_errors(tmp_path, "It is as it was."):
        raise KeyError("w")
