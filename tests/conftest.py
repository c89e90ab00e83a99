"""Settings every test runs under: offline, one thread, quiet."""

import os

# Before transformers and huggingface_hub are imported: that is when both read their environment.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

# Tiny tensors gain nothing from threads, and test processes side by side lose from them.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
