"""How much memory that no file backs a process uses, and the most of it meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

_SAMPLE_SECONDS = 0.002


def anonymous_bytes() -> int:
    """Return what this process holds now; pages of mapped files are the kernel's to drop.

    Raises:
        RuntimeError: The system is not Linux.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    if not found:
        raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")
    return sum(found)


class Peak(threading.Thread):
    """Samples the memory of this process, in a thread, while its block runs.

    Attributes:
        increase_bytes: By how much memory rose above what it was at the beginning of the block.
        own_seconds: CPU seconds that the sampling took; known when the block has ended.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.increase_bytes = 0
        self.own_seconds = 0.0
        self._before = anonymous_bytes()
        self._stopping = threading.Event()

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """Sample until the block ends."""
        while True:
            self.increase_bytes = max(self.increase_bytes, anonymous_bytes() - self._before)
            if self._stopping.wait(_SAMPLE_SECONDS):
                break
        self.own_seconds = time.thread_time()
