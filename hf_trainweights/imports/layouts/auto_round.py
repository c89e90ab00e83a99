"""AutoRound: its `packing_format` names the layout of another quantizer, with settings of its own.

| `packing_format` | layout |
|---|---|
| `auto_round:auto_gptq` | GPTQ of version 1, with or without `g_idx` |
| `auto_round`, `auto_round:gptqmodel` | GPTQ of version 2, with or without `g_idx` |
| `auto_round:auto_awq` | AWQ's `gemm` |

`extra_config` has the bits and group size of single weights. Source: https://github.com/intel/auto-round
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_trainweights.imports.layouts.awq import Awq
from hf_trainweights.imports.layouts.base import WHERE, Layout, unsupported
from hf_trainweights.imports.layouts.gptq import Gptq

_GPTQ_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def auto_round(config: Mapping[str, Any], metadata: Mapping[str, str]) -> Layout:
    """Return the layout that AutoRound's configuration names; UnsupportedError: it is none of these."""
    packing = config.get("packing_format", "auto_round:auto_gptq")
    packings, data_type = [*_GPTQ_VERSIONS, *_AWQ], config.get("data_type", "int")
    if not isinstance(packing, str) or packing not in packings or data_type != "int":
        expected = f"integers of {', '.join(packings)}"
        raise unsupported(f"{WHERE}: packing_format", expected, f"{packing!r} of {data_type!r}")
    if any("rotation" in key and value for key, value in config.items()):
        raise unsupported(f"{WHERE}: rotation", "weights that are used as they are", "a rotation")
    described = {**config, "dynamic": config.get("extra_config")}
    if packing in _AWQ:
        return Awq({**described, "version": "gemm"}, metadata)
    return Gptq({**described, "checkpoint_format": _GPTQ_VERSIONS[packing]}, metadata)
