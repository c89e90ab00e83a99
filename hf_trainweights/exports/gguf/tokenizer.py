"""Write a tokenizer for llama.cpp: its tokens, their types, and the way in which text becomes tokens.

A byte-level tokenizer splits text by regular expressions before it merges tokens. llama.cpp has several sets of these
expressions built in, and a file names one set. llama.cpp's own converter recognizes the set by the hash of one encoded
text. This module compares the expressions, so it also recognizes a tokenizer that was trained anew. Tokenizers from
SentencePiece have scores, by which llama.cpp chooses the tokens of a text.
Names: `src/llama-vocab.cpp` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import gguf
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports.gguf.architectures import unsupported

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Lists of normalizers that a file may leave out. llama.cpp has no NFC, but NFC leaves most text as it is.
_BYTE_LEVEL_NORMALIZERS = ([], ["NFC"])

# BERT's tokenizers put this before each token that continues a word.
_INSIDE = "##"
_NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
# gguf 0.19 has no names for these keys. Versions of llama.cpp that do not know them always do both.
_LOWERCASE, _STRIP_ACCENTS = "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"

# SentencePiece writes this character for a space, and llama.cpp for the beginning of a word.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_REPLACES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
# Gemma's step, which has no effect, because `_REPLACES_SPACES` has replaced all spaces before.
_SPLITS_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_MARKS_WORDS = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}

_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)

# llama.cpp's names, by the expressions in order and whether a piece of text that is a token stays whole without merges.
_NAMES = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
    ((_PUNCTUATION, _GPT2, _DIGITS, _THREE_DIGITS), False): "falcon",
}


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model by directory or Hub id; ConfigError: it is missing or damaged."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except Warning:
        raise
    except Exception as error:
        # The tokenizers library raises plain Exceptions, and a damaged file may cause an error of any class.
        reason = f"{type(error).__name__}: " + str(error).strip().partition("\n")[0].rstrip(".:")
        next_step = "Save the tokenizer there. Or pass it: export_gguf(model, out, tokenizer)."
        raise ConfigError(source, "a tokenizer, without which llama.cpp reads no text", reason, next_step) from error


def describe_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, size: int
) -> None:
    """Write a tokenizer, with as many tokens as the model embeds (`size`), and its chat template.

    Numbers without a token get unused tokens. Special tokens that the tokenizer does not name come from `config`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        next_step = "Save it as tokenizer.json, or load another class of it."
        raise ConfigError("tokenizer", "one of the library tokenizers", type(tokenizer).__name__, next_step)
    stored = json.loads(backend.to_str())
    tokens, kinds = _tokens(tokenizer, size)
    kind = stored["model"]["type"]
    describe = {"WordPiece": _describe_wordpiece, "Unigram": _describe_unigram}.get(kind, _describe_bpe)
    describe(writer, stored, tokens, kinds)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _describe_special_tokens(writer, tokenizer, config, is_wordpiece=kind == "WordPiece")
    if isinstance(template := tokenizer.chat_template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the tokens in the order of their numbers, and their types."""
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    if (largest := max(by_number, default=-1)) >= size:
        next_step = (
            "Resize the float model to its tokenizer, and quantize that. "
            "model.resize_token_embeddings(len(tokenizer)) does it."
        )
        raise ConfigError("tokenizer", f"{size} tokens at most, which the model embeds", f"{largest + 1}", next_step)
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [gguf.TokenType.NORMAL if number in by_number else gguf.TokenType.UNUSED for number in range(size)]
    for number, added in tokenizer.added_tokens_decoder.items():
        tokens[number] = added.content
        kinds[number] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    return tokens, kinds


def _describe_bpe(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    model = stored["model"]
    settings = {key: model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    if model["type"] != "BPE" or any(settings.values()):
        expected = "a tokenizer of the kind BPE, without dropout and affixes, Unigram or WordPiece"
        raise _unsupported(expected, f"{model['type']} with {settings}")
    if model["byte_fallback"]:
        _describe_sentencepiece_bpe(writer, stored, tokens, kinds)
        return
    normalizers = [step["type"] for step in _steps(stored["normalizer"], "normalizers")]
    if normalizers not in _BYTE_LEVEL_NORMALIZERS:
        raise _unsupported("no normalizer, or NFC", " and ".join(normalizers))
    if not any(step["type"] == "ByteLevel" for step in _steps(stored["pre_tokenizer"], "pretokenizers")):
        raise _unsupported("a tokenizer of bytes", "one of characters")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(stored))
    writer.add_token_merges([" ".join(merge) for merge in _merges(stored)])


def pre_tokenizer_name(stored: dict[str, Any]) -> str:
    """Return llama.cpp's name for the expressions by which a byte-level tokenizer.json splits text."""
    steps = _steps(stored["pre_tokenizer"], "pretokenizers")
    key = tuple(expression for step in steps for expression in _expressions(step)), stored["model"]["ignore_merges"]
    if key not in _NAMES:
        description = f"{' then '.join(key[0])!r}{', tokens before merges' if key[1] else ''}"
        raise _unsupported(f"text to be split as by {', '.join(_NAMES.values())}", description)
    return _NAMES[key]


def _expressions(step: dict[str, Any]) -> list[str]:
    """Return the expressions by which a step splits text, or the step as text if it does anything else."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2] if step["use_regex"] else []
    if step["type"] == "Digits":
        return [_DIGIT if step["individual_digits"] else _DIGITS]
    if step["type"] == "Punctuation" and step["behavior"] == "Contiguous":
        return [_PUNCTUATION]
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return [step["pattern"].get("Regex", f"the text {step['pattern']}")]
    return [str(step)]


def _describe_sentencepiece_bpe(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write scores that give the order of merges, and mark spaces, bytes and the unknown token in place."""
    prefix = _adds_space(stored)
    scores = _scores(tokens, kinds, _merges(stored))
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
    """Return whether the tokenizer puts a space before a text."""
    prefix, unknown = False, []
    for step in _steps(stored["normalizer"], "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step != _REPLACES_SPACES:
            unknown.append(step)
    for step in _steps(stored["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step["split"]:
            prefix = prefix or step["prepend_scheme"] != "never"
        elif step != _SPLITS_SPACES or _REPLACES_SPACES not in _steps(stored["normalizer"], "normalizers"):
            unknown.append(step)
    if unknown:
        raise _unsupported("spaces to be replaced as by SentencePiece, and nothing else", str(unknown))
    return prefix


def _scores(tokens: list[str], kinds: list[gguf.TokenType], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return scores with which llama.cpp joins tokens in the order of the merges.

    llama.cpp joins any two neighbours that make a token, best score first. The merges give the same tokens on two
    conditions: each pair of tokens that make a token is a merge, and merges that make the same token stand side by side
    in the list. Merges that Transformers made from scores meet both.
    """
    pairs = {(left, right) for left, right in merges}
    merged_tokens = ["".join(merge) for merge in merges]
    order = [token for token, _ in groupby(merged_tokens)]
    vocabulary = {token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.NORMAL}
    missing = [
        token
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary and (token[:cut], token[cut:]) not in pairs
    ]
    if missing or len(order) != len(set(order)):
        fault = f"merges in another order{f', and none for {sorted(missing)[:3]}' if missing else ''}"
        raise _unsupported("merges in the order of scores, one for each way to a token", fault)
    scores = {token: -float(rank) for rank, token in enumerate(order)}
    return [scores.get(token, 0.0) for token in tokens]


def _merges(stored: dict[str, Any]) -> list[Sequence[str]]:
    """Return the merges of a BPE tokenizer.json as pairs of tokens."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in stored["model"]["merges"]]


def _describe_unigram(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write the scores of a Unigram tokenizer.json, and mark the unknown token in `kinds`.

    The tokenizer chooses the tokens of a text with the largest sum of scores.
    """
    model, normalizers = stored["model"], _steps(stored["normalizer"], "normalizers")
    if model["byte_fallback"] or model["unk_id"] is None:
        raise _unsupported("a token for unknown characters", "bytes" if model["byte_fallback"] else "none")
    pre_tokenizers = _steps(stored["pre_tokenizer"], "pretokenizers")
    # llama.cpp splits words at spaces alone. SentencePiece's map of characters turns line ends into spaces.
    if [step["type"] for step in normalizers] != ["Precompiled"]:
        raise _unsupported("text to be normalized by SentencePiece's map of characters", str(normalizers)[:200])
    if pre_tokenizers != [{"type": "WhitespaceSplit"}, _MARKS_WORDS]:
        raise _unsupported("a mark before each word, split at spaces", str(pre_tokenizers))
    kinds[model["unk_id"]] = gguf.TokenType.UNKNOWN
    scores = [score for _, score in model["vocab"]]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores + [0.0] * (len(tokens) - len(scores)))
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(base64.b64decode(normalizers[0]["precompiled_charsmap"]))


def _describe_wordpiece(
    writer: gguf.GGUFWriter, stored: dict[str, Any], tokens: list[str], kinds: list[gguf.TokenType]
) -> None:
    """Write the normalization of a WordPiece tokenizer.json, and change `tokens` to mark words as llama.cpp expects."""
    normalizer = stored["normalizer"] or {}
    if {key: normalizer.get(key) for key in _NORMALIZER} != _NORMALIZER:
        raise _unsupported("text to be normalized as by BERT", str(stored["normalizer"]))
    if stored["pre_tokenizer"] != {"type": "BertPreTokenizer"}:
        raise _unsupported("words to be split as by BERT", str(stored["pre_tokenizer"]))
    if stored["model"]["continuing_subword_prefix"] != _INSIDE:
        raise _unsupported(f"{_INSIDE} inside words", repr(stored["model"]["continuing_subword_prefix"]))
    for number, token in enumerate(tokens):
        if kinds[number] == gguf.TokenType.NORMAL:
            tokens[number] = token.removeprefix(_INSIDE) if token.startswith(_INSIDE) else _SPACE + token
    lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    writer.add_bool(_LOWERCASE, lowercase)
    writer.add_bool(_STRIP_ACCENTS, lowercase if strips is None else strips)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer. A sequence, which has steps under `key`, is flattened."""
    if step is None:
        return []
    return [inner for outer in step[key] for inner in _steps(outer, key)] if step["type"] == "Sequence" else [step]


def _describe_special_tokens(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, is_wordpiece: bool
) -> None:
    numbers = {}
    for name in _SPECIAL:
        number = getattr(tokenizer, f"{name}_token_id", None)
        number = getattr(config, f"{name}_token_id", None) if number is None else number
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            numbers[name] = number
    # llama.cpp always calls the first token of a text bos, and the last token of a WordPiece text sep.
    first, last = ("cls", "sep") if is_wordpiece else ("bos", "eos")
    if last not in numbers:
        # llama.cpp would take token 11 or 2 for the end of text.
        next_step = f"Set tokenizer.{last}_token, and save the tokenizer."
        raise ConfigError("tokenizer", "a token for the end of text", "none", next_step)
    begins, ends = _added(tokenizer, numbers.get(first), numbers[last])
    if is_wordpiece and not (begins and ends):
        raise _unsupported("the tokens cls and sep around a text", "a text without one of them")
    written = numbers | ({"bos": numbers["cls"]} if is_wordpiece else {})
    for name, number in written.items():
        if name != "cls":
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends and not is_wordpiece)


def _added(tokenizer: PreTrainedTokenizerBase, first: int | None, last: int) -> tuple[bool, bool]:
    """Return whether a tokenizer puts a special token before a text, and whether it puts one behind the text."""
    bare, complete = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for begins in (False, True):
        for ends in (False, True):
            if complete == [first] * begins + bare + [last] * ends:
                return begins, ends
    added = tokenizer.convert_ids_to_tokens(complete)
    raise _unsupported("at most the begin and the end of text around a text", f"{added} for 'a'")


def _unsupported(expected: str, found: str) -> UnsupportedError:
    """Return the error for a tokenizer whose tokens llama.cpp would not reproduce."""
    return unsupported("tokenizer", expected, found, "llama.cpp would give the model other tokens. ")
