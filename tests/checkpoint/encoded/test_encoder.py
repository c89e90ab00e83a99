from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections import Counter

import pytest
import torch
from trees import encoded_bytes, fingerprint, stored, trained, write_anchor, written_bytes

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.structure import cut_payload, open_structure
from hf_trainweights.errors import UnstorableError

RAW, PLANES, DELTA = (CODECS[name]() for name in ("raw", "planes", "planes-delta"))
LOSSY = CODECS["delta-uniform"].within(1e-2)


def planned(*candidates: Codec, **options):
    return TensorPlan("weight", "w", candidates, **options)


def only_codec(encoded):
    (entry,) = encoded.report
    return entry.codec


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(80, 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer_name", ["AdamW", "AdamW-amsgrad", "SGD", "Adafactor"])
def test_training_state_comes_back_exactly(optimizer_name, dtype):
    model, optimizer, scheduler = trained(optimizer_name, dtype=dtype)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = stored(tree)
    assert fingerprint(back) == fingerprint(tree)
    optimizer.load_state_dict(back["optimizer"])
    scheduler.load_state_dict(back["scheduler"])
    model.load_state_dict(back["model"])
    assert isinstance(back["scheduler"]["milestones"], Counter)


@pytest.mark.parametrize("enabled", [True, False])
def test_scaler_state_comes_back_exactly(enabled):
    state = torch.amp.GradScaler("cpu", enabled=enabled).state_dict()
    assert fingerprint(stored(state)) == fingerprint(state)


def test_tied_weights_stay_tied_through_a_file(weight):
    back = stored({"embed": weight, "head": weight.detach(), "rows": weight[10:20]})
    back["embed"][10, 0] = 7.0
    assert back["head"][10, 0] == 7.0
    assert back["rows"][0, 0] == 7.0
    assert encode_file({"embed": weight, "head": weight.detach()}, {}).report[0].bytes_in == weight.nbytes


def test_small_view_stores_what_it_spans():
    large = torch.randn(1_000_000)
    assert len(encoded_bytes(encode_file({"view": large[:10]}, {}))) < 3000


def test_equal_trees_give_equal_bytes(weight):
    tree = {"b": weight, "a": [weight[3:5], 0.1, None], "c": torch.zeros(3)}
    first = encoded_bytes(encode_file(tree, {}))
    assert encoded_bytes(encode_file(tree, {})) == first
    same = {"b": weight.clone(), "a": [None, 0.1, None], "c": torch.zeros(3)}
    same["a"][0] = same["b"][3:5]
    assert encoded_bytes(encode_file(same, {})) == first


def test_smallest_candidate_wins_and_the_earlier_one_in_a_tie(weight):
    plan = {("w",): planned(RAW, PLANES)}
    assert only_codec(encode_file({"w": weight}, plan)) == "planes"
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    sizes = [codec.encode(noise).payload_bytes for codec in (RAW, PLANES)]
    assert sizes[0] <= sizes[1]
    assert only_codec(encode_file({"w": noise}, plan)) == "raw"
    assert only_codec(encode_file({"w": noise}, {("w",): planned(RAW, RAW)})) == "raw"


class Sized(type(RAW)):
    """Takes as many bytes as planes does, and some more."""

    more_bytes = 0

    def _encode(self, tensor, references):
        size_bytes = PLANES.encode(tensor).payload_bytes + self.more_bytes
        return EncodedTensor([torch.zeros(size_bytes, dtype=torch.uint8)], {})


@pytest.mark.parametrize(
    ("more_bytes", "after", "before"), [(-1, "raw", "raw"), (0, "planes", "raw"), (1, "planes", "planes")]
)
def test_a_codec_that_gives_up_early_wins_where_it_would_have_won(more_bytes, after, before, monkeypatch, weight):
    monkeypatch.setattr(Sized, "more_bytes", more_bytes)
    assert only_codec(encode_file({"w": weight}, {("w",): planned(PLANES, Sized())})) == after
    assert only_codec(encode_file({"w": weight}, {("w",): planned(Sized(), PLANES)})) == before


def test_tensor_without_a_plan_is_exact_and_never_larger_than_it_was():
    report = encode_file({"small": torch.tensor(3.0), "large": torch.zeros(5000)}, {}).report
    assert [(entry.codec, entry.role, entry.bound) for entry in report] == [
        ("raw", "other", None),
        ("planes", "other", None),
    ]
    assert all(entry.bytes_out <= entry.bytes_in for entry in report)


def test_codec_that_refuses_the_dtype_is_passed_over():
    encoded = encode_file({"w": torch.arange(5000)}, {("w",): planned(LOSSY)})
    assert only_codec(encoded) == "planes"
    assert encoded.report[0].bound is None


def test_codec_that_refuses_the_values_is_passed_over(weight):
    weight[3, 3] = torch.nan
    tree, plan = {"w": weight}, {("w",): planned(CODECS["grouped"]())}
    assert only_codec(encode_file(tree, plan)) == "planes"
    assert fingerprint(stored(tree, plan)) == fingerprint(tree)


def test_lossy_codec_touches_a_tied_weight_once(weight):
    encoded = encode_file({"embed": weight, "head": weight.detach()}, {("head",): planned(LOSSY)})
    (entry,) = encoded.report
    assert (entry.codec, entry.path, entry.name) == ("delta-uniform", "embed", "w")
    back = stored({"embed": weight, "head": weight.detach()}, {("head",): planned(LOSSY)})
    assert back["head"].data_ptr() == back["embed"].data_ptr()
    assert 0 < (back["embed"] - weight).abs().max() <= entry.bound <= 1e-2


@pytest.mark.parametrize(
    "tree",
    [
        lambda w: {"w": w.t()},
        lambda w: {"w": w[::2]},
        lambda w: {"w": w, "part": w[:3]},
        lambda w: {"w": w, "flat": w.view(-1)},
        lambda w: {"w": w.view(4, 4, 20, 16).to(memory_format=torch.channels_last)},
    ],
    ids=["transposed", "strided", "overlapped", "reshaped", "channels-last"],
)
def test_lossy_codec_leaves_alone_what_does_not_own_its_memory(tree, weight):
    value = tree(weight)
    encoded = encode_file(value, {("w",): planned(LOSSY)})
    assert only_codec(encoded) == "planes"
    assert fingerprint(stored(value, {("w",): planned(LOSSY)})) == fingerprint(value)


def adam_tree():
    torch.manual_seed(0)
    exp_avg, exp_avg_sq = torch.randn(80, 64) * 1e-3, torch.randn(80, 64).square() * 1e-6
    return {"state": {0: {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}}


ADAM_PLAN = {
    ("state", 0, "exp_avg"): planned(CODECS["update-space"](), exp_avg_sq=("state", 0, "exp_avg_sq")),
    ("state", 0, "exp_avg_sq"): planned(CODECS["log-rank1"]()),
}


def test_exp_avg_is_coded_in_units_of_the_decoded_exp_avg_sq():
    tree = adam_tree()
    back, state = stored(tree, ADAM_PLAN)["state"][0], tree["state"][0]
    assert not torch.equal(back["exp_avg_sq"], state["exp_avg_sq"])
    codec = CODECS["update-space"]
    encoded = codec().encode(state["exp_avg"], {"exp_avg_sq": back["exp_avg_sq"]})
    references = {"exp_avg_sq": back["exp_avg_sq"]}
    expected = codec.decode(encoded.payloads, encoded.params, [80, 64], torch.float32, references)
    assert torch.equal(back["exp_avg"], expected)


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_both_moments_are_encoded_as_each_one_would_be_alone(dtype):
    torch.manual_seed(0)
    exp_avg, exp_avg_sq = (torch.randn(600, 500) * 1e-3).to(dtype), torch.rand(600, 500).to(dtype)  # two tiles
    exp_avg_sq[::7, 3] = 0
    exp_avg_sq[5, :4] = exp_avg[9, :4] = torch.tensor([torch.nan, torch.inf, -1.0, 1e-7])
    tree = {"state": {0: {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}}
    second, first = CODECS["log-rank1"](), CODECS["update-space"]()
    alone = second.encode(exp_avg_sq)
    decoded = second.decode(alone.payloads, alone.params, exp_avg_sq.shape, dtype)
    expected = [alone, first.encode(exp_avg, {"exp_avg_sq": decoded})]
    encoded = encode_file(tree, ADAM_PLAN)
    pieces = cut_payload(open_structure(encoded.structure), encoded.payload)
    assert [entry.bound for entry in encoded.report] == [each.bound for each in expected]
    assert [[piece.tolist() for piece in each] for each in pieces] == [
        [piece.tolist() for piece in each.payloads] for each in expected
    ]


def test_encoding_both_moments_takes_no_decoded_copy_of_one():
    n = 1 << 23
    exp_avg_sq = torch.rand(n // 2048, 2048)
    tree = {"state": {0: {"exp_avg": exp_avg_sq * 0.1, "exp_avg_sq": exp_avg_sq}}}
    tracemalloc.start()
    encode_file(tree, ADAM_PLAN)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Levels take two bytes an element of each; one more is set aside for a payload, and a thread computes in 8 MB.
    assert peak_bytes < 6.5 * n


def test_exp_avg_sq_comes_first_in_the_file_and_tree_order_is_kept():
    encoded = encode_file(adam_tree(), ADAM_PLAN)
    assert [entry.path for entry in encoded.report] == ["state.0.step", "state.0.exp_avg_sq", "state.0.exp_avg"]
    assert list(stored(adam_tree(), ADAM_PLAN)["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]


def test_exp_avg_without_its_second_moment_is_exact():
    tree = adam_tree()
    del tree["state"][0]["exp_avg_sq"]
    assert fingerprint(stored(tree, ADAM_PLAN)) == fingerprint(tree)


@pytest.mark.parametrize("tied", [False, True])
def test_exp_avg_whose_second_moment_has_another_layout_is_exact(tied):
    tree = adam_tree()
    state = tree["state"][0]
    state["exp_avg_sq"] = state["exp_avg_sq"].t().contiguous().t() if not tied else state["exp_avg_sq"][:40]
    back = stored(tree, ADAM_PLAN)["state"][0]
    assert fingerprint(back["exp_avg"]) == fingerprint(state["exp_avg"])


def test_weight_is_stored_against_the_decoded_anchor(tmp_path, weight):
    anchor = Anchor(write_anchor(tmp_path, {"w": weight}))
    moved = {"w": weight + 1e-7 * torch.randn_like(weight)}
    encoded = encode_file(moved, {("w",): planned(DELTA, anchor="w")}, anchor=anchor)
    assert encoded.anchor_sha256 == anchor.sha256
    assert open_structure(encoded.structure)["anchor"] == {"sha256": anchor.sha256, "path": str(anchor.path)}
    assert encoded.report[0].bytes_out < 0.6 * PLANES.encode(moved["w"]).payload_bytes
    assert fingerprint(torch.load(io.BytesIO(encoded_bytes(encoded)), weights_only=True)) == fingerprint(moved)


def test_anchor_in_bfloat16_serves_a_float32_weight(tmp_path, weight):
    anchor = Anchor(write_anchor(tmp_path, {"w": weight.bfloat16()}))
    tree, plan = {"w": weight}, {("w",): planned(LOSSY, anchor="w")}
    back = stored(tree, plan, anchor=anchor)
    assert 0 < (back["w"] - weight).abs().max() <= 1e-2


@pytest.mark.parametrize(
    "in_anchor",
    [{"other": torch.zeros(80, 64)}, {"w": torch.zeros(64, 80)}, {"w": torch.zeros(80, 64, dtype=torch.int32)}],
    ids=["name", "shape", "dtype"],
)
def test_file_that_gains_nothing_from_the_anchor_does_not_need_it(in_anchor, tmp_path, weight):
    path = write_anchor(tmp_path, in_anchor)
    plan = {("w",): planned(DELTA, LOSSY, anchor="w")}
    encoded = encode_file({"w": weight}, plan, anchor=Anchor(path))
    assert encoded.anchor_sha256 is None
    path.unlink()
    assert fingerprint(torch.load(io.BytesIO(encoded_bytes(encoded)), weights_only=True)) == fingerprint({"w": weight})


def test_an_anchor_is_recorded_under_its_digest_where_it_will_lie(tmp_path, weight):
    anchor = Anchor(write_anchor(tmp_path, {"w": weight}))
    plan = {("w",): planned(DELTA, anchor="w")}
    for directory, options in ((tmp_path, {}), (tmp_path / "5", {"anchor_directory": tmp_path / "5"})):
        encoded = encode_file({"w": weight}, plan, anchor=anchor, **options)
        assert open_structure(encoded.structure)["anchor"]["path"] == str(directory / anchor.path.name)


def test_weight_without_an_anchor_keeps_the_bound_it_states(weight):
    tree, plan = {"w": weight}, {("w",): planned(PLANES, LOSSY)}
    back, (entry,) = stored(tree, plan), encode_file(tree, plan).report
    assert 0 < (back["w"] - weight).abs().max() <= entry.bound <= 1e-2
    assert (entry.codec, entry.params["anchor"]) == ("delta-uniform", False)
    assert entry.bytes_out < 0.45 * weight.nbytes


@pytest.mark.parametrize("change", [lambda w: w.fill_(3.4e38), lambda w: w.fill_(torch.nan)], ids=["large", "nan"])
def test_weight_that_no_step_suits_stays_exact(change, weight):
    tree = {"w": change(weight)}
    plan = {("w",): planned(PLANES, LOSSY)}
    assert fingerprint(stored(tree, plan)) == fingerprint(tree)
    assert encode_file(tree, plan).report[0].bound is None


@pytest.mark.parametrize("tree", [{}, {"a": torch.arange(9.0)}, {name: torch.ones(5000) * 0.1 for name in "abcd"}])
def test_a_written_file_has_the_records_that_torch_save_makes_of_the_same_tree_in_memory(tree):
    saved, written = (
        zipfile.ZipFile(io.BytesIO(data)) for data in (encoded_bytes(encode_file(tree, {})), written_bytes(tree))
    )
    assert written.testzip() is None
    assert written.namelist() == [f"archive/{name}" for name in ("data/0", "data.pkl", "byteorder", "version")]
    assert all(written.read(name) == saved.read(name) for name in written.namelist())


def test_inputs_are_only_read(weight):
    tree = {"w": weight, "state": {0: torch.ones(3)}}
    before = fingerprint(tree)
    encode_file(tree, {("w",): planned(LOSSY)})
    assert fingerprint(tree) == before


def test_value_that_cannot_be_stored_is_named():
    with pytest.raises(UnstorableError, match=r"^state\.0\.fn: .* found builtins.builtin_function_or_method"):
        encode_file({"state": {0: {"fn": len}}}, {})


def test_parameters_with_gradients_are_stored_without_their_graph(weight):
    parameter = torch.nn.Parameter(weight)
    parameter.square().sum().backward()
    back = stored({"w": parameter, "p": [parameter]})
    assert isinstance(back["w"], torch.nn.Parameter)
    assert back["w"] is back["p"][0]
    assert back["w"].grad is None


def test_file_without_tensors_and_empty_tensors_work():
    for tree in ({}, {"epoch": 3}, {"empty": torch.empty(0, 3)}, torch.ones(2), []):
        assert fingerprint(stored(tree)) == fingerprint(tree)


def test_save_writes_through_a_file_that_cannot_seek(weight):
    chunks = []

    class WriteOnly(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            chunks.append(bytes(data))
            return len(data)

    with io.BufferedWriter(WriteOnly()) as file:
        encode_file({"w": weight}, {}, file)
    assert b"".join(chunks) == written_bytes({"w": weight})
