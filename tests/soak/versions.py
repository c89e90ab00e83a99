"""Versions of a model that are saved one after the other."""

from __future__ import annotations

import random

import torch
from soak.scenario import Scenario, require, require_equal, require_no_leftovers
from torch import nn

from hf_trainweights.checkpoint.directory import collect_garbage
from hf_trainweights.checkpoint.versions import VersionedModelSaver

VERSIONS = [f"1.0.{number}" for number in range(12)]


class SavesVersions(Scenario):
    """A version is there, whole, or not there."""

    kind = "versions"

    def work(self, rng: random.Random) -> None:
        """Save the versions that are missing."""
        saver = VersionedModelSaver(self.run / "versions")
        for version in VERSIONS:
            if version not in saver.list_versions():
                saver.save(_model(version), version, {"in_features": 96, "out_features": 64})

    def check_kill(self) -> None:
        """Every version that is listed holds its own weights, and all before it are there."""
        saver = VersionedModelSaver(self.run / "versions")
        listed = saver.list_versions()
        require(listed == VERSIONS[: len(listed)], f"there are {listed}")
        for version in listed:
            model, _ = saver.load(version, nn.Linear)
            require_equal(dict(model.state_dict()), dict(_model(version).state_dict()), version)

    def check_end(self) -> None:
        """All versions are there, and the collector finds all that killed saves have left."""
        self.check_kill()
        require(VersionedModelSaver(self.run / "versions").list_versions() == VERSIONS, "not all versions are there")
        collect_garbage(self.run / "versions")
        require_no_leftovers(self.run)


def _model(version: str) -> nn.Linear:
    torch.manual_seed(VERSIONS.index(version))
    return nn.Linear(96, 64)
