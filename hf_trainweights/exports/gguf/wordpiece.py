"""A WordPiece tokenizer as llama.cpp reads it: the beginnings of words marked, where Transformers marks the rest."""

from __future__ import annotations

from typing import Any

import gguf

from hf_trainweights.exports.gguf.pre_tokenizers import unsupported_tokenizer

# How llama.cpp writes the beginning of a word, and Transformers all but the beginning.
_BEGIN, _REST = "\N{LOWER ONE EIGHTH BLOCK}", "##"
_NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
# gguf 0.19 does not name them. Versions of llama.cpp that do not know them always do both.
_LOWERCASE, _STRIP_ACCENTS = "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"


def describe_wordpiece(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write how a tokenizer.json normalizes text, and rename tokens, in place, to mark them as llama.cpp expects."""
    normalizer = stored["normalizer"] or {}
    if {key: normalizer.get(key) for key in _NORMALIZER} != _NORMALIZER:
        raise unsupported_tokenizer("text to be normalized as by BERT", str(stored["normalizer"]))
    if stored["pre_tokenizer"] != {"type": "BertPreTokenizer"}:
        raise unsupported_tokenizer("words to be split as by BERT", str(stored["pre_tokenizer"]))
    if stored["model"]["continuing_subword_prefix"] != _REST:
        raise unsupported_tokenizer(f"{_REST} inside words", repr(stored["model"]["continuing_subword_prefix"]))
    for number, token in enumerate(tokens):
        if kinds[number] == gguf.TokenType.NORMAL:
            tokens[number] = token.removeprefix(_REST) if token.startswith(_REST) else _BEGIN + token
    lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    writer.add_bool(_LOWERCASE, lowercase)
    writer.add_bool(_STRIP_ACCENTS, lowercase if strips is None else strips)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
