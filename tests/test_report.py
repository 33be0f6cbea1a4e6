"""The report is one self-contained page with the numbers of the tables, and escapes all text from records."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import runs
from conftest import finished

from hvdtrain.results.read.frame import load
from hvdtrain.results.report import document
from hvdtrain.results.tables.overview import listing

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert('1')</script>\"&{x}"


class Page(HTMLParser):
    """The elements of a page, with their texts and attributes. Fails on unbalanced tags."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if self.rows and {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def text(self) -> str:
        return " ".join("".join(data for _, data in self.texts).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Added hosts are slower at 10 Mbit/s and faster at 1000. Some runs do not count."""
    root = tmp_path_factory.mktemp("runs")
    for hosts, rate_mbit, train_s in ((1, None, 100), (2, 10.0, 300), (4, 10.0, 500), (2, 1000.0, 52), (4, 1000.0, 27)):
        for seed in range(3):
            runs.make(
                root / f"h{hosts}-{rate_mbit}-s{seed}",
                hosts=hosts,
                rate_mbit=rate_mbit,
                seed=seed,
                rank_batch=64 // hosts,
                train_s=train_s * (1 + 0.01 * seed),
            )
    runs.make(root / "energy", kind="energy", rank_batch=64, train_s=100, energy_w={"cpu0": 30.0})
    runs.make(root / "stopped", complete=False)
    runs.make(root / "slow-link", hosts=2, rate_mbit=10.0, kind="timing", marked="link b is 12 % off")
    runs.make(root / "damaged", hosts=2, rate_mbit=10.0)
    (root / "damaged" / "metrics" / "rank0000.jsonl").write_text('{"type": "step", "step": -1}\n')
    return root


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(document.page(load([folder])))


def test_the_same_runs_give_the_same_page_for_any_hash_seed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    command = [sys.executable, "-m", "hvdtrain.results", "report", folder, "-o", path]
    done = finished(command, extra={"PYTHONHASHSEED": "1"})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert path.read_text() == document.page(load([folder]))
    assert path.stat().st_size < 2_000_000


def test_the_page_is_self_contained(page: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src"
        if name in ("href", "xlink:href"):
            assert value.startswith("#") and value[1:] in ids, (tag, value)
        assert all(target in ids for target in re.findall(r"url\(#([^)]+)\)", value))
        assert "://" not in value and "data:" not in value
    css = "".join(data for tag, data in page.texts if tag == "style")
    assert "@import" not in css and "url(" not in css
    assert "prefers-color-scheme" in css and "@media print" in css


def test_every_number_of_the_tables_is_on_the_page_as_printed(folder: Path, page: Page) -> None:
    loaded = load([folder])
    for table in [*document.tables(loaded), listing(loaded)]:
        for part in table.parts():
            assert [column.heading for column in part.columns] in page.rows
            assert all(cells in page.rows for cells in part.text())
            assert part.reading in page.text()


def test_the_first_screen_has_the_conclusions_of_the_main_table(folder: Path, tmp_path: Path) -> None:
    for hosts in (1, 2):  # a race to the target
        rate = 10.0 if hosts > 1 else None
        runs.make(tmp_path / f"{hosts}", hosts=hosts, rate_mbit=rate, accuracies=(0.5, 0.96), rank_batch=32 // hosts)
    for root, name in ((folder, "scaling"), (tmp_path, "strategies")):
        main, *_ = document.tables(load([root]))
        first = Page(document.page(load([root]))).text().partition("Figure 2.")[0]
        assert main.name == name and main.readings
        assert all(f"{title}: {reading}" in first for title, reading in main.readings.items())
        assert "Figure 1." in first and f"Table 1. {main.title}" in first


def test_text_from_records_is_escaped_and_secrets_are_hidden(tmp_path: Path) -> None:
    for hosts in (1, 2):
        folder = runs.make(
            tmp_path / f"<b>{hosts}",
            hosts=hosts,
            rate_mbit=10.0 if hosts > 1 else None,
            strategy=HOSTILE,
            framework=HOSTILE,
            sweep=HOSTILE,
            argv=("--api-token", "hunter2", "--run-dir", "elsewhere", "--lr", "1"),
            energy_w={HOSTILE: 3.0},
            config={"lr": HOSTILE, "width": hosts},
        )
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"h0"', '"<i>h0"').replace('"2.13.0"', '"</style><u>"'))
    runs.make(tmp_path / "marked", kind="timing", marked=HOSTILE)
    (tmp_path / "foreign<hr>").mkdir()
    (tmp_path / "foreign<hr>" / "manifest.json").write_text("{")
    seen = Page(document.page(load([tmp_path])))
    assert not {"script", "b1", "hr", "u", "i"} & set(seen.tags)
    assert all(text in seen.text() for text in (HOSTILE, "</style><u>", "foreign<hr>"))
    assert "python -m hvdtrain.resnet --api-token '***' --lr 1" in seen.text()
    assert "hunter2" not in seen.text()
