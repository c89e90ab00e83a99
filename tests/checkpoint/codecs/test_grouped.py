import pytest
import torch
from weights import QUANTIZABLE

from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats import get_format
from hf_trainweights.testing.codecs import decode

every_format = pytest.mark.parametrize("name", QUANTIZABLE)


def weight(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02)


@pytest.mark.slow
@every_format
def test_decoded_weight_is_what_the_format_makes_of_it(name):
    chosen = get_format({"format": name})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = weight(64, 256).to(dtype)
        encoded = Grouped({"format": name}).encode(tensor)
        expected = chosen.dequantize(chosen.quantize(tensor), tensor.shape, dtype)
        assert torch.equal(decode(Grouped(), encoded, tensor), expected), dtype
        assert encoded.params == {"format": chosen.get_config()}
        # The bound is found by decoding.
        assert encoded.bound == pytest.approx((expected.double() - tensor.double()).abs().max().item(), rel=1e-6)


@pytest.mark.slow
@every_format
def test_any_shape_is_viewed_as_a_matrix(name):
    for shape in ([], [1], [64], [3, 5], [16, 8, 3, 3], [2, 3, 128]):
        tensor = weight(*shape)
        encoded = Grouped({"format": name}).encode(tensor)
        assert decode(Grouped(), encoded, tensor).shape == tensor.shape


def test_a_shape_that_does_not_fit_takes_the_fallback():
    encoded = Grouped({"format": "int4", "group_size": 128}).encode(weight(8, 100))
    assert encoded.params == {"format": get_format({"format": "int8"}).get_config()}


def test_codes_are_entropy_coded():
    tensor = weight(512, 512)
    encoded = Grouped({"format": "int4", "group_size": 128}).encode(tensor)
    assert 8 * encoded.payload_bytes / tensor.numel() < 4.2


def test_values_that_are_not_finite_cannot_be_quantized():
    with pytest.raises(QuantizationError, match="finite values"):
        Grouped().encode(torch.tensor([[1.0, torch.nan]]))


def test_unknown_formats_and_parameters_are_errors():
    with pytest.raises(ConfigError, match="format: expected one of"):
        Grouped({"format": "int5"})
    with pytest.raises(ConfigError, match="group_size"):
        Grouped({"format": "int4", "group_size": 7})


@pytest.mark.parametrize("config", [{}, {"format": "int5"}, {"format": []}, {"format": "int4", "group_size": "x"}])
def test_unknown_formats_in_a_file_are_errors(config):
    encoded = Grouped().encode(weight(8, 128))
    with pytest.raises(CorruptFileError, match="codec grouped, parameter format"):
        Grouped.decode(encoded.payloads, {"format": config}, [8, 128], torch.float32)


def test_a_format_that_does_not_fit_the_shape_is_an_error():
    encoded = Grouped().encode(weight(8, 100))
    with pytest.raises(CorruptFileError, match=r"parameter format: expected one for shape \[8, 100\]"):
        Grouped.decode(encoded.payloads, {"format": {"format": "int4", "group_size": 128}}, [8, 100], torch.float32)


@pytest.mark.parametrize("config", [{"format": "table4"}, {"format": "affine", "offset": "bias"}], ids=str)
def test_formats_of_files_alone_are_refused(config):
    with pytest.raises(ConfigError, match="a format that floats are quantized to, found"):
        Grouped(config)
