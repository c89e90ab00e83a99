"""A tokenizer as llama.cpp reads it: tokens and merges of a byte-level one, scores of one in SentencePiece's manner."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import gguf
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.gguf.pre_tokenizers import pre_tokenizer_name, unsupported_tokenizer

_SPECIAL = ("bos", "eos", "unk", "pad")
# How SentencePiece writes a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# What these normalizers do llama.cpp does too, except NFC, which leaves most text as it is.
_BYTE_LEVEL_NORMALIZERS = ([], ["NFC"])


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a saved model.

    Args:
        source: Directory or Hub id.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        # The tokenizers library raises no narrower class, and a damaged file whatever it runs into.
        reason = f"{type(error).__name__}: " + str(error).strip().partition("\n")[0].rstrip(".:")
        next_step = "Save the tokenizer there, or pass it: export_gguf(model, out, tokenizer)."
        raise ConfigError(source, "a tokenizer, without which llama.cpp reads no text", reason, next_step) from error


def describe_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, size: int
) -> None:
    """Write a tokenizer and its chat template.

    Args:
        writer: Where to.
        tokenizer: The tokenizer.
        config: Of the model, for special tokens that the tokenizer does not name.
        size: How many tokens the model has embeddings for. Those that the tokenizer lacks are written as unused.

    Raises:
        ConfigError: The tokenizer has more tokens than that, or no end of text, or is none of the library tokenizers.
        UnsupportedError: llama.cpp would split text in another way.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        next_step = "Save it as tokenizer.json, or load another class of it."
        raise ConfigError("tokenizer", "one of the library tokenizers", type(tokenizer).__name__, next_step)
    stored = json.loads(backend.to_str())
    tokens, kinds = _tokens(tokenizer, size)
    model = stored["model"]
    settings = {key: model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    if model["type"] != "BPE" or any(settings.values()):
        raise unsupported_tokenizer("a BPE tokenizer without dropout and affixes", f"{model['type']} with {settings}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model["byte_fallback"]:
        _describe_sentencepiece(writer, stored, tokens, kinds, merges)
    else:
        _describe_byte_level(writer, stored, merges)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _describe_special_tokens(writer, tokenizer, config)
    if isinstance(template := tokenizer.chat_template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the tokens in the order of their numbers, and what each is for."""
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    if (largest := max(by_number, default=-1)) >= size:
        next_step = "Call model.resize_token_embeddings(len(tokenizer)) before the model is quantized."
        raise ConfigError("tokenizer", f"{size} tokens at most, which the model embeds", f"{largest + 1}", next_step)
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [gguf.TokenType.NORMAL if number in by_number else gguf.TokenType.UNUSED for number in range(size)]
    for number, added in tokenizer.added_tokens_decoder.items():
        tokens[number] = added.content
        kinds[number] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    return tokens, kinds


def _describe_byte_level(writer: gguf.GGUFWriter, stored: dict[str, Any], merges: Sequence[Sequence[str]]) -> None:
    normalizers = [each["type"] for each in _steps(stored["normalizer"], "normalizers")]
    if normalizers not in _BYTE_LEVEL_NORMALIZERS:
        raise unsupported_tokenizer("no normalizer, or NFC", " and ".join(normalizers))
    if not any(each["type"] == "ByteLevel" for each in _steps(stored["pre_tokenizer"], "pretokenizers")):
        raise unsupported_tokenizer("a tokenizer of bytes", "one of characters")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(stored))
    writer.add_token_merges([" ".join(merge) for merge in merges])


def _describe_sentencepiece(
    writer: gguf.GGUFWriter,
    stored: dict[str, Any],
    tokens: list[str],
    kinds: list[gguf.TokenType],
    merges: Sequence[Sequence[str]],
) -> None:
    """Write scores, and mark bytes, spaces and the unknown token as llama.cpp expects them."""
    prefix = _adds_space(stored)
    scores = _scores(tokens, kinds, merges)
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


def _adds_space(stored: dict[str, Any]) -> bool:
    """Return whether text gets a space in front."""
    prefix, unknown = False, []
    for step in _steps(stored["normalizer"], "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step != {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}:
            unknown.append(step)
    for step in _steps(stored["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step["split"]:
            prefix = prefix or step["prepend_scheme"] != "never"
        else:
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


def _describe_special_tokens(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> None:
    numbers = {}
    for name in _SPECIAL:
        number = getattr(tokenizer, f"{name}_token_id", None)
        number = getattr(config, f"{name}_token_id", None) if number is None else number
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            numbers[name] = number
            getattr(writer, f"add_{name}_token_id")(number)
    if "eos" not in numbers:
        # llama.cpp would stop at token 11 or 2.
        next_step = "Set tokenizer.eos_token, and save the tokenizer."
        raise ConfigError("tokenizer", "a token for the end of text", "none", next_step)
    begins, ends = _added(tokenizer, numbers)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)


def _added(tokenizer: PreTrainedTokenizerBase, numbers: dict[str, int]) -> tuple[bool, bool]:
    """Return whether a tokenizer puts its first and last special token around a text."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for begins in (False, True):
        for ends in (False, True):
            if whole == [numbers.get("bos")] * begins + bare + [numbers["eos"]] * ends:
                return begins, ends
    added = tokenizer.convert_ids_to_tokens(whole)
    raise unsupported_tokenizer("at most the begin and the end of text around a text", f"{added} for 'a'")


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for each in step[key] for inner in _steps(each, key)] if step["type"] == "Sequence" else [step]
