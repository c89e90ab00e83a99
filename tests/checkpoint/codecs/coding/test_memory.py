from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hf_trainweights.checkpoint.codecs.coding.memory import ByteBuffer, scratch


def test_threads_do_not_share_scratch():
    mine = scratch("levels", [2, 3])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch, "levels", [2, 3]).result()
    assert not np.shares_memory(mine, other)
    assert np.shares_memory(mine, scratch("levels", [3, 2]))
    assert not np.shares_memory(mine, scratch("decoded", [2, 3]))


def test_scratch_grows_to_the_largest_shape_of_its_use():
    assert scratch("grown", [2, 3], np.uint8).nbytes == 6
    assert scratch("grown", [5, 7]).shape == (5, 7)
    assert scratch("grown", [5, 7]).dtype == np.float32
    assert np.shares_memory(scratch("grown", [140], np.uint8), scratch("grown", [5, 7]))


def test_a_buffer_moves_only_when_more_is_appended_than_was_expected():
    buffer = ByteBuffer(4)
    buffer.append(np.array([1, 2], np.uint8))
    first = buffer.view()
    buffer.append(np.array([3, 4], np.uint8))
    assert np.shares_memory(buffer.view(), first)
    buffer.append(np.array([5], np.uint8))
    assert not np.shares_memory(buffer.view(), first)
    assert (buffer.view().tolist(), len(buffer)) == ([1, 2, 3, 4, 5], 5)
