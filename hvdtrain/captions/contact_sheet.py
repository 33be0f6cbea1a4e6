"""A page of captioned pictures, in one HTML file that refers to nothing outside itself.

Pictures are small JPEGs inside the page. All text is escaped: a caption's words come from a data set, a picture's name
from a disk.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from hvdtrain.data.pixels import FORMATS, pixels

SIDE = 320
"""The longer side of a picture in the page, in pixels, at most"""
STYLE = """
:root { --ink: #1b1f24; --soft: #5c6670; --line: #d8dce1; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa4ae; --line: #3a424b; --paper: #15191e; } }
html { background: var(--paper); color: var(--ink); font: 100%/1.45 system-ui, "DejaVu Sans", sans-serif; }
body { max-width: 80rem; margin: 0 auto; padding: 2rem 1.25rem; overflow-wrap: anywhere; }
header p, figcaption small, ul { color: var(--soft); }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; border-top: 1px solid var(--line); padding-top: .75rem; break-inside: avoid; }
img { display: block; width: 100%; height: 14rem; object-fit: contain; object-position: left; }
figcaption p { margin: .5rem 0 .25rem; font-weight: 600; }
ul { margin: .25rem 0; padding-left: 1.1rem; font-size: .875rem; }
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One captioned picture."""

    name: str
    caption: str
    references: Sequence[str]
    """What people said of it; empty if that is not known"""
    jpeg: bytes


def jpeg(picture: NDArray[np.uint8]) -> bytes:
    """A picture (height, width, 3) as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=85)
    return file.getvalue()


def thumbnail(path: Path) -> bytes:
    """A picture file as a small JPEG of the same proportions. Raises any exception if it is no good one."""
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        if image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8):  # turned on its side
            width, height = height, width
    shrink = min(1.0, SIDE / max(width, height))
    shape = (max(1, round(height * shrink)), max(1, round(width * shrink)), 3)
    return jpeg(pixels(str(path), shape, fast_jpeg=True))


def page(title: str, about: str, cards: Iterable[Card]) -> str:
    """The whole document; `about` is one line under the title."""
    figures = "\n".join(_figure(card) for card in cards)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(about)}</p>
</header>
<main>
{figures}
</main>
</body>
</html>
"""


def _figure(card: Card) -> str:
    source = f"data:image/jpeg;base64,{base64.b64encode(card.jpeg).decode()}"
    told = "".join(f"<li>{escape(sentence)}</li>" for sentence in card.references)
    return (
        f'<figure>\n<img src="{source}" alt="{escape(card.caption)}" loading="lazy">\n'
        f"<figcaption><p>{escape(card.caption) or '(no words)'}</p><small>{escape(card.name)}</small>"
        f"{f'<ul>{told}</ul>' if told else ''}</figcaption>\n</figure>"
    )
