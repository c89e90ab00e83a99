"""Codecs: how one tensor becomes bytes at rest. To add one: one file here and one line in `CODECS`."""

from __future__ import annotations

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.log_rank1 import LogRank1
from hf_trainweights.checkpoint.codecs.planes import Planes
from hf_trainweights.checkpoint.codecs.planes_delta import PlanesDelta
from hf_trainweights.checkpoint.codecs.planes_rank1 import PlanesRank1
from hf_trainweights.checkpoint.codecs.raw import Raw
from hf_trainweights.checkpoint.codecs.update_space import UpdateSpace
from hf_trainweights.errors import ConfigError

_CODECS = (Raw, Planes, PlanesDelta, PlanesRank1, DeltaUniform, UpdateSpace, LogRank1, Grouped)
CODECS: dict[str, type[Codec]] = {codec.codec_id: codec for codec in _CODECS}


def get_codec(codec_id: str) -> type[Codec]:
    """Return the codec class of that name, e.g. `"planes"`; ConfigError: there is none.

    Examples:
        >>> get_codec("raw").lossless
        True
    """
    if codec_id not in CODECS:
        raise ConfigError("codec", f"one of {', '.join(sorted(CODECS))}", repr(codec_id), "Choose one of these.")
    return CODECS[codec_id]
