"""Tiny tokenizers that are trained on the spot: of bytes with merges, in SentencePiece's manner, and of word pieces."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's not the first time that the dog has been jumped over.",
    "In 1984 there were 365 days; in 2024 there are 366. That's 1 more, isn't it?\n\n  def f(x):\n    return x + 1\n",
    "Größe, naïve café, привет мир, 你好世界 - all of these are words, and these are not: !!! ... ((())) ===",
]
TEXTS = [
    "The lazy dog's 1234567 days",
    "  two spaces, a\ttab\n\nand   lines ",
    "naïve 你好 🚀 x=1",
    "before <s>after</s> end",
    "",
]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# What Llama 2's file has, what it is when it leaves out the prefix, and what Transformers 5 makes of it.
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
REPLACE = normalizers.Replace(" ", "▁")
# Gemma's.
SPLIT = pre_tokenizers.Split(" ", "merged_with_previous")
# What Falcon's file says before and behind the bytes.
FALCON: dict[str, Any] = {
    "steps": [pre_tokenizers.Punctuation("contiguous")],
    "later_steps": [
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
}
METASPACE = pre_tokenizers.Metaspace("▁", "first", split=False)


def byte_level(
    split: str | None = None,
    *,
    size: int = 400,
    adds: Sequence[str] = (),
    ignore_merges: bool = False,
    steps: Sequence[Any] = (),
    later_steps: Sequence[Any] = (),
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes.

    Args:
        split: The expression that splits text; None for GPT-2's.
        size: How many tokens it has.
        adds: The special tokens that it puts around every text, `"<s>"` and `"</s>"` or one of them.
        ignore_merges: Whether a piece that is a token is taken before any merge.
        steps: Pre-tokenizers that come first.
        later_steps: Those that come last, when the text is bytes.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split_by = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    all_steps = [*steps, *split_by, last, *later_steps]
    tokenizer.pre_tokenizer = last if len(all_steps) == 1 else pre_tokenizers.Sequence(all_steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer, adds)


def sentencepiece_like(
    size: int = 600, adds: Sequence[str] = ("<s>",), normalizer: Any = None, pre_tokenizer: Any = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer such as Llama 2 has: BPE on characters, spaces as U+2581, bytes for unknown characters.

    Args:
        size: How many tokens it has at most.
        adds: As for `byte_level`.
        normalizer: What does so with spaces.
        pre_tokenizer: Or this.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(p for p in pieces if p not in SPECIAL)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer, adds)


def unigram(adds: Sequence[str] = ("<s>", "</s>")) -> PreTrainedTokenizerFast:
    """Return a tokenizer such as XLM-RoBERTa has, with a score for each of up to 300 tokens.

    Args:
        adds: As for `byte_level`.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Precompiled(characters_map({"\t": " ", "\n": " ", "!": "?"}))
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, shrinking_factor=0.9
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer, adds)


def characters_map(replaced: Mapping[str, str]) -> bytes:
    """Return SentencePiece's map of characters: a trie of their bytes, and what they become.

    Args:
        replaced: ASCII characters to texts.
    """
    # A unit of the trie is the byte that leads to it, where its successors begin, and whether the next one is a value.
    units, texts, has_value = [0] * 1024, b"", 1 << 8
    units[0] = 256 << 10
    for number, (character, text) in enumerate(replaced.items()):
        place, value = 256 ^ ord(character), 512 + number
        units[place] = ord(character) | has_value | (place ^ value) << 10
        units[value] = len(texts)
        texts += text.encode() + b"\0"
    return struct.pack(f"<{1 + len(units)}I", 4 * len(units), *units) + texts


def wordpiece(lowercase: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer such as BERT has, with up to 400 tokens.

    Args:
        lowercase: Whether capital letters and accents are left out.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    names = {f"{name.strip('[]').lower()}_token": name for name in special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def wrap(tokenizer: Tokenizer, adds: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return Transformers' tokenizer of one, with special tokens and a chat template."""
    tokenizer.add_special_tokens(SPECIAL)
    around = [*(name for name in adds if name == "<s>"), "$A", *(name for name in adds if name == "</s>")]
    numbers = [(name, tokenizer.token_to_id(name)) for name in adds]
    tokenizer.post_processor = processors.TemplateProcessing(" ".join(around), special_tokens=numbers)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)
