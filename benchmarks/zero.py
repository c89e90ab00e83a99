"""ZeRO checkpoints of DeepSpeed on two ranks: bytes of the last of three saves, and how exactly training goes on.

    python -m benchmarks.zero [--steps 60]

A Llama of 3.4 million parameters learns the bytes of this project's documentation in bfloat16, with torch's AdamW and
ZeRO 2 or 3, on the CPU. DeepSpeed saves it three times. The copies of these saves become small in each mode, in their
order, as the callback of a Trainer does it. Then DeepSpeed, which knows nothing of this package, loads the last save,
plain and small, and trains on. The script needs DeepSpeed (`pip install hf_trainweights[deepspeed]`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machine import commit, cpu_name, versions
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.run.checkpoints import size_bytes

RESULTS = Path(__file__).parent / "results" / "zero.json"
DOCS = Path(__file__).parent.parent / "docs"
RANKS = 2
STAGES = (2, 3)
MODES = ("lossless", "near-lossless", "compact")
ROWS, TOKENS = 4, 128
STEPS_AFTER = 5
LEARNING_RATE = 1e-3


def _model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, max_position_embeddings=TOKENS))


def _text(root: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(Path(root, "text").read_bytes()), dtype=torch.uint8)


def _engine(stage: int) -> Any:
    import deepspeed

    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train(engine: Any, first: int, last: int, text: torch.Tensor) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
        starts = torch.randint(0, len(text) - TOKENS, (ROWS,), generator=generator)
        batch = torch.stack([text[start : start + TOKENS] for start in starts]).long()
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _save_run(rank: int, root: str, stage: int, steps: int) -> None:
    engine, text = _begin(rank, root, f"save-{stage}", stage), _text(root)
    every = steps // 3
    for number in range(3):
        _train(engine, number * every, (number + 1) * every, text)
        engine.save_checkpoint(f"{root}/plain", tag=f"step-{(number + 1) * every}")
    _end()


def _go_on(rank: int, root: str, stage: int, run: str, steps: int) -> None:
    engine, text = _begin(rank, root, f"load-{stage}-{run}", stage), _text(root)
    engine.load_checkpoint(f"{root}/{run}", tag=f"step-{steps}")
    losses = _train(engine, steps, steps + STEPS_AFTER, text)
    digest = hashlib.sha256()
    for flat in _flat_weights(engine):
        digest.update(flat.detach().numpy().tobytes())
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (losses, digest.hexdigest()))
    if rank == 0:
        Path(root, f"{run}.json").write_text(json.dumps(found))
    _end()


def _flat_weights(engine: Any) -> list[torch.Tensor]:
    optimizer = engine.optimizer
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    return next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))


def _begin(rank: int, root: str, name: str, stage: int) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{root}/{name}", rank=rank, world_size=RANKS)
    return _engine(stage)


def _end() -> None:
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads would wait for each other


def _run(function: Any, *arguments: Any) -> None:
    mp.start_processes(function, arguments, nprocs=RANKS, start_method="spawn")


def measure(stage: int, steps: int) -> dict[str, Any]:
    """Return the bytes of the last save in each mode, and what differs after it was loaded."""
    with tempfile.TemporaryDirectory() as root:
        # All runs read one copy, because the documentation may change meanwhile.
        Path(root, "text").write_bytes(b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md"))))
        _run(_save_run, root, stage, steps)
        plain, tag = Path(root, "plain"), f"step-{steps}"
        _run(_go_on, root, stage, "plain", steps)
        expected = json.loads(Path(root, "plain.json").read_text())
        modes = {}
        for mode in MODES:
            small = Path(root, mode)
            shutil.copytree(plain, small)
            for number in range(1, 4):
                compress_directory(small / f"step-{steps // 3 * number}", mode=mode)
            _run(_go_on, root, stage, mode, steps)
            found = json.loads(Path(root, f"{mode}.json").read_text())
            gaps = [
                abs(a - b)
                for one, other in zip(found, expected, strict=True)
                for a, b in zip(one[0], other[0], strict=True)
            ]
            modes[mode] = {
                "bytes": size_bytes(small / tag),
                "ratio": size_bytes(plain / tag) / size_bytes(small / tag),
                "equal_after_load": [of[1] for of in found] == [of[1] for of in expected],
                "loss_gap": sum(gaps) / len(gaps),
            }
        return {"stage": stage, "plain_bytes": size_bytes(plain / tag), "modes": modes}


def main() -> None:
    """Measure, print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps before the last of three saves")
    options = parser.parse_args()
    results = {
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": versions("deepspeed"),
        "steps": options.steps,
        "stages": [measure(stage, options.steps) for stage in STAGES],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
