"""How byte-level tokenizers split text before they merge, and what llama.cpp calls each way.

llama.cpp has these expressions built in and a file names one of them. Its own converter recognizes a tokenizer by the
hash of one encoded text; here the expressions themselves are compared, so a tokenizer that was trained anew is
recognized too.
Names: `src/llama-vocab.cpp` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from typing import Any

from hf_trainweights.errors import UnsupportedError

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

# The expressions in their order, and whether a piece that is a token is taken before any merge.
_NAMES = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
    ((_PUNCTUATION, _GPT2, _DIGITS, _THREE_DIGITS), False): "falcon",
}


def pre_tokenizer_name(stored: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer.json splits text."""
    found = steps(stored["pre_tokenizer"], "pretokenizers")
    key = tuple(expression for step in found for expression in _expressions(step)), stored["model"]["ignore_merges"]
    if key not in _NAMES:
        found = f"{' then '.join(key[0])!r}{', tokens before merges' if key[1] else ''}"
        raise unsupported_tokenizer(f"text to be split as by {', '.join(_NAMES.values())}", found)
    return _NAMES[key]


def unsupported_tokenizer(expected: str, found: str) -> UnsupportedError:
    """Return the error for a tokenizer that llama.cpp would not follow."""
    next_step = "llama.cpp would give the model other tokens. For other readers there is export_compressed_tensors."
    return UnsupportedError("tokenizer", expected, found, next_step)


def _expressions(step: dict[str, Any]) -> list[str]:
    """Return the expressions that a step splits by, or its description if it does anything else."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2] if step["use_regex"] else []
    if step["type"] == "Digits":
        return [_DIGIT if step["individual_digits"] else _DIGITS]
    if step["type"] == "Punctuation" and step["behavior"] == "Contiguous":
        return [_PUNCTUATION]
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return [step["pattern"].get("Regex", f"the text {step['pattern']}")]
    return [str(step)]


def steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer; those of a sequence, which are under `key`, one by one."""
    if step is None:
        return []
    return [inner for each in step[key] for inner in steps(each, key)] if step["type"] == "Sequence" else [step]
