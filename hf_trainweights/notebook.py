"""Tables as HTML, for the cells of a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

_MOST_ROWS = 1000


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, folded: bool = False) -> str:
    """Return a table as HTML, its texts escaped, of at most a thousand rows.

    A `folded` table shows only its caption until the reader clicks on it.

    Examples:
        >>> html_table("sizes", ["name", "bytes"], [("<w>", 4)])
        '<p>sizes</p><table><tr><th>name</th><th>bytes</th></tr><tr><td>&lt;w&gt;</td><td>4</td></tr></table>'
    """
    rows = list(rows)
    shown = [_html_row("td", row) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        shown.append(_html_row("td", [f"and {len(rows) - _MOST_ROWS} more"]))
    table = Markup("<table>{}{}</table>").format(_html_row("th", head), Markup("").join(shown))
    template = "<details><summary>{}</summary>{}</details>" if folded else "<p>{}</p>{}"
    return str(Markup(template).format(caption, table))


def _html_row(tag: str, cells: Iterable[object]) -> Markup:
    return Markup("<tr>{}</tr>").format(
        Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(escape(cell)) for cell in cells)
    )
