"""Encoding and decoding in several threads: the same bytes, the first error, and no thread that is left."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import threading
import time
from functools import partial

import pytest
import torch
from trees import fingerprint, trained, write_anchor, written_bytes

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.exact import Raw
from hf_trainweights.checkpoint.encoded import decoder, encoder, storage_tasks, workers
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.checkpoint.planning.policy import MODES, Policy
from hf_trainweights.errors import CorruptFileError


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def use_workers(monkeypatch):
    def use(count):
        for module in (storage_tasks, decoder):
            monkeypatch.setattr(module, "worker_count", lambda _: count)

    return use


def after(seconds, value):
    time.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(count):
    tasks = [(size, partial(after, 0.01 * (number % 3), number)) for number, size in enumerate([1, 1 << 40, 0, 5] * 4)]
    assert list(in_order(tasks, count)) == list(range(16))


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_error_in_the_order_of_the_tasks_is_raised(count):
    values = [1, ValueError("the second"), KeyError("the third, which is faster")]
    tasks = [(1, partial(after, 0.03 - 0.01 * number, value)) for number, value in enumerate(values)]
    results = in_order(tasks, count)
    assert next(results) == 1
    with pytest.raises(ValueError, match="the second"):
        next(results)


def test_closing_ends_what_has_begun_and_drops_the_rest():
    done = []
    tasks = ((1, partial(done.append, number)) for number in range(1000))
    with contextlib.closing(in_order(tasks, 2)) as results:
        next(results)
    assert 1 <= len(done) <= 2 * workers._AHEAD + 1


def test_workers_are_ahead_by_a_limited_number_of_bytes():
    begun = []
    tasks = [(workers._AHEAD_BYTES, partial(begun.append, number)) for number in range(20)]
    with contextlib.closing(in_order(tasks, 2)) as results:
        next(results)
        time.sleep(0.05)
        assert len(begun) <= 3


def test_small_tasks_go_beside_a_large_one():
    small_is_done = threading.Event()
    tasks = [(1 << 40, partial(small_is_done.wait, 20)), (1, small_is_done.set)]
    assert list(in_order(tasks, 2)) == [True, None]


def test_small_results_let_other_tasks_go_on_beside_a_large_one():
    others_are_done = threading.Semaphore(0)

    def wait_for_others():
        return all(others_are_done.acquire(timeout=20) for _ in range(6))

    # More bytes than the threads may be ahead by, unless those of the results count.
    tasks = [(1 << 40, wait_for_others), *[(workers._AHEAD_BYTES // 2, others_are_done.release)] * 6]
    assert list(in_order(tasks, 2, kept_bytes=lambda _: 1)) == [True] + [None] * 6


def test_two_large_tasks_go_beside_each_other_and_no_third():
    both, running, counts = threading.Barrier(2, timeout=20), [], []

    def large(number):
        running.append(number)
        counts.append(len(running))
        both.wait()
        running.remove(number)
        return number

    assert list(in_order([(1 << 40, partial(large, number)) for number in range(6)], 4)) == list(range(6))
    assert max(counts) == 2


@pytest.mark.parametrize(
    ("ranks", "in_main", "cuda", "expected"),
    [
        ("1", True, False, 6),
        ("3", True, False, 2),
        ("x", True, False, 6),
        ("1", False, False, 2),
        ("1", False, True, 3),
    ],
)
def test_training_keeps_its_cores_unless_it_waits(monkeypatch, ranks, in_main, cuda, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    actual = []

    def count():
        actual.extend(map(worker_count, (1 << 30, 1000, 9 << 20)))

    if in_main:
        count()
    else:
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    assert actual == [expected, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_workers_writes_the_same_bytes_and_reads_the_same_values(mode, use_workers):
    state = trained("AdamW")[1].state_dict()
    plan = Policy(mode).plan_optimizer(state)
    use_workers(1)
    expected = written_bytes(state, plan)
    values = fingerprint(torch.load(io.BytesIO(expected), weights_only=True))
    for count in (2, 4):
        use_workers(count)
        assert written_bytes(state, plan) == expected
        assert fingerprint(torch.load(io.BytesIO(expected), weights_only=True)) == values


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_tensor_in_parts_becomes_the_same_bytes(tmp_path, monkeypatch, use_workers, dtype, count):
    torch.manual_seed(0)
    before = {"w": (torch.randn(1100, 300) * 100).to(dtype)}
    anchor = Anchor(write_anchor(tmp_path, before))
    weights = {"w": before["w"] + 1, "tail": torch.ones(5)}
    plan = {("w",): TensorPlan("weight", "w", (CODECS["planes-delta"](),), anchor="w")}
    moments = {"v": torch.rand(1100, 300).square()}
    of_moments = {("v",): TensorPlan("exp_avg_sq", "v", (CODECS["planes-rank1"](),))}

    def files():
        return [written_bytes(before), written_bytes(weights, plan, anchor=anchor), written_bytes(moments, of_moments)]

    use_workers(1)
    expected = files()
    monkeypatch.setattr(storage_tasks, "_LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(storage_tasks, "_CHUNKS", 1)
    use_workers(count)
    assert files() == expected
    assert fingerprint(torch.load(io.BytesIO(expected[2]), weights_only=True)) == fingerprint(moments)


@pytest.mark.parametrize("codec", ["planes-delta", "delta-uniform"])
def test_the_anchor_of_a_large_tensor_is_decoded_once(tmp_path, monkeypatch, codec):
    before = {"w": torch.randn(300, 300)}
    anchor = Anchor(write_anchor(tmp_path, before))
    decoded, decode = [], anchor.tensor
    monkeypatch.setattr(anchor, "tensor", lambda name: decoded.append(name) or decode(name))
    monkeypatch.setattr(storage_tasks, "_LARGE_BYTES", 1 << 10)
    made = CODECS[codec](**({"step": 0.1} if codec == "delta-uniform" else {}))
    written_bytes({"w": before["w"] + 1}, {("w",): TensorPlan("weight", "w", (made,), anchor="w")}, anchor=anchor)
    assert decoded == ["w"]


class Failing(Raw):
    """Fails sooner the larger the tensor is."""

    def _encode(self, tensor, references):
        time.sleep(0.1 / tensor.numel())
        raise ArithmeticError(f"{tensor.numel()} elements")


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_in_a_worker_is_that_of_the_first_tensor_in_the_plan(use_workers, count):
    use_workers(count)
    tree = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(400)}
    plan = {(name,): TensorPlan("weight", name, (Failing(),)) for name in "bc"}
    with pytest.raises(ArithmeticError, match="3 elements"):
        written_bytes(tree, plan)


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_disk_ends_all_workers(use_workers, count):
    class Full(io.RawIOBase):
        def write(self, data):
            if len(data) > 1000:
                raise OSError(28, "No space left on device")
            return len(data)

    use_workers(count)
    with pytest.raises(OSError, match="No space left"):
        encoder.encode_file({name: torch.randn(5000) for name in "abcdef"}, {}, Full())


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_damaged_tensor_is_named(use_workers, count):
    tree = {name: torch.randn(50_000) for name in "abcd"}
    data = bytearray(written_bytes(tree))
    for place in (3, 5, 7):  # in b, c and d
        data[len(data) * place // 8] ^= 1
    use_workers(count)
    with pytest.raises(CorruptFileError, match=r"^tensor b, from byte"):
        torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("count", [1, 3])
def test_damage_of_a_second_moment_is_that_of_all_that_refers_to_it(use_workers, count):
    state = trained("AdamW")[1].state_dict()
    data = bytearray(written_bytes(state, Policy("compact").plan_optimizer(state)))
    data[90] ^= 1
    use_workers(count)
    with pytest.raises(CorruptFileError, match=r"^tensor state\.0\.exp_avg_sq, from byte"):
        torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_workers_serve_after_a_fork_and_in_another_thread(use_workers):
    use_workers(2)
    tree = {name: torch.full((5000,), 0.1) for name in "abc"}
    expected, actual = written_bytes(tree), []
    thread = threading.Thread(target=lambda: actual.append(written_bytes(tree)))
    thread.start()
    thread.join(timeout=60)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(written_bytes(tree)))
    child.start()
    actual.append(receiver.recv() if receiver.poll(60) else b"")
    child.join(timeout=60)
    assert actual == [expected] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_second_moment_serves_the_first_that_refers_to_it_wherever_both_are(use_workers, count):
    use_workers(count)
    torch.manual_seed(0)
    squares = torch.rand(80, 64) * 1e-6
    tree = {"m": squares.sqrt() * 0.1, "x": torch.ones(5), "v": squares, "n": squares.sqrt(), "o": torch.ones(3)}
    codec = CODECS["update-space"]()
    plan = {(name,): TensorPlan("exp_avg", name, (codec,), exp_avg_sq=("v",)) for name in "mn"}
    plan["v",] = TensorPlan("exp_avg_sq", "v", (CODECS["log-rank1"](),))
    actual = [(entry.path, entry.codec) for entry in encoder.encode_file(tree, plan).report]
    expected = [("v", "log-rank1"), ("m", "update-space"), ("x", "raw"), ("n", "planes"), ("o", "raw")]
    assert actual == expected
    tree = {name: tree[name] for name in "vxmno"}
    actual = [(entry.path, entry.codec) for entry in encoder.encode_file(tree, plan).report]
    assert actual == [expected[0], expected[2], expected[1], *expected[3:]]
