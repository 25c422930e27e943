"""Pieces of HTML that several sections of the benchmark's page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, hint: str, content: str, name: str = "") -> str:
    """A card with a heading, a sentence that says how to read it (plain text, may be empty), and HTML below."""
    said = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    where = f' id="{name}"' if name else ""
    return f'<section class="card"{where}><h2>{escape(title)}</h2>{said}{content}</section>'


def folded(summary: str, content: str) -> str:
    """HTML that is shown on demand."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def listed(lines: Sequence[str]) -> str:
    """Sentences of plain text."""
    return f'<ul class="said">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def head(name: str, below: str = "", text: bool = False) -> str:
    """A column's heading, with its unit below; `text` columns are aligned to the left."""
    kind = ' class="text"' if text else ""
    small = f"<small>{escape(below)}</small>" if below else ""
    return f'<th scope="col"{kind}>{escape(name)}{small}</th>'


def table(label: str, heads: Sequence[str], body: str) -> str:
    """A table that may scroll sideways, by keyboard too. `label` names it; `heads` and `body` are HTML."""
    rows = f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>{rows}</table></div>'


def record(name: str, cells: Sequence[str], text: int = 0) -> str:
    """A table's row of plain text; the first `text` cells are aligned to the left."""
    kinds = [' class="text"' if i < text else "" for i in range(len(cells))]
    shown = (f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells, strict=True))
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(shown)}</tr>'


def swatches(names: Sequence[tuple[str, str]]) -> str:
    """A legend of fills: `(class, name)`."""
    items = "".join(f'<li><span class="swatch {kind}"></span>{escape(name)}</li>' for kind, name in names)
    return f'<ul class="legend">{items}</ul>'
