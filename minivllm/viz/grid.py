"""Tables of coloured cells: the one form that every picture here has, as text and as SVG.

Colour is never the only sign: a cell's text, its row or its column says what the colour says, and the text form is
made from the very cells that are drawn. vLLM has nothing of the kind.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

INK = "#1b1b1b"
PAPER = "#ffffff"
CHANGED = "*"  # ends the text of a cell that differs from the step before
CHAR, HEIGHT, PAD = 8, 26, 9  # pixels: a character's width, a row's height, the room beside a cell's text


class Style(NamedTuple):
    """How one kind of cell is drawn.

    Mirrors: none; a picture's detail.
    """

    fill: str
    border: str
    dash: str = ""


# Light fills under dark ink, at least 4.5 : 1; borders at least 4.5 : 1 on paper.
PALETTE: dict[str, Style] = {
    "plain": Style(PAPER, "#5f5f5f"),
    "none": Style(PAPER, "#6b6b6b", "2 3"),
    "null": Style("#dcdcdc", "#4d4d4d", "6 2"),
    "free": Style("#f4f4f4", "#5f5f5f", "4 3"),
    "cached": Style("#fff2b3", "#7a5b00", "6 2"),
    "used": Style("#cfe8ff", "#0b5394"),
    "prefill": Style("#d3efd3", "#1e6b1e"),
    "decode": Style("#cfe8ff", "#0b5394"),
    "preempted": Style("#ffd9d0", "#a3210a", "6 2"),
    "owner0": Style("#cfe8ff", "#0b5394"),
    "owner1": Style("#ffe0b8", "#8a4b00"),
    "owner2": Style("#d3efd3", "#1e6b1e"),
    "owner3": Style("#eadcf8", "#5b2a86"),
    "owner4": Style("#fbd5e5", "#9c1c55"),
    "owner5": Style("#d2f1ee", "#00635a"),
}


def owner(index: int) -> str:
    """The kind of cells that belong to request (or group) number `index`; colours repeat after six."""
    return f"owner{index % 6}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Mirrors: none; a picture's detail.
    """

    text: str
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Grid:
    """A titled table: one label a column and a row, and lines of notes below.

    Mirrors: none; a picture's detail.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            if len(cells) != len(self.columns):
                raise ValueError(f"row {label!r} has {len(cells)} cells for {len(self.columns)} columns")

    def widths(self) -> list[int]:
        """Characters of the row labels and of each column."""
        labels = max((len(label) for label, _ in self.rows), default=0)
        columns = [
            max([len(head), *(len(cells[i].text) for _, cells in self.rows)]) for i, head in enumerate(self.columns)
        ]
        return [labels, *columns]


def ascii_grid(grid: Grid) -> str:
    """The picture as aligned text."""
    label, *columns = grid.widths()

    def line(head: str, texts: list[str]) -> str:
        return f"{head:<{label}} " + " ".join(
            f"{text:>{width + 1}}" for text, width in zip(texts, columns, strict=True)
        )

    body = [line(head, [cell.text for cell in cells]) for head, cells in grid.rows]
    heads = [line("", list(grid.columns))] if any(grid.columns) else []
    return "\n".join(text.rstrip() for text in (grid.title, *heads, *body, *grid.notes))


def svg_grid(grid: Grid) -> str:
    """The picture as one SVG image."""
    label, *columns = (width * CHAR + 2 * PAD for width in grid.widths())
    lefts = [label + sum(columns[:i]) for i in range(len(columns))]
    parts: list[str] = []

    def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> None:
        if words:
            attributes = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
            parts.append(f"<text {attributes}>{escape(words)}</text>")

    text(PAD, 18, grid.title, weight="bold")
    top = HEIGHT + 4
    if any(grid.columns):
        for left, width, head in zip(lefts, columns, grid.columns, strict=True):
            text(left + width / 2, top + 17, head, "middle")
        top += HEIGHT
    for head, cells in grid.rows:
        text(PAD, top + 17, head)
        for left, width, cell in zip(lefts, columns, cells, strict=True):
            style = PALETTE[cell.kind]
            dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
            thick = 3 if cell.text.endswith(CHANGED) else 1
            box = f'x="{left + 1}" y="{top + 1}" width="{width - 2}" height="{HEIGHT - 2}" rx="3"'
            parts.append(f'<rect {box} fill="{style.fill}" stroke="{style.border}" stroke-width="{thick}"{dash}/>')
            text(left + width / 2, top + 17, cell.text, "middle")
        top += HEIGHT
    for note in grid.notes:
        text(PAD, top + 20, note)
        top += 22
    longest = max((len(line) for line in (grid.title, *grid.notes)), default=0) * CHAR
    width, height = max(label + sum(columns), longest) + 2 * PAD, top + 10
    frame = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{frame}{"".join(parts)}</svg>'


def mark_changes(before: Grid, after: Grid) -> Grid:
    """`after`, with an asterisk on each cell that `before` has otherwise, or not at all."""
    known = dict(before.rows)

    def marked(label: str, place: int, cell: Cell) -> Cell:
        old = known.get(label, ())
        same = place < len(old) and old[place].text == cell.text
        return cell if same or not cell.text else replace(cell, text=f"{cell.text}{CHANGED}")

    rows = tuple((label, tuple(marked(label, i, cell) for i, cell in enumerate(cells))) for label, cells in after.rows)
    return replace(after, rows=rows)


def img(grid: Grid, attributes: str = "") -> str:
    """The picture as an <img> that carries its own data: notebooks drop a bare <svg> until they are trusted."""
    data = base64.b64encode(svg_grid(grid).encode()).decode()
    alt = escape("; ".join(line.strip() for line in ascii_grid(grid).splitlines()))
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}"{attributes}>'
