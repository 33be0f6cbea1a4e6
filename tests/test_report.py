"""The report is one page that needs nothing else, holds the tables' numbers, and trusts no record."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import runs
from conftest import LIMIT_S, failing, finished

from hvdtrain.results import report, report_words
from hvdtrain.results.load import load
from hvdtrain.results.statistics import Interval
from hvdtrain.results.tables import listing
from hvdtrain.system import exits

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
    return Page(report.page(load([folder])))


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds on 1, 2 and 4 hosts of two strategies that reach 95 %, one with a long name, and of one that fails."""
    root = tmp_path_factory.mktemp("race")
    long = {"every": 6, "staleness": 1, "outer_lr": 0.7, "outer_momentum": 0.9, "inner": "powersgd", "rank": 12}
    for hosts, rate_mbit in ((1, None), (2, 10.0), (4, 10.0), (2, 1000.0), (4, 1000.0)):
        for seed in range(2):
            for strategy, last in (("allreduce", 0.96), ("local-sgd", 0.97), ("onebit", 0.9))[: hosts + 1]:
                slow = 860 / rate_mbit if strategy == "allreduce" and rate_mbit else 1
                runs.make(
                    root / f"{strategy}-{hosts}-{rate_mbit}-{seed}",
                    hosts=hosts,
                    rate_mbit=rate_mbit,
                    strategy=strategy,
                    config=long if strategy == "local-sgd" else {},
                    seed=seed,
                    rank_batch=32 // hosts,
                    accuracies=(0.6, last),
                    train_s=200.0 / hosts * slow * (1 + seed / 50),
                    energy_w={"cpu0": 30.0, "gpu0": 4.0} if seed == 0 else None,
                    interval_s=50.0,
                )
    return root


def test_equal_runs_give_an_equal_page_whatever_the_hash_seed(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        words = [sys.executable, "-m", "hvdtrain.results", "report", folder, "-o", tmp_path / f"{number}.html"]
        done = finished(words, extra={"PYTHONHASHSEED": str(number)})
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
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
    loaded = load([folder])
    for table in [*report.tables(loaded), listing(loaded)]:
        assert [column.heading for column in table.columns] in page.rows
        places = [page.rows.index(cells) for cells in table.text()]
        assert len(places) == len(table.rows)
        for reading in table.readings.values():
            assert " ".join(reading.split()) in page.text()


def test_the_first_screen_answers_by_bandwidth(page: Page, race: Path) -> None:
    first = page.text().partition("What else the runs say")[0]
    assert "Training time for the same epochs At 10 Mbit/s two hosts need 3 times as long as one with plain" in first
    assert "(allreduce), four hosts need 5 times as long." in first
    assert "At 1000 Mbit/s two hosts are 1.9 times as fast as one with plain Horovod (allreduce), four" in first
    assert "Figure 1. Training time against hosts." in first and "Table 1. Scaling over hosts" in first
    raced = Page(report.page(load([race]))).text().partition("What else the runs say")[0]
    (name,) = {one for one in load([race]).runs["strategy"] if one.startswith("local-sgd")}
    assert "Training time to 95 % validation accuracy At 10 Mbit/s two hosts need 43 times as long as one" in raced
    assert f"; with {name} four hosts are 4 times as fast." in raced
    assert "Figure 1. Time to the target" in raced and "Table 1. Strategies: to 95 %" in raced
    failed = Page(report.page(load([race]), target=0.965)).text()
    assert "with plain Horovod two hosts and four hosts do not get there; with local-sgd" in failed


def test_runs_on_one_machine_are_compared_by_their_ranks(tmp_path: Path) -> None:
    """As the first sweep, launch/sweeps/quick.toml, makes them."""
    for ranks, train_s in ((1, 10.0), (2, 6.0)):
        for seed in range(3):
            asked = {"ranks_per_host": ranks, "rank_batch": 64 // ranks, "seed": seed}
            runs.make(tmp_path / f"{ranks}-{seed}", train_s=train_s * (1 + 0.01 * seed), **asked)
    text = Page(report.page(load([tmp_path]))).text()
    assert "Training time for the same epochs Two ranks are 1.7 times as fast as one with plain Horovod" in text
    assert "Figure 1. Training time against ranks." in text and "Table 1. Scaling over ranks" in text
    assert "Nothing to compare with" not in text


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        ((0.0233, 0.02, 0.03), "need 43 times as long"),
        ((1.73, 1.1, 2.8), "are 1.7 times as fast"),
        ((1.73, 0.9, 2.8), "take about as long"),
        ((1.04, 1.03, 1.05), "take about as long"),
        ((0.96, 0.95, 0.97), "take about as long"),
        ((1.73, None, None), "are 1.7 times as fast (single runs)"),
        ((9.0, 8.0, 10.0), "are 9 times as fast (suspect: more than they can share)"),
    ],
)
def test_a_verdict_claims_no_more_than_its_interval(speedup: tuple[float, float, float], said: str) -> None:
    assert report_words.verdict({"hosts": 2, "speedup": Interval(*speedup)}) == said


def test_the_summary_says_how_sure_it_is(page: Page) -> None:
    assert "15 timing runs of 5 settings, 3 of each." in page.text()
    assert "at most" in page.text() and "± 2.46 %" in page.text()  # t(0.975; 2) s / (sqrt(3) mean) of 1.00, 1.01, 1.02


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
    seen = Page(report.page(loaded))
    assert not {"script", "b1", "hr", "u", "i"} & set(seen.tags)
    assert HOSTILE in seen.text()
    assert "</style><u>" in seen.text()
    assert "foreign<hr>" in seen.text()


def test_one_run_makes_a_page_that_says_what_is_lacking(tmp_path: Path) -> None:
    runs.make(tmp_path / "run", argv=["--threads", "2", "--run-dir", "r", "--lr", "1"])
    loaded = load([tmp_path])
    text = Page(report.page(loaded)).text()
    assert "Not shown" in text and "--monitor power" in text
    assert "how far they spread is not known" in text
    assert "python -m hvdtrain.resnet --threads 2 --lr 1" in text
    assert "None: every run is complete" in text
    assert "Missing: " in text and "\\n" not in text


def test_without_a_complete_run_the_page_says_so(tmp_path: Path) -> None:
    runs.make(tmp_path / "run", complete=False)
    text = Page(report.page(load([tmp_path]))).text()
    assert "Nothing yet" in text and "run: unfinished" in text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    runs.make(tmp_path / "run")
    with failing(exits.CANNOT_WRITE):
        report.write(load([tmp_path]), tmp_path / "missing" / "report.html")


FRAMES = """<script>
addEventListener("message", (event) => {
  document.body.append(Object.assign(document.createElement("pre"), {textContent: JSON.stringify(event.data)}));
});
</script>"""


@pytest.mark.parametrize("which", ["folder", "race"])
def test_a_browser_shows_everything_beside_and_nothing_over_anything(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """At 1280 and at 400 pixels: no text outside the page or its figure, none over another text or figure, a first
    screen that needs no scrolling sideways, and the answers at its top. A browser's own window has 500 pixels at
    least, so the page stands in frames, where programs/page_layout.js measures it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    html = report.page(load([request.getfixturevalue(which)]))
    script = (Path(__file__).parent / "programs" / "page_layout.js").read_text()
    (tmp_path / "page.html").write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    broken = (
        "<style>.short { position: absolute; width: 50rem } figure text { font-size: 2rem !important }</style></body>"
    )
    (tmp_path / "broken.html").write_text((tmp_path / "page.html").read_text().replace("</body>", broken))
    shown = (("page", 1280), ("page", 400), ("broken", 500))
    frames = "".join(f'<iframe src="{name}.html" width="{width}" height="900"></iframe>' for name, width in shown)
    (tmp_path / "frames.html").write_text(f"<body>{FRAMES}{frames}</body>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-quic", "--virtual-time-budget=20000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,900", "--dump-dom"]
    page = f"file://{tmp_path / 'frames.html'}"
    done = subprocess.run([chromium, *flags, page], timeout=LIMIT_S, check=True, capture_output=True, text=True)
    measured = [json.loads(unescape(text)) for text in re.findall("<pre>(.*?)</pre>", done.stdout, re.DOTALL)]
    by_width = {one["width"]: one for one in measured}
    for width in (1280, 400):
        assert by_width[width]["texts"] > 500
        assert by_width[width]["found"] == [], width
        assert by_width[width]["answers_end"] < 900, "the answers are on the first screen"
    seen = {text.partition(":")[0] for text in by_width[500]["found"]}
    assert {"outside the page", "cut off by its figure", "over a figure", "overlap"} <= seen, "it sees what is wrong"
