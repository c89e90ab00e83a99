"""Tokenizers that took their tokens from SentencePiece: scores that tell which of them text becomes."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import gguf

from hf_trainweights.exports.gguf.pre_tokenizers import steps, unsupported_tokenizer

# How SentencePiece writes a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_REPLACES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
# Gemma's, which finds no more spaces to split at.
_SPLITS_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_MARKS_WORDS = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}


def describe_unigram(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write the scores of a Unigram tokenizer.json, which takes the tokens whose scores add up to the most.

    The unknown token is marked in `kinds`.
    """
    model, normalizers = stored["model"], steps(stored["normalizer"], "normalizers")
    if model["byte_fallback"] or model["unk_id"] is None:
        raise unsupported_tokenizer("a token for unknown characters", "bytes" if model["byte_fallback"] else "none")
    pre_tokenizers = steps(stored["pre_tokenizer"], "pretokenizers")
    # Between words llama.cpp knows nothing but the space, which is what a map of characters makes of a line's end.
    if [each["type"] for each in normalizers] != ["Precompiled"]:
        raise unsupported_tokenizer(
            "text to be normalized by SentencePiece's map of characters", str(normalizers)[:200]
        )
    if pre_tokenizers != [{"type": "WhitespaceSplit"}, _MARKS_WORDS]:
        raise unsupported_tokenizer("a mark before each word, split at spaces", str(pre_tokenizers))
    kinds[model["unk_id"]] = gguf.TokenType.UNKNOWN
    scores = [score for _, score in model["vocab"]]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores + [0.0] * (len(tokens) - len(scores)))
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(base64.b64decode(normalizers[0]["precompiled_charsmap"]))


def describe_sentencepiece_bpe(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write scores that stand for the order of merges, and mark bytes, spaces and the unknown token, in place."""
    prefix = _adds_space(stored)
    scores = _scores(tokens, kinds, merges_of(stored))
    for number, token in enumerate(tokens):
        if kinds[number] == gguf.TokenType.USER_DEFINED:
            tokens[number] = token.replace(_SPACE, " ")
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[number] = gguf.TokenType.BYTE
        elif token == stored["model"]["unk_token"]:
            kinds[number] = gguf.TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(prefix)
    writer.add_token_scores(scores)


def merges_of(stored: dict[str, Any]) -> list[Sequence[str]]:
    """Return the merges of a BPE tokenizer.json, each the two tokens that are merged."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in stored["model"]["merges"]]


def _adds_space(stored: dict[str, Any]) -> bool:
    """Return whether text gets a space in front."""
    prefix, unknown = False, []
    for step in steps(stored["normalizer"], "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step != _REPLACES_SPACES:
            unknown.append(step)
    for step in steps(stored["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step["split"]:
            prefix = prefix or step["prepend_scheme"] != "never"
        elif step != _SPLITS_SPACES or _REPLACES_SPACES not in steps(stored["normalizer"], "normalizers"):
            unknown.append(step)
    if unknown:
        raise unsupported_tokenizer("spaces to be replaced as by SentencePiece, and nothing else", str(unknown))
    return prefix


def _scores(tokens: list[str], kinds: list[gguf.TokenType], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return scores by which llama.cpp merges in the order of the merges.

    It joins any two neighbours that make a token, the one with the best score first. That is the same if all such pairs
    are merges, and those that make the same token follow each other, as where Transformers has made merges of scores.
    """
    pairs = {(left, right) for left, right in merges}
    made = ["".join(merge) for merge in merges]
    order = [token for token, _ in groupby(made)]
    vocabulary = {token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.NORMAL}
    missing = [
        token
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary and (token[:cut], token[cut:]) not in pairs
    ]
    if missing or len(order) != len(set(order)):
        found = f"merges in another order{f', and none for {sorted(missing)[:3]}' if missing else ''}"
        raise unsupported_tokenizer("merges in the order of scores, one for each way to a token", found)
    scores = {token: -float(rank) for rank, token in enumerate(order)}
    return [scores.get(token, 0.0) for token in tokens]
