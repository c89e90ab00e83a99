import errno
import io
import zipfile

import pytest
import torch

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import torch_zip
from hf_trainweights.files.torch_zip import open_pickle, open_zip


def test_the_pickle_of_a_torch_file_is_read(tmp_path):
    torch.save([1, 2], tmp_path / "file.pt")
    with open_pickle(tmp_path / "file.pt") as pickle:
        assert pickle.read().startswith(b"\x80\x02]")


@pytest.mark.parametrize("names", [[], ["a/data.pkl", "b/data.pkl"]])
def test_an_archive_that_torch_did_not_write_is_refused(tmp_path, names):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    expected = rf"file\.pt: expected a whole zip archive.*{len(names)} members"
    with pytest.raises(CorruptFileError, match=expected), open_pickle(tmp_path / "file.pt"):
        pass


def test_a_changed_member_is_found_by_its_checksum(tmp_path):
    torch.save([1, 2], tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(content.replace(b"\x80\x02]", b"\x80\x02}"))
    with pytest.raises(CorruptFileError, match=r"file\.pt: .* Bad CRC-32"), open_pickle(tmp_path / "file.pt") as pickle:
        pickle.read()


def test_what_the_disk_refuses_is_no_damage(tmp_path, monkeypatch):
    class Refusing(io.BytesIO):
        def seek(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch_zip, "open_regular_file", lambda path: Refusing())
    with pytest.raises(OSError, match="Input/output error"), open_zip(tmp_path / "file.pt"):
        pass
