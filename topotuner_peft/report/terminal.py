"""Tables and summaries for a terminal."""

from __future__ import annotations

import operator
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .comparison import forgetting_sentence, headline, methods_table, stopping_sentence

_GAP = "  "
_SHORTEST = 12


def render_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: Sequence[str] | None = None,
    width: int | None = None,
) -> str:
    """Return a plain-text table.

    Parameters
    ----------
    columns : sequence of str
        Headings.
    rows : sequence of sequence of str
        Cells, as many per row as there are columns.
    align : sequence of {"l", "r"}, optional
        By default the first column is aligned left, the others right.
    width : int, optional
        Characters per line; by default the terminal's. Where the table is wider, the widest column gives way: long
        cells lose their middle, down to 12 characters.

    Returns
    -------
    str
        Lines without trailing blanks.

    Examples
    --------
    >>> print(render_table(["matrix", "drift"], [["q", "0.5"], ["v", "12.25"]], width=40))
    matrix  drift
    ──────  ─────
    q         0.5
    v       12.25
    """
    wrong = [row for row in rows if len(row) != len(columns)]
    if wrong:
        raise ValueError(f"A row has {len(wrong[0])} cells, the table {len(columns)} columns: {wrong[0]}.")
    align = align or ["l", *("r" for _ in columns[1:])]
    width = width or shutil.get_terminal_size().columns
    widths = [max(len(cells[i]) for cells in (columns, *rows)) for i in range(len(columns))]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    if excess > 0:
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] = max(min(widths[widest], _SHORTEST), widths[widest] - excess)

    def line(cells: Sequence[str]) -> str:
        shown = (
            _shorten(cell, size).rjust(size) if side == "r" else _shorten(cell, size).ljust(size)
            for cell, size, side in zip(cells, widths, align, strict=True)
        )
        return _GAP.join(shown).rstrip()

    return "\n".join([line(columns), _GAP.join("─" * size for size in widths), *(line(row) for row in rows)])


def _shorten(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    head = (size - 1) // 2
    return f"{text[:head]}…{text[len(text) - (size - 1 - head) :]}"


def summary_text(results: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return what the demo says at its end: headline, table, stopping, forgetting, caveats.

    Parameters
    ----------
    results : mapping
        The content of the demo's ``results.json``.
    width : int, optional
        Characters per line; by default the terminal's, at most 120 for sentences.
    """
    width = width or shutil.get_terminal_size().columns
    sentences = min(width, 120)

    def paragraph(text: str, indent: str = "") -> str:
        return textwrap.fill(text, sentences, initial_indent=indent, subsequent_indent=" " * len(indent))

    columns, rows = methods_table(results)
    table = "\n\n".join(
        render_table([columns[0], *part(columns)], [[row[0], *part(row)] for row in rows], width=width)
        for part in _parts(columns, rows, width)
    )
    reload = results["reload"]
    same = "bit for bit" if reload["bit_equal"] else f"up to {reload['max_abs_difference']:.2g}"
    size = results["adapter"]["bytes"] / 1e6
    parts = [
        paragraph(headline(results)),
        table,
        paragraph(stopping_sentence(results)),
        paragraph(f"The adapter is {size:.1f} MB; reloaded in a new process it gives the same logits {same}."),
        paragraph(forgetting_sentence(results)),
        "\n".join(paragraph(text, "- ") for text in results["caveats"]),
    ]
    return "\n\n".join(parts)


def _parts(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Callable]:
    """Cut the columns after the first into runs that fit the width beside the first; return one slicer each."""
    widths = [max(len(cells[i]) for cells in (columns, *rows)) for i in range(len(columns))]
    parts, start, used = [], 1, widths[0]
    for i in range(1, len(columns)):
        if used + len(_GAP) + widths[i] > width and i > start:
            parts.append(operator.itemgetter(slice(start, i)))
            start, used = i, widths[0]
        used += len(_GAP) + widths[i]
    return [*parts, operator.itemgetter(slice(start, None))]
