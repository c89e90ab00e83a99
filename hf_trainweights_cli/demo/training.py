"""Trains the demo's own model, a small Llama, and its tokenizer on the demo's corpus.

The same seed, Python version and number of threads give the same model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights_cli.demo.checkpoints import MODE, SAVES, Checkpoints, measure_checkpoints
from hf_trainweights_cli.demo.corpus import Corpus

# Shows the progress of a long job: its line, its current stage, the number of steps done, and the total number.
Report = Callable[[str, str, int, int], None]

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """Size and training of the demo's model; the defaults take about half a minute on two CPU cores.

    Args:
        hidden_size: Width of the model, a multiple of 64, the width of an attention head.
        num_layers: Number of decoder layers.
        vocab_size: Number of tokens, at least 257: one for each byte, and one for the end of a text.
        steps: Number of optimizer steps.
        batch_size: Number of windows in a step.
        window_tokens: Length of a training window.
        learning_rate: Highest learning rate of the schedule.
        seed: Seed of the initial weights, and of the choice and order of the texts.
    """

    hidden_size: int = 384
    num_layers: int = 2
    vocab_size: int = 1024
    steps: int = 240
    batch_size: int = 16
    window_tokens: int = 64
    learning_rate: float = 3e-3
    seed: int = 0


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with an end-of-text token; it has at least 257 tokens and can spell any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


@dataclass(frozen=True)
class Training:
    """A training run: the loss of each step, in nats per token, and its checkpoints."""

    losses: tuple[float, ...]
    checkpoints: Checkpoints


def train_model(directory: Path, runs: Path, corpus: Corpus, recipe: Recipe, report: Report) -> Training:
    """Train a Llama and its tokenizer from scratch and save both; `runs` gets the checkpoints of the training."""
    report("training", "tokenizer", 0, recipe.steps)
    texts = _take_texts(corpus, recipe)
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    batches = _batches(texts, tokenizer, recipe)
    config = _llama_config(recipe, tokenizer)
    model = _new_model(config, recipe.seed)
    with CheckpointManager(runs, mode=MODE, every_steps=-(-recipe.steps // SAVES), keep_last=None) as manager:
        losses = _optimize(manager, model, batches, recipe, report)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    def resume(manager: CheckpointManager, batches: torch.Tensor) -> list[float]:
        # Start from other weights, so that only the checkpoint can make the losses continue.
        return _optimize(manager, _new_model(config, recipe.seed + 1), batches, recipe, lambda *_: None)

    report("training", "resume", recipe.steps, recipe.steps)
    checkpoints = measure_checkpoints(runs, batches, losses, resume)
    report("training", f"loss {losses[-1]:.2f}", recipe.steps, recipe.steps)
    return Training(tuple(losses), checkpoints)


def _new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _optimize(
    manager: CheckpointManager, model: LlamaForCausalLM, batches: torch.Tensor, recipe: Recipe, report: Report
) -> list[float]:
    """Train a model, from the manager's newest checkpoint if there is one; return the loss of each step taken."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.steps + 1, pct_start=0.1
    )
    losses: list[float] = []
    for step, batch in manager.steps(batches, model, optimizer, schedule):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        manager.log(loss=losses[-1])
        report("training", f"loss {losses[-1]:.2f}", step, recipe.steps)
    return losses


def _llama_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert isinstance(end, int)
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        # 8/3 of the width as in Llama, rounded up to groups of 128.
        intermediate_size=-(-recipe.hidden_size * 8 // 3 // 128) * 128,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // 64,
        num_key_value_heads=recipe.hidden_size // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # About 1 / sqrt(hidden_size); with Llama's 0.02 a model this small learns little in its first 100 steps.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def _take_texts(corpus: Corpus, recipe: Recipe) -> list[str]:
    """Return training texts in random order, enough for all steps of the training."""
    texts = list(corpus.train)
    random.Random(recipe.seed).shuffle(texts)
    # A token of this vocabulary has 2.6 characters of Python on average; 4 leave a margin.
    wanted = 4 * recipe.steps * recipe.batch_size * recipe.window_tokens
    taken: list[str] = []
    while texts and wanted > 0:
        taken.append(texts.pop())
        wanted -= len(taken[-1])
    return taken


def _batches(texts: list[str], tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> torch.Tensor:
    """Return the token ids of every step, int64 [steps, batch_size, window_tokens].

    No window occurs a second time before every window has occurred once.
    """
    stream = [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, tokenizer.eos_token_id)]
    count = len(stream) // recipe.window_tokens
    windows = torch.tensor(stream[: count * recipe.window_tokens]).view(count, recipe.window_tokens)
    generator = torch.Generator().manual_seed(recipe.seed)
    needed = recipe.steps * recipe.batch_size
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-needed // count))])
    return windows[order[:needed]].view(recipe.steps, recipe.batch_size, recipe.window_tokens)
