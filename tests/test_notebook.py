"""Tables in the cells of a notebook: escaped, and never too long to show."""

from __future__ import annotations

from hf_trainweights.notebook import html_table


def test_a_notebook_gets_the_first_thousand_rows() -> None:
    html = html_table("all", ["name"], ([index] for index in range(1500)))
    assert html.count("<tr>") == 1002
    assert "<td>999</td></tr><tr><td>and 500 more</td></tr>" in html
