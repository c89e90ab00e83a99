"""How small a model becomes, and what that costs each of its weights: DistilBERT's shape, int8, embeddings included.

The weights are random, so nothing is downloaded; give a path or a Hub id to use a model of your own.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import DistilBertConfig, DistilBertForMaskedLM

from hf_trainweights import TrainWeightsConfig, compare_models, quantize_directory


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        source = sys.argv[1] if len(sys.argv) > 1 else random_distilbert(f"{directory}/float")
        out = f"{directory}/int8"
        print(quantize_directory(source, out, TrainWeightsConfig("int8", include_embeddings=True)))
        print()

        comparison = compare_models(source, out)
        changed = [row for row in comparison.tensors if row.largest]
        print(f"{'|a-b|/|a|':>10} {'SNR dB':>7} {'max |a-b|':>10} {'float':>10} {'int8':>10}  weight")
        for row in (*changed, *comparison.totals):
            errors = f"{row.relative_l2:10.1e} {row.snr_db:7.1f} {row.largest:10.1e}"
            print(f"{errors} {row.bytes_a / 1e6:7.2f} MB {row.bytes_b / 1e6:7.2f} MB  {row.name}")
        print(f"The other {len(comparison.tensors) - len(changed)} are equal.")
        print()

        for path in filter(Path.is_dir, (Path(source), Path(out))):
            size_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            print(f"{path.name}: {size_bytes / 1e6:.1f} MB of safetensors")


def random_distilbert(path: str) -> str:
    torch.manual_seed(0)
    DistilBertForMaskedLM(DistilBertConfig()).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
