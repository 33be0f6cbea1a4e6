"""The HTML of a report's parts: tables, figures as inline SVG, lists. Everything that comes from records is escaped.

The page refers to nothing outside itself: no script, no font, no picture, no link but to its own headings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from hvdtrain.results.table import Table
from hvdtrain.system.exits import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NARROW = 360
"""Points in the width of a figure whose letters are legible on a phone"""


def text(value: object) -> str:
    """Escapes text for HTML; control characters are shown as escapes."""
    return escape(printable(str(value)))


def page(title: str, header: str, first: str, sections: Sequence[tuple[str, str]]) -> str:
    """The document: header, the first screen, contents, and each (heading, HTML) as a section."""
    css = resources.files("hvdtrain.results").joinpath("report.css").read_text()
    links = "\n".join(f'<li><a href="#{anchor(name)}">{text(name)}</a></li>' for name, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{anchor(name)}">\n<h2 id="{anchor(name)}">{text(name)}</h2>\n{inner}\n</section>'
        for name, inner in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{text(title)}</h1>
{header}
</header>
<section class="first">
{first}
</section>
<nav aria-label="Contents">
<ol>
{links}
</ol>
</nav>
<main>
{body}
</main>
</body>
</html>
"""


def anchor(name: str) -> str:
    """A heading's id."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table(shown: Table, number: int, said: Collection[str] = ()) -> str:
    """A table with its caption and sections; below it, as wide as the page, its readings and the notes that were not
    `said` already."""
    sides = [' class="text"' if shown.is_text(column) else "" for column in shown.columns]
    headings = "".join(
        f'<th scope="col"{side}>{text(column.heading)}</th>' for column, side in zip(shown.columns, sides, strict=True)
    )
    width = len(shown.columns)
    bodies = []
    for name, rows in shown.sections():
        lines = [f'<tr class="section"><th scope="rowgroup" colspan="{width}">{text(name)}</th></tr>'] if name else []
        for row in rows:
            first, *rest = zip(shown.cells(row), sides, strict=True)
            cells = [f'<th scope="row"{first[1]}>{text(first[0])}</th>']
            cells += [f"<td{side}>{text(cell)}</td>" for cell, side in rest]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    notes = [("", note) for note in shown.notes if note not in said]
    head = f"<table>\n<caption>Table {number}. {text(shown.title)}</caption>\n<thead><tr>{headings}</tr></thead>"
    drawn = "\n".join([head, *bodies, "</table>"])
    below = bullets(shown.readings.items(), "findings") if shown.readings else ""
    below += bullets(notes, "notes") if notes else ""
    return f'<div class="table">{scroll(f"Table {number}", drawn)}\n{below}</div>'


def scroll(name: str, inner: str) -> str:
    """Wraps what may be wider than the page, so that it scrolls by itself, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">\n{inner}\n</div>'


def figure(drawn: Figure, kind: str, number: int, heading: str, caption: str) -> str:
    """A figure with its caption, letters as text, in the page's own ink and paper."""
    shown = scroll(f"Figure {number}", inline_svg(drawn, kind, f"{heading}. {caption}"))
    below = f"<figcaption><b>Figure {number}. {text(heading)}.</b> {text(caption)}</figcaption>"
    return f"<figure>\n{shown}\n{below}\n</figure>"


def inline_svg(drawn: Figure, kind: str, alt: str) -> str:
    """The figure as an SVG element whose ids are the kind's own, so that several stand in one page."""
    from hvdtrain.results.figures import style

    svg = style.encode(drawn, "svg", letters="none").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{kind}-", svg)
    for ink, name in ((style.INK, "ink"), (style.SOFT, "soft"), (style.GRID, "grid"), (style.PAPER, "paper")):
        svg = svg.replace(ink, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" ', svg)
    assert size, "matplotlib writes the size of an SVG in points"
    width = f"max-width: {float(size[1]) / 9:.4g}rem"  # letters of 9 points become as large as the page's own
    kind_of = ' class="wide"' if float(size[1]) > NARROW else ""
    return svg.replace(size[0], f'role="img" aria-label="{text(alt)}"{kind_of} style="{width}" ', 1)


def bullets(items: Iterable[tuple[str, str]], kind: str) -> str:
    """A list of class `kind`; each item's first part is bold, unless it is empty."""
    lines = ((lead, "<br>".join(map(text, rest.split("\n")))) for lead, rest in items)
    parts = (f"<b>{text(lead)}:</b> {rest}" if lead else rest for lead, rest in lines)
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{part}</li>" for part in parts) + "\n</ul>"


def definitions(terms: Iterable[tuple[str, str]]) -> str:
    return "<dl>\n" + "\n".join(f"<dt>{text(term)}</dt><dd>{text(what)}</dd>" for term, what in terms) + "\n</dl>"


def commands(blocks: Iterable[Sequence[str]]) -> str:
    """Commands to be copied, the lines of each block together."""
    return "\n".join("<pre><code>" + "\n".join(map(text, lines)) + "</code></pre>" for lines in blocks)
