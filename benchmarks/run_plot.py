"""Trains a small Llama with small checkpoints and draws `docs/run_plot.svg` as `checkpoint ls --plot` does.

Run `python -m benchmarks.run_plot`; it takes some minutes on one core and downloads nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.report.write import plot_run
from hf_trainweights_cli.demo.corpus import read_corpus

DRAWING = Path(__file__).parent.parent / "docs" / "run_plot.svg"

_STEPS, _SAVE_STEPS, _ANCHOR_EVERY = 200, 20, 4
_BATCH, _LENGTH = 8, 128


def train(out: Path) -> None:
    """Train on the bytes of Python's standard library.

    Args:
        out: Where the checkpoints go.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    corpus = read_corpus()
    arguments = TrainingArguments(
        str(out),
        max_steps=_STEPS,
        save_steps=_SAVE_STEPS,
        eval_strategy="steps",
        eval_steps=_SAVE_STEPS,
        logging_steps=5,
        learning_rate=1e-3,
        warmup_steps=20,
        per_device_train_batch_size=_BATCH,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    callback = TrainWeightsCheckpointCallback(mode="near-lossless", anchor_every=_ANCHOR_EVERY)
    held_out = _rows(corpus.held_out, _BATCH)
    rows = _rows(corpus.train, _STEPS * _BATCH)
    Trainer(model, arguments, train_dataset=rows, eval_dataset=held_out, callbacks=[callback]).train()


def _rows(texts: tuple[str, ...], count: int) -> list[dict[str, torch.Tensor]]:
    data = bytearray("".join(texts).encode()[: count * _LENGTH])
    rows = torch.frombuffer(data, dtype=torch.uint8).long().view(count, _LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        train(run)
        plot_run(run, DRAWING)
