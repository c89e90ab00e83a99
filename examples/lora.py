"""Train a LoRA adapter on a quantized base model with the Trainer, and resume from its checkpoint."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_trainweights import TrainWeightsConfig


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **shape)).save_pretrained(f"{directory}/float")

        train(directory, steps=10, resume=False)
        train(directory, steps=20, resume=True)


def train(directory: str, steps: int, resume: bool) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        f"{directory}/float", quantization_config=TrainWeightsConfig("int4", group_size=32)
    )
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    sequences = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).repeat(8).split(16)]
    arguments = TrainingArguments(
        f"{directory}/out", max_steps=steps, save_steps=10, learning_rate=1e-2, logging_steps=5, report_to="none"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"after {steps} steps: losses {losses}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
