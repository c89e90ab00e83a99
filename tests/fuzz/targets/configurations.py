"""Choices from JSON: configurations of models, policies of checkpoints, formats."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.formats import get_format
from tests.fuzz.mutate_json import change_json
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_FORMATS: list[dict[str, Any]] = [
    {"format": "int8", "group_size": None, "activations": "int8"},
    {"format": "int8", "group_size": 64},
    {"format": "int4", "group_size": 32},
    {"format": "float8_e4m3"},
    {"format": "uint3", "group_size": 32},
]
_CONFIGS: list[dict[str, Any]] = [
    TrainWeightsConfig().to_dict(),
    TrainWeightsConfig("int4", 32, ["lm_head", "re:x"], {"re:.*down_proj": "int8", "a.b": None}).to_dict(),
    TrainWeightsConfig("int8", overrides={"a": _FORMATS[2]}, include_embeddings=True, activations="int8").to_dict(),
]
_POLICIES: list[dict[str, Any]] = [
    Policy().to_dict(),
    Policy("compact", {"optimizer": "lossless", "re:.*embed.*": "raw", "weight/re:a": _FORMATS[2]}).to_dict(),
    Policy("near-lossless", {"weight": {"codec": "delta-uniform", "bound": 1e-5}, "exp_avg_sq": "log-rank1"}).to_dict(),
]
# Two of them take an engine that backtracks longer than a life on a name of a few dozen letters.
_PATTERNS = ["re:(a+)+$", "re:(.*a){25}x", "re:(", "re:[", "re:.*", "re:\\", "re:(?P<x>a)(?P=x)", "re:^.{1,99999}$"]
_WORDS = ["int8", "int4", "float8_e4m3", "lossless", "compact", "raw", "planes", "weight", "optimizer", "exp_avg/re:x"]
_KEYS = ["format", "group_size", "activations", "overrides", "mode", "rules", "codec", "bound", "step", "dequantize"]
_NAMES = ["model.layers.0.mlp.down_proj.weight", "a" * 60, "lm_head"]


class Configurations(Target):
    """What is taken from JSON survives the way through JSON again; anything else names the option."""

    name = "configurations"
    share = 1.5
    limit_seconds = 20.0  # matching may take five
    inputs_in_suite = 5000

    def mutate(self, rng: random.Random) -> tuple[str, Any]:
        kind = rng.choice(("config", "config", "policy", "policy", "format"))
        begin = {"config": _CONFIGS, "policy": _POLICIES, "format": _FORMATS}[kind]
        junk = (*_WORDS, *_PATTERNS[2:], {"format": "int4", "group_size": 32}, {"re:.*": "int8"}, {"codec": "raw"})
        value = change_json(rng, json.loads(json.dumps(rng.choice(begin))), (*_KEYS, *_PATTERNS[2:]), junk)
        if rng.random() < 0.0002:
            value[rng.choice(("overrides", "rules"))] = {rng.choice(_PATTERNS[:2]): "int8"}
        return kind, value

    def run(self, given: tuple[str, Any]) -> Outcome:
        kind, value = given
        logging.disable(logging.WARNING)  # keys that are kept are logged
        if kind == "format":
            made: Any = get_format(value)
            again: Any = get_format(json.loads(json.dumps(made.get_config())))
        elif kind == "policy":
            made = Policy.from_dict(value)
            again = Policy.from_dict(json.loads(json.dumps(made.to_dict())))
        else:
            made = TrainWeightsConfig.from_dict(value)
            made.format_for(_NAMES)
            again = TrainWeightsConfig.from_dict(json.loads(json.dumps(made.to_dict())))
        if repr(again) != repr(made):
            raise BrokenPromiseError(f"{kind}: another value after a way through JSON")
        return Outcome.ACCEPTED
