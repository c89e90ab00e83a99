"""The versions that errors name are those that the package installs with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import transformers
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_trainweights.models.host import SUPPORTED

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_errors_name_the_versions_that_the_package_requires() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    required = next(each for each in map(Requirement, dependencies) if each.name == "transformers")
    assert required.specifier == SpecifierSet(SUPPORTED)


def test_the_installed_version_is_one_of_them() -> None:
    assert transformers.__version__ in SpecifierSet(SUPPORTED)
