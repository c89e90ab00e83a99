"""A disk that records, one that fails, and what is on it when the process or the machine stops at any call."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hf_trainweights.files import disk

_TAKES_PATHS = ("sync_file", "sync_directory", "link", "rename", "unlink", "mkdir", "rmdir")


class RecordingDisk(disk.FileSystem):
    """Does what it is told and keeps a list of it."""

    def __init__(self):
        self.calls = []
        self.paths = {}

    def create(self, path):
        descriptor = super().create(path)
        self.paths[descriptor] = path
        self.calls.append(("create", path))
        return descriptor

    def write(self, descriptor, data):
        count = super().write(descriptor, data)
        self.calls.append(("write", self.paths[descriptor], bytes(data[:count])))
        return count

    def fsync(self, descriptor):
        super().fsync(descriptor)
        self.calls.append(("fsync", self.paths[descriptor]))

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in _TAKES_PATHS:
            return method

        def record(*paths):
            method(*paths)
            # Others may have written the file, past this object: then it counts from now on.
            content = [paths[0].read_bytes()] if name == "sync_file" else []
            self.calls.append((name, *paths, *content))

        return record


class File:
    def __init__(self, content=b""):
        self.content = content
        self.synced = b""

    @classmethod
    def of(cls, path):
        file = cls(path.read_bytes())
        file.synced = file.content
        return file


class Directory:
    """Names as programs see them, and two ways they may be on the platter after changes without an fsync."""

    def __init__(self):
        self.names = {}
        self.synced = {}  # none of the changes since the last fsync of the directory
        self.reordered = {}  # only the last one

    @classmethod
    def of(cls, path):
        directory = cls()
        for entry in path.iterdir():
            directory.names[entry.name] = cls.of(entry) if entry.is_dir() else File.of(entry)
        directory.sync()
        return directory

    def sync(self):
        self.synced = dict(self.names)
        self.reordered = dict(self.names)

    def change(self, **changes):
        self.reordered = dict(self.synced)
        for names in (self.names, self.reordered):
            names.update(changes)
            for name in [name for name, node in names.items() if node is None]:
                del names[name]

    def find(self, path):
        node = self
        for name in path.parts:
            node = node.names[name]
        return node

    def apply(self, call, path, *arguments):
        if call in ("sync_file", "sync_directory"):
            self.discover(path, *arguments)
        parent = self.find(path.parent)
        if call == "create":
            parent.change(**{path.name: File()})
        elif call == "mkdir":
            parent.change(**{path.name: Directory()})
        elif call == "write":
            parent.names[path.name].content += arguments[0]
        elif call in ("fsync", "sync_file"):
            parent.names[path.name].synced = parent.names[path.name].content
        elif call == "sync_directory":
            self.find(path).sync()
        elif call in ("unlink", "rmdir"):
            parent.change(**{path.name: None})
        elif call == "link":
            self.find(arguments[0].parent).change(**{arguments[0].name: parent.names[path.name]})
        else:
            assert call == "rename"
            node, target = parent.names[path.name], self.find(arguments[0].parent)
            if target is parent:
                parent.change(**{arguments[0].name: node, path.name: None})
            else:
                target.change(**{arguments[0].name: node})
                parent.change(**{path.name: None})

    def discover(self, path, content=None):
        """Makes a file or directory that someone else made, and the directories above it."""
        for depth, name in enumerate(path.parts):
            directory = self.find(Path(*path.parts[:depth]))
            if name not in directory.names:
                is_file = content is not None and depth == len(path.parts) - 1
                directory.change(**{name: File(content) if is_file else Directory()})

    def write_to(self, path, *, names, content):
        path.mkdir()
        for name, node in getattr(self, names).items():
            if isinstance(node, Directory):
                node.write_to(path / name, names=names, content=content)
            else:
                (path / name).write_bytes(getattr(node, content))

    def frozen(self, *, names, content):
        """All names and contents, as a value that is equal to that of a directory with the same ones."""
        return frozenset(
            (name, node.frozen(names=names, content=content) if isinstance(node, Directory) else getattr(node, content))
            for name, node in getattr(self, names).items()
        )


# Which names and which content survive.
OUTCOMES = {
    "killed": {"names": "names", "content": "content"},
    "power failed, names on the platter": {"names": "names", "content": "synced"},
    "power failed, names lost": {"names": "synced", "content": "synced"},
    "power failed, names out of order": {"names": "reordered", "content": "synced"},
}


def replay(root, action, monkeypatch):
    """Runs `action` on `root` and yields what `root` is after every prefix of its calls, in every outcome.

    What it has been before is left out, except after the last call, after which every outcome counts.
    """
    recording = RecordingDisk()
    state = Directory.of(root)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "file_system", recording)
        action()
    shutil.rmtree(root)  # so that no path recorded in a file leads anywhere
    shown = set()
    for index in range(len(recording.calls) + 1):
        for outcome in OUTCOMES:
            content = state.frozen(**OUTCOMES[outcome])
            if content in shown and index < len(recording.calls):
                continue
            shown.add(content)
            state.write_to(root, **OUTCOMES[outcome])
            yield f"after {index} calls, {outcome}: {recording.calls[index - 1 : index]}"[:300]
            shutil.rmtree(root)
        if index < len(recording.calls):
            call, *arguments = recording.calls[index]
            state.apply(
                call,
                *(argument.relative_to(root) if isinstance(argument, Path) else argument for argument in arguments),
            )


class FailingDisk(disk.FileSystem):
    """Fails at one call, or from one call on, with an error number."""

    def __init__(self, fail_at, number, *, for_good):
        self.count = 0
        self.fail_at = fail_at
        self.number = number
        self.for_good = for_good

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in ("create", "write", "read", "fsync", *_TAKES_PATHS):
            return method

        def fail(*arguments):
            self.count += 1
            if self.count == self.fail_at or (self.for_good and self.count > self.fail_at):
                raise OSError(self.number, os.strerror(self.number))
            return method(*arguments)

        return fail
