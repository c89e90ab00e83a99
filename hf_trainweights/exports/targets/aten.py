"""ATen ops: what TorchScript, torch.export and AOTInductor hold, and what libtorch runs."""

from __future__ import annotations

from hf_trainweights.exports.targets.base import Target


class Aten(Target):
    """The codes as they lie, and plain arithmetic on them."""

    name = "ATen"
