"""Files that lie: whatever `decode_file` is given, it gives a typed error or the truth, in little memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Call, encoded_bytes, fingerprint, small_tree, trained, write_anchor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.decoder import Anchor, decode_file
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.reader import load_file, read_structure
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.structure import payload_crc32
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.errors import CorruptFileError, TrainWeightsError


def forged(structure, payload=None):
    """The arguments of a call that has a right digest, whatever it says."""
    text = structure if isinstance(structure, str) else json.dumps(structure)
    payload = torch.zeros(0, dtype=torch.uint8) if payload is None else payload
    return payload, hashlib.sha256(text.encode()).hexdigest() + text


def read(encoded):
    return json.loads(encoded.structure[64:].replace("\u00b7", "."))


def honest(tree=None, plan=None):
    """A structure and a payload that decode."""
    encoded = encode_file(small_tree() if tree is None else tree, plan or {})
    return read(encoded), encoded.payload


def changed(change):
    structure, payload = honest()
    change(structure)
    return forged(structure, payload)


def test_forging_helper_is_honest_by_default():
    assert fingerprint(decode_file(*changed(lambda structure: None))) == fingerprint(small_tree())


def load_bytes(data):
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.slow
def test_truncated_file_is_a_typed_error_that_names_it(tmp_path):
    data = encoded_bytes(encode_file(small_tree(), {}))
    path = tmp_path / "optimizer.pt"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match=r"optimizer\.pt"):
            load_file(path)
        with pytest.raises(CorruptFileError, match=r"optimizer\.pt"):
            read_structure(path)


def test_damaged_payload_is_named_by_tensor_and_byte():
    structure, payload = honest()
    entry = structure["storages"][2]
    at = 32 + 16  # after the 4 bytes of step and the 20 of exp_avg, at the next multiples of 16
    payload[at] ^= 1
    with pytest.raises(CorruptFileError) as caught:
        decode_file(*forged(structure, payload))
    where = f"tensor state.0.exp_avg_sq, from byte {at} of the payload on: expected crc32 {entry['crc32']}, found"
    assert str(caught.value).startswith(where)
    assert "restore it from a copy" in caught.value.next_step


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((None, b"{}"), "the structure: expected a text"),
        ((None, None), "the structure: expected a text"),
        ((None, ""), "the structure: expected SHA-256 , found"),
        ((None, "0" * 64 + "{}"), "the structure: expected SHA-256 000"),
        ((None, "0" * 64 + "\ud800"), "the structure: expected SHA-256 000"),
        (forged("{"), "the structure: expected JSON"),
        (forged("[" * 100_000), "the structure: expected JSON"),
        (forged("9" * 5000), "the structure: expected JSON"),
        (forged("[]"), "the structure: expected version 1, found None"),
        (forged({}), "the structure: expected version 1, found None"),
        (forged({"version": 2}), "the structure: expected version 1, found 2. Upgrade hf_trainweights"),
        (forged({"version": "1"}), "the structure: expected version 1, found '1'"),
        (forged({"version": 1}), "the storages: expected a list"),
        (forged({"version": 1, "storages": {}}), "the storages: expected a list"),
        (forged({"version": 1, "storages": []}), "the table of tensors: expected a list"),
        (forged({"version": 1, "storages": [], "tensors": [], "tree": {"tensor": 0}}), "expected a node"),
    ],
)
def test_structure_that_is_none_is_refused(arguments, match):
    with pytest.raises(CorruptFileError, match=match):
        decode_file(*arguments)


@pytest.mark.parametrize(
    "payload",
    [
        None, [], b"", torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8),
        torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False), [torch.zeros(2, dtype=torch.uint8)],
        torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(1, dtype=torch.uint8).expand(4),
    ],
    ids=str,
)  # fmt: skip
def test_payload_that_is_none_is_refused(payload):
    with pytest.raises(CorruptFileError, match=r"the payload: expected a contiguous 1-D uint8 tensor"):
        decode_file(payload, changed(lambda structure: None)[1])


@pytest.mark.parametrize("length", [0, -1, 1, 64])
def test_payload_of_another_length_is_refused(length):
    structure, payload = honest()
    payload = payload[:length] if length < 1 else torch.cat([payload, payload[:length]])
    with pytest.raises(CorruptFileError, match=r"expected .* bytes"):
        decode_file(*forged(structure, payload))


HUGE = 1 << 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codec": "pickle"}, "tensor tied.0, codec: expected raw, .*, found pickle. Upgrade"),
        ({"codec": None}, "tensor tied.0, its storage: expected a codec and a dtype"),
        ({"codec": ["raw"]}, "tensor tied.0, its storage: expected a codec and a dtype"),
        ({"dtype": "float31"}, "tensor tied.0, dtype: expected .*, found float31"),
        ({"dtype": 3}, "tensor tied.0, its storage: expected a codec and a dtype"),
        ({"shape": [HUGE]}, "tensor tied.0, shape: expected no more than 48 stored bytes can hold"),
        ({"shape": [HUGE, HUGE]}, "tensor tied.0, shape: expected no more than 48 stored bytes can hold"),
        ({"shape": [1 << 70]}, "tensor tied.0, shape: expected integers from 0 to"),
        ({"shape": [-1]}, "tensor tied.0, shape: expected integers from 0 to"),
        ({"shape": [12.0]}, "tensor tied.0, shape: expected integers from 0 to"),
        ({"shape": [1] * 65}, "tensor tied.0, shape: expected a list of at most 64 integers"),
        ({"shape": 12}, "tensor tied.0, shape: expected a list"),
        ({"shape": [13]}, "tensor tied.0, codec raw, payload 0: expected 52 bytes, found 48 bytes"),
        ({"shape": [11]}, "tensor tied.0, codec raw, payload 0: expected 44 bytes, found 48 bytes"),
        ({"dtype": "bool"}, "tensor tied.0, codec raw, payload 0: expected 12 bytes, found 48 bytes"),
        ({"sizes": [HUGE]}, "tensor tied.0, from byte 80 of the payload on: expected .* bytes, found 48 bytes"),
        ({"sizes": [48, 0]}, "tensor tied.0, codec raw, payloads: expected 1, found 2"),
        ({"sizes": []}, "expected .* bytes|shape: expected"),
        ({"sizes": [-48]}, "tensor tied.0, sizes: expected integers from 0 to"),
        ({"sizes": "48"}, "tensor tied.0, sizes: expected a list"),
        ({"crc32": 0}, "tensor tied.0, from byte 80 of the payload on: expected crc32 0"),
        ({"crc32": None}, "tensor tied.0, its storage: expected a crc32"),
        ({"params": []}, "tensor tied.0, its storage: expected a crc32 and parameters"),
        ({"bound": "1"}, "tensor tied.0, bound: expected a finite number"),
        ({"bound": -1.0}, "tensor tied.0, bound: expected a finite number"),
        ({"bound": math.nan}, "tensor tied.0, bound: expected a finite number"),
        ({"bound": 10**400}, "tensor tied.0, bound: expected a finite number"),
        ({"anchor": "w"}, "tensor tied.0, anchor: expected a name in the file's anchor"),
        ({"exp_avg_sq": 3}, "tensor tied.0, exp_avg_sq: expected a storage below 3"),
        ({"exp_avg_sq": 99}, "tensor tied.0, exp_avg_sq: expected a storage below 3"),
        ({"exp_avg_sq": -1}, "tensor tied.0, exp_avg_sq: expected a storage below 3"),
        ({"exp_avg_sq": True}, "tensor tied.0, exp_avg_sq: expected a storage below 3"),
    ],
    ids=str,
)
def test_storage_that_lies_is_named(change, match):
    with pytest.raises(CorruptFileError, match=match) as caught:
        decode_file(*changed(lambda structure: structure["storages"][3].update(change)))
    assert caught.value.next_step


@pytest.mark.parametrize("entry", [None, 3, [], "raw", {}], ids=str)
def test_storage_that_is_no_entry_is_refused(entry):
    with pytest.raises(CorruptFileError, match=r"tensor tied\.0, its storage: expected a codec and a dtype"):
        decode_file(*changed(lambda structure: structure["storages"].__setitem__(3, entry)))


@pytest.mark.parametrize(
    ("anchor", "match"),
    [
        (None, "the anchor: expected a digest and a path"),
        ({"sha256": "0" * 64}, "the anchor: expected a digest and a path"),
        ({"sha256": "0" * 63, "path": "/x"}, "the anchor: expected a SHA-256 in hexadecimal"),
        ({"sha256": "../" + "0" * 61, "path": "/x"}, "the anchor: expected a SHA-256 in hexadecimal"),
        ({"sha256": "A" * 64, "path": "/x"}, "the anchor: expected a SHA-256 in hexadecimal"),
        ({"sha256": 3, "path": "/x"}, "the anchor: expected a SHA-256 in hexadecimal"),
        ({"sha256": "0" * 64, "path": "/etc/passwd"}, "the anchor's path: expected one without"),
        ({"sha256": "0" * 64, "path": f"/a/../{'0' * 64}.anchor"}, "the anchor's path: expected one without"),
        ({"sha256": "0" * 64, "path": f"C:\\a\\..\\{'0' * 64}.anchor"}, "the anchor's path: expected one without"),
        ({"sha256": "0" * 64, "path": f"\0/{'0' * 64}.anchor"}, "the anchor's path: expected one without"),
    ],
    ids=str,
)
def test_anchor_reference_that_is_none_is_refused(anchor, match):
    with pytest.raises(CorruptFileError, match=match):
        decode_file(*changed(lambda structure: structure.update(anchor=anchor)))


def test_exp_avg_sq_of_another_shape_is_refused():
    state = trained("AdamW")[1].state_dict()
    encoded = encode_file(state, Policy("compact").plan_optimizer(state))
    structure = read(encoded)
    user = next(entry for entry in structure["storages"] if "exp_avg_sq" in entry)
    user["exp_avg_sq"] = 0  # the step counter
    with pytest.raises(CorruptFileError, match=r"tensor state\.0\.exp_avg, codec update-space, reference exp_avg_sq"):
        decode_file(*forged(structure, encoded.payload))
    del user["exp_avg_sq"]
    with pytest.raises(CorruptFileError, match=r"tensor state\.0\.exp_avg, codec update-space"):
        decode_file(*forged(structure, encoded.payload))


def test_anchor_without_the_tensor_is_named(tmp_path):
    weights = {"w": torch.randn(80, 64)}
    anchor = Anchor(write_anchor(tmp_path, weights))
    plan = {("w",): TensorPlan("weight", "w", (CODECS["planes-delta"](),), anchor="w")}
    encoded = encode_file(weights, plan, anchor=anchor)
    structure = read(encoded)
    structure["storages"][0]["anchor"] = "gone"
    with pytest.raises(CorruptFileError, match=rf"{anchor.path.name}: expected an anchor that holds gone"):
        decode_file(*forged(structure, encoded.payload))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "references"),
    [
        (CODECS["planes"](), {}),
        (CODECS["log-rank1"](), {}),
        (CODECS["delta-uniform"].within(1e-3), {}),
        (CODECS["update-space"](), {"exp_avg_sq": torch.ones(64, 64)}),
        (CODECS["planes-delta"](), {}),
        (CODECS["grouped"](), {}),
    ],
    ids=lambda value: getattr(value, "codec_id", ""),
)
def test_payload_of_another_codec_or_shape_is_a_typed_error(codec, references):
    torch.manual_seed(0)
    encoded = codec.encode(torch.rand(64, 64), references)
    payload = torch.cat(encoded.payloads)
    for name in CODECS:
        for shape in ([64, 64], [64, 65], [4095], [0], [1 << 20]):
            for dtype in ("float32", "bfloat16", "uint8"):
                if (name, shape, dtype) == (codec.codec_id, [64, 64], "float32"):
                    continue
                entry = {
                    "codec": name,
                    "dtype": dtype,
                    "shape": shape,
                    "sizes": [len(payload)],
                    "crc32": payload_crc32([payload]),
                    "params": encoded.params,
                }
                structure = {"version": 1, "tree": {"tensor": 0}, "tensors": [{"storage": 0}], "storages": [entry]}
                with contextlib.suppress(CorruptFileError):  # whole bytes in another shape are no lie
                    assert decode_file(*forged(structure, payload)).shape == torch.Size(shape)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_change_of_a_structure_is_a_typed_error_or_a_tree(data):
    structure, payload = honest()
    holders = [structure]
    for holder in holders:
        children = holder.values() if isinstance(holder, dict) else holder
        holders.extend(child for child in children if isinstance(child, dict | list) and child)
    holder = data.draw(st.sampled_from(holders))
    key = data.draw(st.sampled_from(sorted(holder, key=str) if isinstance(holder, dict) else range(len(holder))))
    atoms = st.none() | st.booleans() | st.integers(-5, 1 << 64) | st.text(max_size=4) | st.just([]) | st.just({})
    holder[key] = data.draw(atoms | st.lists(st.integers(0, 1 << 40), max_size=3))
    with contextlib.suppress(CorruptFileError):
        decode_file(*forged(structure, payload))


def peak_bytes(call):
    """Peak of resident memory while `call` runs, above what there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident_bytes("VmRSS")
    call()
    return resident_bytes("VmHWM") - before


def resident_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark can be reset on Linux only")
@pytest.mark.parametrize("codec_id", ["planes", "log-rank1"])
@pytest.mark.parametrize("shape", [[1 << 36], [1, 1 << 36], [1 << 30, 1 << 6], [1 << 24], [1000]], ids=str)
def test_bomb_is_refused_in_little_memory(shape, codec_id):
    """Zeros compress a thousandfold: the file says that they are more, or fewer, than they are."""
    encoded = CODECS[codec_id]().encode(torch.zeros(1 << 22))
    assert encoded.payload_bytes < 1 << 14
    aligned = [torch.nn.functional.pad(piece, (0, -len(piece) % 16)) for piece in encoded.payloads]
    payload = torch.cat(aligned)[: sum(map(len, aligned[:-1])) + len(encoded.payloads[-1])]
    entry = {"codec": codec_id, "dtype": "float32", "shape": shape, "sizes": [len(piece) for piece in encoded.payloads]}
    entry |= {"crc32": payload_crc32(encoded.payloads), "params": encoded.params}
    structure = {"version": 1, "tree": {"tensor": 0}, "tensors": [{"storage": 0}], "storages": [entry]}

    def load():
        with pytest.raises(CorruptFileError, match="tensor the value itself"):
            decode_file(*forged(structure, payload))

    assert peak_bytes(load) < 160 << 20


def test_file_that_calls_us_in_its_own_way_is_a_typed_error(tmp_path):
    payload, text = forged({"version": 1, "storages": [], "tensors": [], "tree": [1]})

    for arguments in ((), (text,), (payload,), (payload, text, 1), (None, None), (text, payload)):
        torch.save(Call(*arguments), tmp_path / "call.pt")
        with pytest.raises(CorruptFileError, match=r"call\.pt"):
            load_file(tmp_path / "call.pt")
    # More than one call, or one inside something else, is only data.
    torch.save([Call(payload, text)] * 2, tmp_path / "twice.pt")
    assert load_file(tmp_path / "twice.pt") == [[1], [1]]
    with pytest.raises(CorruptFileError, match=r"twice\.pt: expected an encoded file"):
        read_structure(tmp_path / "twice.pt")


def test_every_error_of_this_package_is_one_of_its_own():
    structure, payload = honest()
    structure["storages"][0]["shape"] = [HUGE]
    file = io.BytesIO()
    data, text = forged(structure, payload)
    torch.save(Call(data, text), file)
    with pytest.raises(TrainWeightsError, match="shape: expected no more than 4 stored bytes can hold"):
        load_bytes(file.getvalue())
