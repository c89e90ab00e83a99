"""Where the rows of a model's weights lie in its checkpoints, which keep experts one by one."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from hf_trainweights.models.host.checkpoints import checkpoint_tensors


def matrices_in_checkpoint(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, slice] | None]:
    """Return for each weight its matrices' names in a checkpoint, each with its rows among those of all experts.

    `shapes` are stored shapes `[*, N, K]`. A weight that a checkpoint splits within a matrix, merges or reorders has
    None.
    """
    # What a checkpoint splits are rows. So their numbers tell where each goes, and no weight is copied. Each stands
    # there twice: Transformers 5.17 drops all dimensions of size 1 where it splits experts.
    names, numbers, ends = list(shapes), {}, [0]
    for name, shape in shapes.items():
        *lead, _ = shape
        ends.append(ends[-1] + math.prod(lead))
        numbers[name] = torch.arange(ends[-2], ends[-1], device="cpu").repeat_interleave(2).view(*lead, 2)
    matrices: dict[str, dict[str, slice]] = defaultdict(dict)
    broken: set[str] = set()
    for saved_name, rows in checkpoint_tensors(model, numbers).items():
        first, count = int(rows.flatten()[0]), rows.numel() // 2
        place = bisect.bisect_right(ends, first) - 1
        name, shape = names[place], shapes[names[place]]
        N = shape[-2]
        start = first - ends[place]
        expected = torch.arange(first, first + count, device=rows.device)
        whole = torch.equal(rows.reshape(-1, 2), expected.view(count, 1).expand(count, 2))
        fits = count == N if len(shape) == 2 else start // N == (start + count - 1) // N
        if not (whole and fits and saved_name.endswith(".weight")):
            broken.add(name)
        matrices[name][saved_name] = slice(start, start + count)
    return {name: None if name in broken else saved for name, saved in matrices.items()}
