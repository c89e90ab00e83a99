"""Where modules on the disk go, without a change to anything that the user passed."""

from __future__ import annotations

import sys

import pytest
import torch

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.quantizer import TrainWeightsHfQuantizer, refuse_disk


@pytest.fixture
def quantizer() -> TrainWeightsHfQuantizer:
    """Return the quantizer of a quantized checkpoint."""
    return TrainWeightsHfQuantizer(TrainWeightsConfig(), pre_quantized=True)


def test_modules_on_the_disk_are_refused_and_all_others_are_not() -> None:
    for device_map in (None, "auto", torch.device("cpu"), {"": "cpu"}, {"model": 0, "lm_head": "cpu"}):
        refuse_disk(device_map)
    with pytest.raises(ConfigError, match=r'device_map: .*modules on "disk".*Save a quantized copy first'):
        refuse_disk({"model": "cpu", "lm_head": "disk"})


def test_a_new_map_has_the_cpu_for_the_disk_and_the_users_stays_as_it_is(
    quantizer: TrainWeightsHfQuantizer, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model": 0, "lm_head": "disk"}
    assert quantizer.update_device_map(given) == {"model": 0, "lm_head": "cpu"}
    assert given == {"model": 0, "lm_head": "disk"}
    assert [record.message.partition(" instead")[0] for record in caplog.records] == [
        'Modules on "disk" are memory-mapped on "cpu"'
    ]


@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
def test_a_map_without_the_disk_stays_as_it_is(
    quantizer: TrainWeightsHfQuantizer, device_map: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert quantizer.update_device_map(device_map) == device_map
    assert not caplog.records


@pytest.mark.parametrize(("model_bytes", "warned"), [(300, False), (301, True)])
def test_the_cpu_takes_what_the_accelerators_do_not(
    quantizer: TrainWeightsHfQuantizer, model_bytes: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = {0: 100, "cpu": 200}
    quantizer._model_bytes = model_bytes
    assert quantizer.adjust_max_memory(given) == {0: 100, "cpu": sys.maxsize}
    assert given == {0: 100, "cpu": 200}
    assert bool(caplog.records) == warned
    quantizer._model_bytes = 100
    assert quantizer.adjust_max_memory({0: 100}) == {0: 100, "cpu": sys.maxsize}
