"""Codecs: each turns one tensor of a checkpoint into bytes, and back. To add one: one file here, one line in `CODECS`.

Another package adds its own codec by `register_codec`.
"""

from __future__ import annotations

import inspect

from hf_trainweights.checkpoint.codecs.base import ROLES, Codec
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesDelta, PlanesRank1, Raw
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.magnitudes import PlanesMagnitudes
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.codecs.norm_space import NormSpace
from hf_trainweights.checkpoint.codecs.rows import RowUniform
from hf_trainweights.errors import ConfigError

_EXACT = (Raw, Planes, PlanesDelta, PlanesRank1, PlanesMagnitudes)
_CODECS = (*_EXACT, DeltaUniform, UpdateSpace, LogRank1, Grouped, RowUniform, NormSpace)
CODECS: dict[str, type[Codec]] = {codec.codec_id: codec for codec in _CODECS}


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Add a codec of your own, so that rules may name it and files may use it. The function serves as a decorator.

    A process that reads such a file must register the codec first. A `codec_id` never changes meaning, so begin it with
    the name of your package.

    Args:
        codec: A frozen dataclass with `codec_id`, `lossless`, `roles`, `_encode` and `_decode`; see `Codec`.

    Returns:
        The same class.

    Raises:
        ConfigError: The class is not such a codec, or its `codec_id` belongs to another class.

    Examples:
        >>> @register_codec
        ... class Stored(Raw):
        ...     codec_id = "doctest.stored"
        >>> CODECS["doctest.stored"].__name__
        'Stored'
        >>> del CODECS["doctest.stored"]
    """
    where = f"codec {getattr(codec, '__name__', codec)!r}"
    if not (isinstance(codec, type) and issubclass(codec, Codec)) or inspect.isabstract(codec):
        raise ConfigError(where, "a subclass of Codec with _encode and _decode", repr(codec), "Derive it from Codec.")
    codec_id, roles = getattr(codec, "codec_id", None), getattr(codec, "roles", ())
    if not isinstance(codec_id, str) or not codec_id or not hasattr(codec, "lossless") or not {*roles} <= {*ROLES}:
        expected = f"codec_id, lossless, and roles of {', '.join(ROLES)}"
        attributes = f"codec_id {codec_id!r}, roles {roles!r}"
        raise ConfigError(where, expected, attributes, "Set these attributes of the class.")
    if CODECS.setdefault(codec_id, codec) is not codec:
        owner = f"{CODECS[codec_id].__module__}.{CODECS[codec_id].__qualname__}"
        raise ConfigError(where, f"a codec_id of its own, {codec_id!r} is taken", owner, "Choose another codec_id.")
    return codec
