"""MkDocs hook: pages from the root of the checkout, and links to files that are not pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "concepts/security.md",
}
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that GitHub expects in the root of a repository."""
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to root pages into links to their copies, and links to other files into their paths."""
    uri = page.file.src_uri
    source = next((name for name, copy in ROOT_PAGES.items() if copy == uri), f"docs/{uri}")

    def resolve(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(resolve, markdown)
