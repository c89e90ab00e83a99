"""llama.cpp is told of a tokenizer what it needs to split text alike; where it would not, the export is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf import TokenType
from oldest_transformers import not_by_5_17
from tiny_tokenizers import (
    CHAT_TEMPLATE,
    FALCON,
    METASPACE,
    PREPEND,
    REPLACE,
    SPLIT,
    TEXTS,
    byte_level,
    characters_map,
    sentencepiece_like,
    unigram,
    wordpiece,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports.gguf.tokenizer import describe_tokenizer, load_tokenizer, pre_tokenizer_name

# More than any of these tokenizers has.
SIZE = 604

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The models of a file it reads as later versions do.
NOT_BY_5_17 = not_by_5_17("Transformers 5.17 makes other tokenizers of a GGUF file")
# llama.cpp's name for each.
BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    "smollm": {"steps": [pre_tokenizers.Digits(individual_digits=True)]},
    "llama-bpe": {"split": LLAMA3, "ignore_merges": True},
    "smaug-bpe": {"split": LLAMA3},
    "qwen2": {"split": QWEN2},
    "tekken": {"split": TEKKEN, "ignore_merges": True},
    "falcon": FALCON,
}
# What Transformers' reader has no expression for, so that it splits as GPT-2 does.
NOT_SPLIT_BY_TRANSFORMERS = {"smollm", "falcon"}


def described(tokenizer: Any, size: int = SIZE, **config: Any) -> dict[str, Any]:
    writer = gguf.GGUFWriter(None, "llama")
    describe_tokenizer(writer, tokenizer, LlamaConfig(**config), size)
    return {name.removeprefix("tokenizer.ggml."): field.value for name, field in writer.kv_data[0].items()}


def read_back(tokenizer: PreTrainedTokenizerFast, directory: Path) -> PreTrainedTokenizerFast:
    """Return what Transformers makes of a file that holds a tokenizer."""
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    describe_tokenizer(writer, tokenizer, LlamaConfig(), SIZE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(directory, gguf_file="model.gguf")


def ids(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def changed(tokenizer: PreTrainedTokenizerFast, part: str, **values: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokenizer.json says something else."""
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored[part] = {**(stored[part] or {}), **values}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(stored)), eos_token="</s>")


@pytest.mark.slow
@NOT_BY_5_17
@pytest.mark.parametrize("adds", [(), ("<s>",), ("<s>", "</s>")], ids=["nothing", "begin", "begin and end"])
@pytest.mark.parametrize("name", [name for name in BYTE_LEVEL if name not in NOT_SPLIT_BY_TRANSFORMERS])
def test_transformers_reads_a_tokenizer_of_bytes(tmp_path: Path, name: str, adds: tuple[str, ...]) -> None:
    tokenizer = byte_level(**BYTE_LEVEL[name], adds=adds)
    loaded = read_back(tokenizer, tmp_path)
    assert ids(loaded) == ids(tokenizer)
    assert loaded.chat_template == CHAT_TEMPLATE
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")


@NOT_BY_5_17
def test_transformers_finds_the_tokenizer_of_a_directory(tmp_path: Path) -> None:
    tokenizer = byte_level(adds=["<s>"])
    tokenizer.save_pretrained(tmp_path)
    assert ids(read_back(load_tokenizer(str(tmp_path)), tmp_path)) == ids(tokenizer)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_way_to_split_is_named_as_llama_cpp_names_it(name: str) -> None:
    tokenizer = byte_level(**BYTE_LEVEL[name])
    assert described(tokenizer)["pre"] == name
    assert pre_tokenizer_name(json.loads(tokenizer.backend_tokenizer.to_str())) == name


def test_the_tokenizers_of_transformers_are_named() -> None:
    vocabulary = {token: number for number, token in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"])}
    qwen = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[])
    assert (described(qwen)["model"], described(qwen)["pre"]) == ("gpt2", "qwen2")
    gpt2 = transformers.GPT2Tokenizer(vocab=vocabulary, merges=[])
    assert (described(gpt2)["model"], described(gpt2)["pre"]) == ("gpt2", "gpt-2")
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a"])}
    llama = transformers.LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")])
    assert (described(llama)["model"], described(llama)["add_space_prefix"]) == ("llama", True)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "▁a"])}
    gemma = transformers.GemmaTokenizer(vocab=vocabulary, merges=[("▁", "a")])
    assert (described(gemma)["model"], described(gemma)["add_space_prefix"]) == ("llama", False)
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])}
    assert described(transformers.BertTokenizer(vocab=vocabulary))["model"] == "bert"
    scores = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>", "▁", "a")]
    xlm_roberta = transformers.XLMRobertaTokenizer(vocab=scores, _spm_precompiled_charsmap=characters_map({}))
    assert described(xlm_roberta)["model"] == "t5"


@pytest.mark.parametrize("split", [r"\s+", LLAMA3.replace("{1,3}", "{1,2}")])
def test_another_way_to_split_is_refused(split: str) -> None:
    with pytest.raises(UnsupportedError, match=r"expected text to be split as by gpt-2, smollm, .* found "):
        described(byte_level(split))


def test_a_tokenizer_of_bytes_has_tokens_kinds_and_merges() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>"])
    said = described(tokenizer, bos_token_id=7)
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    assert said["tokens"] == [by_number.get(number, f"[PAD{number}]") for number in range(SIZE)]
    assert said["token_type"][:3] == [TokenType.CONTROL] * 3
    assert set(said["token_type"][3:400]) == {TokenType.NORMAL}
    assert said["token_type"][400:] == [TokenType.USER_DEFINED, *[TokenType.UNUSED] * (SIZE - 401)]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert said["merges"] == [f"{left} {right}" for left, right in merges]
    # The tokenizer's own, not the configuration's.
    assert (said["bos_token_id"], said["eos_token_id"], said["unknown_token_id"]) == (1, 2, 0)


def test_special_tokens_that_the_tokenizer_does_not_name_are_the_models() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    said = described(tokenizer, bos_token_id=1, eos_token_id=[2, 5], pad_token_id=None)
    assert (said["bos_token_id"], said["eos_token_id"]) == (1, 2)
    assert "padding_token_id" not in said


@pytest.mark.slow
@NOT_BY_5_17
@pytest.mark.parametrize("normalizer", [METASPACE, PREPEND], ids=["metaspace", "prepend"])
def test_transformers_reads_a_tokenizer_with_scores(tmp_path: Path, normalizer: Any) -> None:
    kind = "pre_tokenizer" if normalizer is METASPACE else "normalizer"
    tokenizer = sentencepiece_like(**{kind: normalizer})
    actual, expected = ids(read_back(tokenizer, tmp_path)), ids(tokenizer)
    if normalizer is PREPEND:
        # Transformers' reader puts no space before a text that begins with one, or after a special token.
        actual, expected = [actual[0], actual[2], actual[4]], [expected[0], expected[2], expected[4]]
    assert actual == expected


def test_scores_are_in_the_order_of_the_merges() -> None:
    tokenizer = sentencepiece_like(normalizer=PREPEND)
    said = described(tokenizer)
    score = dict(zip(said["tokens"], said["scores"], strict=True))
    made = list(dict.fromkeys("".join(m) for m in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]))
    assert len(made) > 40
    assert [score[token] for token in made] == sorted((score[token] for token in made), reverse=True)
    assert len({score[token] for token in made}) == len(made)
    kinds = dict(zip(said["tokens"], said["token_type"], strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x0A>"]) == (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "adds"), [(PREPEND, None, True), (REPLACE, None, False), (REPLACE, SPLIT, False)]
)
def test_the_space_in_front_is_named(normalizer: Any, pre_tokenizer: Any, adds: bool) -> None:
    assert described(sentencepiece_like(normalizer=normalizer, pre_tokenizer=pre_tokenizer))["add_space_prefix"] is adds


def test_merges_that_scores_cannot_express_are_refused() -> None:
    tokenizer = sentencepiece_like(normalizer=PREPEND)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    with pytest.raises(UnsupportedError, match=r"found merges in another order, and none for \['"):
        described(changed(tokenizer, "model", merges=merges[:-1]))
    several = next(i for i in range(len(merges) - 1) if "".join(merges[i]) == "".join(merges[i + 1]))
    apart = [*merges[:several], *merges[several + 1 :], merges[several]]
    with pytest.raises(UnsupportedError, match=r"found merges in another order\. "):
        described(changed(tokenizer, "model", merges=apart))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace("▁", "first")),
        (None, pre_tokenizers.Whitespace()),
        (None, SPLIT),
        (normalizers.Sequence([normalizers.NFKC(), PREPEND]), None),
        (normalizers.Prepend("_"), None),
    ],
)
def test_other_ways_to_treat_spaces_are_refused(normalizer: Any, pre_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedError, match="expected spaces to be replaced as by SentencePiece"):
        described(sentencepiece_like(normalizer=normalizer, pre_tokenizer=pre_tokenizer))


@pytest.mark.parametrize(
    ("lowercase", "strips", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_word_pieces_are_marked_where_words_begin(lowercase: bool, strips: bool | None, expected: bool) -> None:
    tokenizer = wordpiece(lowercase)
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.add_tokens(["<think>"])
    said = described(tokenizer, eos_token_id=None)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for token, number in tokenizer.get_vocab().items():
        marked = token if token in (*special, "<think>") else token[2:] if token.startswith("##") else f"▁{token}"
        assert said["tokens"][number] == marked
    assert (said["model"], said["pre"]) == ("bert", "default")
    assert (said["normalizer.lowercase"], said["normalizer.strip_accents"]) == (lowercase, expected)
    # llama.cpp's name for the first token of a text, whatever it is.
    assert (said["bos_token_id"], said["seperator_token_id"], said["mask_token_id"]) == (2, 3, 4)
    assert (said["unknown_token_id"], said["padding_token_id"]) == (1, 0)
    assert (said["add_bos_token"], said["add_eos_token"]) == (True, False)
    assert "eos_token_id" not in said


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("normalizer", {"handle_chinese_chars": False}, "expected text to be normalized as by BERT"),
        ("normalizer", {"clean_text": False}, "expected text to be normalized as by BERT"),
        ("pre_tokenizer", {"type": "Whitespace"}, "expected words to be split as by BERT"),
        ("model", {"continuing_subword_prefix": "@@"}, "expected ## inside words, found '@@'"),
    ],
)
def test_other_word_pieces_are_refused(part: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        described(changed(wordpiece(), part, **values))


def test_word_pieces_without_tokens_around_a_text_are_refused() -> None:
    tokenizer = wordpiece()
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UnsupportedError, match="expected the tokens cls and sep around a text"):
        described(tokenizer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordpiece().backend_tokenizer)
    with pytest.raises(ConfigError, match="expected a token for the end of text"):
        described(tokenizer)


def test_a_unigram_tokenizer_has_its_scores_and_its_map_of_characters() -> None:
    tokenizer = unigram()
    tokenizer.add_tokens(["<think>"])
    said = described(tokenizer)
    stored = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    assert len(stored) > 50
    assert [list(pair) for pair in zip(said["tokens"], said["scores"], strict=False)][: len(stored)] == stored
    assert said["scores"][len(stored) :] == [0.0] * (SIZE - len(stored))
    kinds = said["token_type"]
    assert kinds[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.NORMAL]
    assert kinds[len(stored)] == TokenType.USER_DEFINED
    assert (said["model"], said["add_space_prefix"], said["remove_extra_whitespaces"]) == ("t5", True, True)
    assert bytes(said["precompiled_charsmap"]) == characters_map({"\t": " ", "\n": " ", "!": "?"})
    assert (said["add_bos_token"], said["add_eos_token"]) == (True, True)


def test_the_map_of_characters_is_followed() -> None:
    tokenizer = unigram()
    assert tokenizer("dog!\tdog\nfox")["input_ids"] == tokenizer("dog? dog fox")["input_ids"]


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("model", {"byte_fallback": True}, "expected a token for unknown characters, found bytes"),
        ("model", {"unk_id": None}, "expected a token for unknown characters, found none"),
        ("normalizer", {"type": "NFKC"}, "expected text to be normalized by SentencePiece's map of characters"),
        ("pre_tokenizer", {"pretokenizers": [{"type": "WhitespaceSplit"}]}, "expected a mark before each word"),
    ],
)
def test_other_unigram_tokenizers_are_refused(part: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        described(changed(unigram(), part, **values))


def test_normalizers_that_llama_cpp_lacks_are_refused() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert described(tokenizer)["model"] == "gpt2"
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    with pytest.raises(UnsupportedError, match="expected no normalizer, or NFC, found NFKC and Lowercase"):
        described(tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a")), "expected a tokenizer .* found WordLevel"),
        (Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])), "expected a tokenizer of bytes, found one of characters"),
        (
            Tokenizer(models.BPE({"a": 0, "</s>": 1}, [], dropout=0.5)),
            "expected a tokenizer of the kind BPE, without dropout and affixes, .* found BPE with",
        ),
    ],
    ids=["words", "characters", "dropout"],
)
def test_other_kinds_of_tokenizers_are_refused(tokenizer: Tokenizer, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        described(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def test_other_tokens_around_a_text_are_refused() -> None:
    tokenizer = byte_level(adds=["<s>"])
    tokenizer.bos_token = "<unk>"
    with pytest.raises(UnsupportedError, match=r"around a text, found \['<s>', 'a'\] for 'a'"):
        described(tokenizer)


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    with pytest.raises(ConfigError, match="expected a token for the end of text, found none"):
        described(tokenizer, eos_token_id=None)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 399 tokens at most, which the model embeds, found 400"):
        described(byte_level(), size=399)


def test_a_tokenizer_in_python_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of the library tokenizers, found ByT5Tokenizer"):
        described(transformers.ByT5Tokenizer())


def test_several_chat_templates_keep_their_names() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    said = described(tokenizer)
    assert (said["tokenizer.chat_template"], said["tokenizer.chat_template.tool_use"]) == ("a", "b")


@pytest.mark.parametrize(
    "text", ["", "{}", "{", "null", "\x00", '{"added_tokens": [], "model": {}}'], ids=lambda text: text or "empty"
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="expected a tokenizer, without which"):
        load_tokenizer(str(tmp_path))
