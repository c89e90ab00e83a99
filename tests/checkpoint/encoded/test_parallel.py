import subprocess
import sys
import threading
import time

import pytest
import torch

from hf_trainweights.checkpoint.codecs import LogRank1, Planes, UpdateSpace
from hf_trainweights.checkpoint.encoded import parallel
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.parallel import map_in_order, thread_count, units_of
from hf_trainweights.checkpoint.encoded.plan import TensorPlan

MB = 1 << 20


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)


def adam_state(second_moments_first=False):
    generator = torch.Generator().manual_seed(3)
    state, plan = {}, {}
    for index, size in enumerate((700, 64, 900, 512, 1)):
        exp_avg_sq = torch.rand(size, 640, generator=generator) * 1e-6
        exp_avg = torch.randn(size, 640, generator=generator) * exp_avg_sq.sqrt()
        moments = {"step": torch.tensor(7.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        state[index] = dict(reversed(moments.items())) if second_moments_first else moments
        of_first = TensorPlan("exp_avg", "w", (UpdateSpace(0.25), Planes()), exp_avg_sq=(index, "exp_avg_sq"))
        plan[index, "exp_avg"] = of_first
        plan[index, "exp_avg_sq"] = TensorPlan("exp_avg_sq", "w", (LogRank1(1), Planes()))
    return state, plan


@pytest.mark.parametrize("second_moments_first", [False, True])
def test_two_threads_write_the_bytes_of_one(monkeypatch, second_moments_first):
    state, plan = adam_state(second_moments_first)
    used = set()
    read = LogRank1._encode
    monkeypatch.setattr(LogRank1, "_encode", lambda *args: used.add(threading.current_thread().name) or read(*args))
    files = []
    for threads in (1, 2):
        monkeypatch.setattr(parallel, "thread_count", lambda threads=threads: threads)
        files.append(encode_file(state, plan))
    assert torch.equal(files[0].payload, files[1].payload)
    assert files[0].structure == files[1].structure
    assert files[0].report == files[1].report
    assert "MainThread" in used
    assert any(name.startswith("trainweights-codec") for name in used)


def test_two_threads_decode_what_one_does(monkeypatch):
    state, plan = adam_state()
    function, arguments = encode_file(state, plan).__reduce__()
    trees = []
    for threads in (1, 2):
        monkeypatch.setattr(parallel, "thread_count", lambda threads=threads: threads)
        trees.append(function(*arguments))
    for index, moments in trees[0].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, trees[1][index][name])


def test_results_come_in_order(two_threads):
    def slow_first(item):
        time.sleep(0.05 if item == 0 else 0)
        return item

    assert list(map_in_order(slow_first, range(9), [MB] * 9)) == list(range(9))


def test_no_more_than_the_limit_lies_ahead(two_threads, monkeypatch):
    monkeypatch.setattr(parallel, "_AHEAD_BYTES", 6 * MB)
    done = []
    results = map_in_order(done.append, range(50), [2 * MB] * 50)
    next(results)
    time.sleep(0.05)
    assert len(done) <= 4
    assert len(list(results)) == 49


def test_the_error_of_the_first_item_that_fails_is_raised_and_the_rest_is_not_begun(two_threads, monkeypatch):
    monkeypatch.setattr(parallel, "_AHEAD_BYTES", 4 * MB)
    done = []

    def fail(item):
        done.append(item)
        if item >= 3:
            time.sleep(0.03 if item == 3 else 0)
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match="item 3"):
        list(map_in_order(fail, range(100), [MB] * 100))
    assert max(done) < 10


def test_neither_gradients_nor_the_callers_threads_change(two_threads):
    before = torch.get_num_threads()
    seen = list(map_in_order(lambda _: (torch.is_grad_enabled(), torch.get_num_threads()), range(4), [4 * MB] * 4))
    assert seen == [(False, 1)] * 4
    assert torch.get_num_threads() == before
    others = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert others == [before]


def test_small_files_start_no_thread(two_threads):
    names = list(map_in_order(lambda _: threading.current_thread().name, range(4), [1000] * 4))
    assert set(names) == {threading.current_thread().name}


def test_a_background_thread_works_alone(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert thread_count() == 2
    found = []
    thread = threading.Thread(target=lambda: found.append(thread_count()))
    thread.start()
    thread.join()
    assert found == [1]


def test_many_cores_are_not_all_taken(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert thread_count() == 4


def test_a_save_while_the_interpreter_exits_starts_no_thread():
    code = """
import atexit, torch
from hf_trainweights.checkpoint.encoded.encoder import encode_file
torch.set_num_threads(2)
tree = {str(i): torch.ones(1 << 20) for i in range(4)}
atexit.register(lambda: print(len(encode_file(tree, {}).report)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"
    assert "Error" not in done.stderr


def test_a_unit_holds_what_refers_to_each_other():
    assert units_of([0, 2, 1, 3], {1: 2}) == [[0], [2, 1], [3]]
    assert units_of([0, 1, 2, 3], {3: 0, 2: 0}) == [[0, 2, 3], [1]]
    assert units_of([1, 0], {1: 0, 0: 1}) == [[1, 0]]
