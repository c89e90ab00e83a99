"""The work of all ranks on one sharded checkpoint of a Trainer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.contents import dcp_directories
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.sharded.in_place import compress_sharded
from hf_trainweights.checkpoint.trainer.compression import (
    Savings,
    drop_stale_manifest,
    is_plain,
    not_enough_space,
    require_whole,
    size_bytes,
)


@dataclass(frozen=True)
class ShardedCompression:
    """One sharded checkpoint that is to be made small by all ranks, each of which has one of these.

    Args:
        directory: The checkpoint.
        policy: Which codec for which tensor.
        options: Further arguments for `compress_sharded`.
        ranks: Those that take part.
    """

    directory: Path
    policy: Policy
    options: dict[str, Any]
    ranks: Ranks

    @property
    def is_wanted(self) -> bool:
        """Always: only the coordinator looks whether the checkpoint is still there, so that all do the same."""
        return True

    def run(self, savings: Savings) -> str | None:
        """Make the checkpoint small; return on every rank why there is no room, or None, also if it is gone.

        CorruptFileError: a file of it is damaged, and nothing has changed. TrainWeightsError: a rank could not rewrite
        it, and every file in it is whole.
        """
        return self.ranks.decide(lambda: self._compress(savings))

    def _compress(self, savings: Savings) -> str | None:
        plain_bytes, no_room = self._check()
        if plain_bytes == 0 or no_room:
            return no_room
        manifest = compress_sharded(self.directory, self.policy, self.ranks, **self.options)
        savings.add(plain_bytes, size_bytes(self.directory), manifest)
        return None

    def _check(self) -> tuple[int, str | None]:
        """Return what the checkpoint takes, 0 if it is gone, and why it cannot be rewritten."""
        if not self.directory.is_dir():
            return 0, None
        drop_stale_manifest(self.directory)
        if is_plain(self.directory):
            require_whole(self.directory)
        # The old files of a DCP directory stay until all new ones are there.
        needed = max(map(size_bytes, dcp_directories(self.directory)), default=0)
        return size_bytes(self.directory), not_enough_space(needed, shutil.disk_usage(self.directory).free)
