"""What a selector selects, which of several decides, and what a misspelt one is told."""

from __future__ import annotations

import re

import pytest

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.selectors import most_exact, name_and_modules, require_used, select

WEIGHTS = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.10.mlp.down_proj.weight",
    "lm_head.weight",
]
NAMES = [module for name in WEIGHTS for module in name_and_modules(name)]


@pytest.mark.parametrize(
    ("selector", "indices"),
    [
        ("lm_head", [4]),
        ("lm_head.weight", [4]),
        ("model", [0, 1, 2, 3]),
        ("model.layers.1", [2]),
        ("layers.1", [2]),
        ("down_proj", [0, 2, 3]),
        ("0.mlp", [0, 1]),
        ("mlp.down_proj.weight", [0, 2, 3]),
        ("proj", []),
        ("down_proj.", []),
        ("layers..0", []),
        ("dwon_proj", []),
        ("", [0, 1, 2, 3, 4]),
        ("re:.*down_proj", [0, 2, 3]),
        ("re:.*down_proj.weight", [0, 2, 3]),
        ("re:down_proj", []),
        (r"re:.*\.[01]\.mlp", [0, 1, 2]),
        ("re:.*", [0, 1, 2, 3, 4]),
    ],
)
def test_a_selector_is_a_full_name_whole_parts_of_one_or_an_expression(selector: str, indices: list[int]) -> None:
    selected = select([selector], NAMES)[selector]
    assert [index for index, name in enumerate(WEIGHTS) if name in selected] == indices


def test_parts_of_names_are_asked_only_where_nothing_has_the_full_name() -> None:
    names = ["down", "down.weight", "mlp.down", "mlp.down.weight"]
    assert select(["down"], names)["down"] == {"down", "down.weight"}
    assert select(["down"], names[2:])["down"] == {"mlp.down", "mlp.down.weight"}


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        ("model.mlp.down.weight", "model.mlp.down"),
        ("model.mlp.down", "model.mlp"),
        ("model.mlp.down", "down.weight"),
        ("model", "mlp.down.weight"),
        ("weight", "mlp.down"),
        ("mlp.down.weight", "down.weight"),
        ("mlp.down", "down"),
        ("down", "re:model.mlp.down.weight"),
    ],
)
def test_the_more_exact_selector_decides_in_either_order(stronger: str, weaker: str) -> None:
    names = [*name_and_modules("model.mlp.down.weight"), "model.bias"]
    for selectors in ([stronger, weaker], [weaker, stronger]):
        assert most_exact(select(selectors, names), ["model.mlp.down", "model.mlp.down.weight"]) == stronger


@pytest.mark.parametrize("selectors", [["re:.*", "re:a.*"], ["re:a.*", "re:.*"], ["a", "b"], ["b", "a"]])
def test_of_equally_exact_selectors_the_first_decides(selectors: list[str]) -> None:
    names = ["x.a.b.c", "x.a.b.c.weight"]
    selected = select([selector.replace("re:a", "re:x.a") for selector in selectors], names)
    assert most_exact(selected, names) == next(iter(selected))


def test_nothing_decides_for_a_name_that_nothing_selects() -> None:
    assert most_exact(select(["a", "re:b"], ["a", "b", "c"]), ["c"]) is None


@pytest.mark.parametrize(
    ("selector", "next_step"),
    [
        ("dwon_proj", 'Did you mean "down_proj"?'),
        ("lm_haed", 'Did you mean "lm_head"?'),
        ("mlp.dwon_proj", 'Did you mean "mlp.down_proj"?'),
        ("model.layer.0", 'Did you mean "model.layers.0"?'),
        ("re:.*dwon_proj", 'Did you mean "down_proj"?'),
        (
            r"layers\.\d+\.mlp",
            'Write "re:" before a regular expression. Look at the names in model.named_parameters().',
        ),
        ("classifier", "Look at the names in model.named_parameters()."),
        ("re:[0-9]x", "Look at the names in model.named_parameters()."),
    ],
)
def test_a_selector_that_selects_nothing_is_refused_with_the_nearest_that_would(selector: str, next_step: str) -> None:
    with pytest.raises(ConfigError, match=rf"^overrides\[{re.escape(repr(selector))}\]: expected a module, ") as error:
        require_used("overrides", select(["lm_head", selector], NAMES), NAMES)
    assert error.value.next_step == next_step
    require_used("overrides", select(["lm_head", "re:.*mlp"], NAMES), NAMES)


def test_selectors_together_select_what_each_selects_alone() -> None:
    selectors = ["", "model", "0.mlp", "down_proj", "lm_head.weight", "mlp.up_proj.weight", "dwon", "re:.*head"]
    assert select(selectors, NAMES) == {selector: select([selector], NAMES)[selector] for selector in selectors}
