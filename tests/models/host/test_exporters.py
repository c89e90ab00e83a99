"""How Transformers' exporters are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES

from hf_trainweights.models.host import models


def test_an_exporter_gets_its_options_and_no_part_of_a_model_returns_a_cache_where_none_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exporter:
        """Does as Transformers' own: what is asked for goes to the model's configuration, and not to the call."""

        def export(self, model: Any, inputs: dict[str, Any], options: object) -> Any:
            assert options == {"dynamic": True, "opset_version": 21, "dynamic_shapes": None}
            model.config.use_cache = inputs.pop("use_cache")
            with torch.no_grad():
                self.program = model(**inputs)
            return self

        components = ()

    replacements = {"OnnxExporter": Exporter, "OnnxConfig": dict}
    monkeypatch.setattr(models, "private", lambda _, name: replacements[name])
    architecture = ARCHITECTURES["t5"]
    model, inputs = architecture.build(torch.float32).eval(), architecture.make_inputs()
    before = model.decoder.config.use_cache
    outputs = models.onnx_graph(model, {**inputs, "use_cache": False}, 21)
    assert list(outputs) == ["logits", "encoder_last_hidden_state"]
    assert model.decoder.config.use_cache is before is True
