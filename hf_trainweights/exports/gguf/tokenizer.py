"""A tokenizer as llama.cpp reads it: its tokens, what each is for, and the way in which text becomes tokens."""

from __future__ import annotations

import json
from typing import Any

import gguf
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.gguf.pre_tokenizers import pre_tokenizer_name, steps, unsupported_tokenizer
from hf_trainweights.exports.gguf.sentencepiece import describe_sentencepiece_bpe, describe_unigram, merges_of

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# What these normalizers do llama.cpp does too, except NFC, which leaves most text as it is.
_BYTE_LEVEL_NORMALIZERS = ([], ["NFC"])

# How llama.cpp writes the beginning of a word, and Transformers all but the beginning.
_BEGIN, _REST = "\N{LOWER ONE EIGHTH BLOCK}", "##"
_NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
# gguf 0.19 does not name them. Versions of llama.cpp that do not know them always do both.
_LOWERCASE, _STRIP_ACCENTS = "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model by directory or Hub id; ConfigError: there is none, or it is damaged."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        # The tokenizers library raises no narrower class, and a damaged file whatever it runs into.
        reason = f"{type(error).__name__}: " + str(error).strip().partition("\n")[0].rstrip(".:")
        next_step = "Save the tokenizer there. Or pass it: export_gguf(model, out, tokenizer)."
        raise ConfigError(source, "a tokenizer, without which llama.cpp reads no text", reason, next_step) from error


def describe_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, size: int
) -> None:
    """Write a tokenizer, as many tokens as the model embeds (`size`), and its chat template.

    Tokens that it lacks are written as unused; special ones that it does not name are those of the configuration.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        next_step = "Save it as tokenizer.json, or load another class of it."
        raise ConfigError("tokenizer", "one of the library tokenizers", type(tokenizer).__name__, next_step)
    stored = json.loads(backend.to_str())
    tokens, kinds = _tokens(tokenizer, size)
    if stored["model"]["type"] == "WordPiece":
        _describe_wordpiece(writer, stored, tokens, kinds)
    elif stored["model"]["type"] == "Unigram":
        describe_unigram(writer, stored, tokens, kinds)
    else:
        _describe_bpe(writer, stored, tokens, kinds)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _describe_special_tokens(writer, tokenizer, config, is_wordpiece=stored["model"]["type"] == "WordPiece")
    if isinstance(template := tokenizer.chat_template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the tokens in the order of their numbers, and what each is for."""
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
        raise unsupported_tokenizer(expected, f"{model['type']} with {settings}")
    if model["byte_fallback"]:
        describe_sentencepiece_bpe(writer, stored, tokens, kinds)
        return
    normalizers = [each["type"] for each in steps(stored["normalizer"], "normalizers")]
    if normalizers not in _BYTE_LEVEL_NORMALIZERS:
        raise unsupported_tokenizer("no normalizer, or NFC", " and ".join(normalizers))
    if not any(each["type"] == "ByteLevel" for each in steps(stored["pre_tokenizer"], "pretokenizers")):
        raise unsupported_tokenizer("a tokenizer of bytes", "one of characters")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(stored))
    writer.add_token_merges([" ".join(merge) for merge in merges_of(stored)])


def _describe_wordpiece(
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
    # llama.cpp calls the first token of a text bos everywhere, and the last one of a WordPiece text sep.
    first, last = ("cls", "sep") if is_wordpiece else ("bos", "eos")
    if last not in numbers:
        # llama.cpp would stop at token 11 or 2.
        next_step = f"Set tokenizer.{last}_token, and save the tokenizer."
        raise ConfigError("tokenizer", "a token for the end of text", "none", next_step)
    begins, ends = _added(tokenizer, numbers.get(first), numbers[last])
    if is_wordpiece and not (begins and ends):
        raise unsupported_tokenizer("the tokens cls and sep around a text", "a text without one of them")
    written = numbers | ({"bos": numbers["cls"]} if is_wordpiece else {})
    for name, number in written.items():
        if name != "cls":
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends and not is_wordpiece)


def _added(tokenizer: PreTrainedTokenizerBase, first: int | None, last: int) -> tuple[bool, bool]:
    """Return whether a tokenizer puts its first and last special token around a text."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for begins in (False, True):
        for ends in (False, True):
            if whole == [first] * begins + bare + [last] * ends:
                return begins, ends
    added = tokenizer.convert_ids_to_tokens(whole)
    raise unsupported_tokenizer("at most the begin and the end of text around a text", f"{added} for 'a'")
