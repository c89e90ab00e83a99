import numpy as np
import pytest

from hf_trainweights.checkpoint.codecs.coding.symbols import _to_symbols


@pytest.mark.parametrize("width", [2, 4, 8, 10, 16])
@pytest.mark.parametrize("same", [False, True])
def test_symbols_are_the_documented_ones(width, same):
    c = 2 ** (width - 1)
    levels = np.unique(np.clip([-c - 1, -c, 1 - c, -2, -1, 0, 1, 2, c - 2, c - 1, c], -32767, 32766)).astype(np.int16)
    if same:
        levels = np.append(levels, np.int16(-32768))
    symbols, escapes = _to_symbols(levels, width)
    offset, lowest, highest = (1, -1, 1) if width == 2 else (c, 1 - c, c - 2)
    fits = (levels >= lowest) & (levels <= highest)
    expected = np.where(fits, levels.astype(int) + offset, 2 * c - 1)
    if same and width > 2:
        expected[-1] = 0
    assert symbols.tolist() == expected.tolist()
    assert escapes.tolist() == levels[expected == 2 * c - 1].tolist()
