import hashlib
import json

import pytest

from hf_trainweights.files.reading import is_signed, sign_json


def test_the_digest_is_that_of_the_text_without_it():
    text = sign_json({"b": 1.5, "a": ["é", None]})
    digest = json.loads(text)["sha256"]
    assert text.startswith(b'{\n  "a": [\n    "\\u00e9",\n    null\n  ],\n  "b": 1.5,\n  "sha256": "')
    assert hashlib.sha256(text.replace(digest.encode(), b"")).hexdigest() == digest


def test_what_lies_deep_is_on_one_line():
    row = {"bound": None, "name": "a\n          {b}", "params": {"step": [1, 2]}}
    content = {"files": {"a.bin": {"report": {"tensors": [row, row]}, "sha256": "00"}}}
    text = sign_json(content).decode()
    assert {**json.loads(text), "sha256": ""} == {**content, "sha256": ""}
    assert len([line for line in text.splitlines() if line.startswith(" " * 10)]) == 2
    assert is_signed(text.encode(), json.loads(text))


def test_only_the_digest_of_the_object_itself_is_replaced():
    nested = {"sha256": "", "text": '\n  "sha256": ""'}
    content = json.loads(sign_json({"a": nested, "b": [nested], "sha256": "old"}))
    assert content["a"] == nested
    assert content["b"] == [nested]
    assert len(content["sha256"]) == 64


def test_signing_what_was_read_gives_the_same_bytes():
    text = sign_json({"step": 3})
    assert is_signed(text, json.loads(text))
    assert sign_json(json.loads(text)) == text


@pytest.mark.parametrize("position", range(0, 95, 7))
def test_a_changed_byte_is_no_longer_signed(position):
    text = bytearray(sign_json({"step": 3}))
    content = json.loads(text)
    text[position] ^= 1
    assert not is_signed(bytes(text), content)


def test_the_same_object_in_another_layout_is_not_signed():
    content = json.loads(sign_json({"step": 3}))
    assert not is_signed(json.dumps(content).encode(), content)
