"""The HTML of the report: tables, figures as inline SVG, lists. Text from records is escaped.

The page is self-contained: it has no scripts, fonts or images, and links only to its own headings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from hvdtrain.results.tables.model import Part, Table
from hvdtrain.system.exits import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text(value: object) -> str:
    """Escapes text for HTML, and shows control characters as escapes."""
    return escape(printable(str(value)))


def page(title: str, header: str, first: str, sections: Sequence[tuple[str, str]]) -> str:
    """The document: header, first screen, contents, and sections of (heading, HTML)."""
    css = resources.files("hvdtrain.results.report").joinpath("report.css").read_text()
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


def anchor(heading: str) -> str:
    """The id of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def table(shown: Table, number: int, common: Collection[str] = ()) -> str:
    """A table with its caption, each part with its own columns, followed by its readings and its notes, except `common`
    ones."""
    caption = f"Table {number}. {shown.title}" + f" ({shown.caption()})" * bool(shown.caption())
    drawn = [_part(part, caption if not place else "") for place, part in enumerate(shown.parts())]
    notes = [("", note) for note in shown.notes if note not in common]
    below = bullets(shown.readings.items(), "findings") if shown.readings else ""
    below += bullets(notes, "notes") if notes else ""
    return f'<div class="table">{scroll(f"Table {number}", "".join(drawn) or text(caption))}\n{below}</div>'


def _part(part: Part, caption: str) -> str:
    """A part of a table; the first one has the caption of all."""
    sides = [' class="text"' if part.is_text(column) else "" for column in part.columns]
    headings = (column.heading for column in part.columns)
    head = _row(headings, sides, [' scope="col"' for _ in sides])
    names = [column.role == "setting" for column in part.columns]  # settings, or else the first column, name a row
    names = names if any(names) else [not place for place in range(len(names))]
    lines = [_row(cells, sides, [' scope="row"' if name else "" for name in names]) for cells in part.text()]
    above, body = ". ".join(filter(None, (caption, part.name, part.caption))), "\n".join(lines)
    return f"<table>\n<caption>{text(above)}</caption>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"


def _row(cells: Iterable[str], sides: Sequence[str], scopes: Sequence[str]) -> str:
    tags = ("th" if scope else "td" for scope in scopes)
    every = zip(tags, scopes, sides, cells, strict=True)
    made = (f"<{tag}{scope}{side}>{text(cell)}</{tag}>" for tag, scope, side, cell in every)
    return f"<tr>{''.join(made)}</tr>"


def scroll(name: str, inner: str) -> str:
    """Wraps an element that may be wider than the page, so that it scrolls separately, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">\n{inner}\n</div>'


def figure(drawn: Figure, kind: str, number: int, heading: str, caption: str) -> str:
    """A figure with its caption."""
    shown = scroll(f"Figure {number}", inline_svg(drawn, kind, f"{heading}. {caption}"))
    below = f"<figcaption><b>Figure {number}. {text(heading)}.</b> {text(caption)}</figcaption>"
    return f"<figure>\n{shown}\n{below}\n</figure>"


def inline_svg(drawn: Figure, kind: str, alt: str) -> str:
    """The figure as an SVG element in the page's colours. Its ids start with the kind, so that they are unique."""
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
    width = f"max-width: {float(size[1]) / 9:.4g}rem"  # 9-point letters get the size of the page's text
    return svg.replace(size[0], f'role="img" aria-label="{text(alt)}" style="{width}" ', 1)


def bullets(items: Iterable[tuple[str, str]], kind: str) -> str:
    """A list with the CSS class `kind`. The first part of each item is bold; it may be empty."""
    lines = ((lead, "<br>".join(map(text, rest.split("\n")))) for lead, rest in items)
    parts = (f"<b>{text(lead)}:</b> {rest}" if lead else rest for lead, rest in lines)
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{part}</li>" for part in parts) + "\n</ul>"


def definitions(terms: Iterable[tuple[str, str]]) -> str:
    return "<dl>\n" + "\n".join(f"<dt>{text(term)}</dt><dd>{text(what)}</dd>" for term, what in terms) + "\n</dl>"


def commands(blocks: Iterable[Sequence[str]]) -> str:
    """Blocks of command lines."""
    return "\n".join("<pre><code>" + "\n".join(map(text, lines)) + "</code></pre>" for lines in blocks)
