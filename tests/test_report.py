"""The report is one page that needs nothing else, holds the tables' numbers, and trusts no record."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import runs
from PIL import Image

from hvdtrain import exits
from hvdtrain.exits import Failure
from hvdtrain.results import accuracy, energy, report, scaling_table, tables
from hvdtrain.results.load import Loaded, load
from hvdtrain.results.table import Table

ROOT = Path(__file__).parent.parent
VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert('1')</script>\"&{x}"


class Page(HTMLParser):
    """What a browser would see: elements, their texts and attributes; fails on tags that do not match."""

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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if self.rows and {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def text(self) -> str:
        return " ".join("".join(data for _, data in self.texts).split())


def made_tables(loaded: Loaded) -> dict[str, Table]:
    made = [*scaling_table.scaling(loaded), tables.overview(loaded), accuracy.accuracy(loaded), *energy.energy(loaded)]
    return {table.name: table for table in [*made, tables.phases(loaded), tables.listing(loaded)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Added hosts are slower at 10 Mbit/s and faster at 1000; and runs that must not count."""
    root = tmp_path_factory.mktemp("runs")
    for hosts, rate_mbit, train_s in ((1, None, 100), (2, 10.0, 300), (4, 10.0, 500), (2, 1000.0, 52), (4, 1000.0, 27)):
        for seed in range(3):
            seconds = train_s * (1 + 0.01 * seed)
            asked = {
                "hosts": hosts,
                "rate_mbit": rate_mbit,
                "seed": seed,
                "rank_batch": 64 // hosts,
                "train_s": seconds,
            }
            runs.make(root / f"h{hosts}-{rate_mbit}-s{seed}", **asked)
    runs.make(root / "energy", kind="energy", rank_batch=64, train_s=100, energy_w={"cpu0": 30.0})
    runs.make(root / "stopped", complete=False)
    runs.make(root / "slow-link", hosts=2, rate_mbit=10.0, kind="timing", marked="link b is 12 % off")
    runs.make(root / "torn", hosts=2, rate_mbit=10.0)
    (root / "torn" / "metrics" / "rank0000.jsonl").write_text('{"type": "step", "step": -1}\n')
    return root


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    loaded = load([folder])
    return Page(report.page(loaded, made_tables(loaded)))


def test_equal_runs_give_an_equal_page_whatever_the_hash_seed(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        command = [
            sys.executable,
            "-m",
            "hvdtrain.results",
            "report",
            str(folder),
            "-o",
            str(tmp_path / f"{number}.html"),
        ]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": str(number)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == ""
    first, second = ((tmp_path / f"{number}.html").read_bytes() for number in (1, 2))
    assert first == second
    assert len(first) < 2_000_000


def test_nothing_outside_the_page_is_referred_to(page: Page) -> None:
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
    assert {"prefers-color-scheme", "@media print"} <= set(re.findall(r"prefers-color-scheme|@media print", css))


def test_it_can_be_read_by_all(page: Page) -> None:
    named = {(tag, name) for tag, name, _ in page.attributes}
    assert ("html", "lang") in named
    assert page.tags.count("svg") == page.tags.count("figcaption") == page.tags.count("figure") >= 8
    assert [value for tag, name, value in page.attributes if (tag, name) == ("svg", "role")] == [
        "img"
    ] * page.tags.count("svg")
    assert all(value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label"))
    scopes = [value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == page.tags.count("th") and set(scopes) == {"col", "row", "rowgroup"}
    assert page.tags.count("caption") == page.tags.count("table")
    assert page.tags.count("h1") == 1


def test_every_number_of_the_tables_is_on_the_page_as_printed(folder: Path, page: Page) -> None:
    for table in made_tables(load([folder])).values():
        assert [column.heading for column in table.columns] in page.rows
        places = [page.rows.index(cells) for cells in table.text()]
        assert len(places) == len(table.rows)
        for reading in table.readings.values():
            assert [reading] in page.rows


def test_the_summary_says_what_the_data_say(page: Page) -> None:
    text = page.text()
    assert "Each added host makes training slower: 10 Mbit/s" in text
    assert "Each added host makes training faster: 1000 Mbit/s" in text
    assert (
        "At 10 Mbit/s: torch allreduce on 1 host: training took 101.0 ± 2.5 s, clearly before torch allreduce on 2"
        in text
    )
    assert (
        "Of several hosts, torch allreduce on 2 hosts: 303.0 ± 7.5 s, clearly before torch allreduce on 4 hosts" in text
    )
    assert "At 1000 Mbit/s: torch allreduce on 4 hosts: training took 27.27 ± 0.67 s" in text
    assert "15 timing runs of 5 settings, 3 of each." in text
    assert "at most ± 2.46 %" in text  # t(0.975; 2) s / (sqrt(3) mean) of 1.00, 1.01, 1.02


def test_what_does_not_count_is_listed(page: Page, folder: Path) -> None:
    text = page.text()
    assert "stopped: unfinished" in text
    assert "slow-link: marked, link b is 12 % off" in text
    assert "torn: refused" in text
    assert any(row[0] == str(folder / "torn" / "metrics" / "rank0000.jsonl") and row[1] == "1" for row in page.rows)
    assert "Data of 2026-09-21" in text
    assert "# hosts: 4, ranks: 4, links: tools/throttle.sh 10mbit python -m hvdtrain.resnet" in text


def test_records_are_text_and_never_markup(tmp_path: Path) -> None:
    for hosts in (1, 2):
        folder = runs.make(
            tmp_path / f"<b>{hosts}",
            hosts=hosts,
            rate_mbit=10.0 if hosts > 1 else None,
            strategy=HOSTILE,
            framework=HOSTILE,
            kind="timing",
            sweep=HOSTILE,
            energy_w={HOSTILE: 3.0},
            config={"lr": HOSTILE, "width": hosts},
        )
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"h0"', '"<i>h0"').replace('"2.13.0"', '"</style><u>"'))
    runs.make(tmp_path / "marked", kind="timing", marked=HOSTILE)
    (tmp_path / "foreign<hr>").mkdir()
    (tmp_path / "foreign<hr>" / "manifest.json").write_text("{")
    loaded = load([tmp_path])
    seen = Page(report.page(loaded, made_tables(loaded)))
    assert not {"script", "b1", "hr", "u", "i"} & set(seen.tags)
    assert HOSTILE in seen.text()
    assert "</style><u>" in seen.text()
    assert "foreign<hr>" in seen.text()


def test_one_run_makes_a_page_that_says_what_is_lacking(tmp_path: Path) -> None:
    runs.make(tmp_path / "run", argv=["--threads", "2", "--run-dir", "r", "--shares", "1"])
    loaded = load([tmp_path])
    text = Page(report.page(loaded, made_tables(loaded))).text()
    assert "Not shown" in text and "--monitor power" in text
    assert "how far they spread is not known" in text
    assert "python -m hvdtrain.resnet --threads 2 --shares 1" in text
    assert "None: every run is complete" in text


def test_without_a_complete_run_the_page_says_so(tmp_path: Path) -> None:
    runs.make(tmp_path / "run", complete=False)
    text = Page(report.page(load([tmp_path]), {})).text()
    assert "Nothing yet" in text and "run: unfinished" in text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    runs.make(tmp_path / "run")
    with pytest.raises(Failure) as raised:
        report.write(load([tmp_path]), tmp_path / "missing" / "report.html", {})
    assert raised.value.code == exits.CANNOT_WRITE


def test_a_browser_shows_it(folder: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    loaded = load([folder])
    report.write(loaded, tmp_path / "report.html", made_tables(loaded))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    flags += ["--no-first-run", "--disable-sync", "--disable-quic", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--window-size=900,1600", f"--screenshot={tmp_path / 'page.png'}"]
    page = f"file://{tmp_path / 'report.html'}"
    subprocess.run([chromium, *flags, page], timeout=60, check=True, capture_output=True)
    with Image.open(tmp_path / "page.png") as shot:
        assert len(shot.convert("RGB").getcolors(1 << 24) or []) > 50  # letters and lines, no empty page
