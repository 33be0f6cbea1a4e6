"""The content of the report, one HTML page that opens offline, in a browser or on paper: report.html lays it out.

The first screen has the conclusions of the main table, one figure and that table. The page takes its numbers from the
tables and contains no date except that of the data: the same runs give the same page, to the byte.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hvdtrain import records
from hvdtrain.results import export, figures, groups, scores
from hvdtrain.results.columns import Column
from hvdtrain.results.comparability import Count
from hvdtrain.results.figures import style
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import what_varies
from hvdtrain.results.tables import accuracy, energy, overview, scaling, strategies
from hvdtrain.results.tables.model import Table
from hvdtrain.system.exits import Failure, printable
from hvdtrain.system.redaction import without_secrets


def write(loaded: Loaded, path: Path, target: float = 0.95) -> None:
    """Writes the page. `target` is a value of the primary metric. Raises Failure (73)."""
    export.write(path, page(loaded, target).encode("utf-8", "replace"))


def tables(loaded: Loaded, target: float = 0.95) -> list[Table]:
    """The tables of the page in order. Strategies are compared only if a run over several hosts reached the target."""
    race = strategies.table(loaded, target)
    raced = any(row["train_to_target_s"] is not None and row["hosts"] != 1 for row in race.rows)
    made = [*([race] if raced else []), scaling.table(loaded), overview.overview(loaded)]
    return [*made, accuracy.table(loaded, target), energy.table(loaded), overview.phases(loaded)]


def page(loaded: Loaded, target: float = 0.95) -> str:
    """The page as an HTML document. Control characters of text from records are shown as escapes."""
    runs, usable = loaded.runs, groups.usable(loaded.runs)
    shown = [one for one in tables(loaded, target) if one.rows] if not usable.empty else []
    drawn, missing = _figures(loaded, what_varies(groups.by(usable)))
    states, days = runs["state"].value_counts(), sorted({str(utc)[:10] for utc in runs["started_utc"].dropna()})
    notes = Counter(note for one in shown for note in one.notes)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdtrain.results.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals |= {
        "zip": zip,
        "table_number": itertools.count(1).__next__,
        "figure_number": itertools.count(1).__next__,
    }
    return environment.get_template("report.html").render(
        when=" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "unknown date",
        folders=", ".join(map(str, loaded.roots)) + (f" where {loaded.where}" if loaded.where else ""),
        counts=", ".join(f"{states[name]} {name}" for name in ("complete", "unfinished", "refused") if name in states),
        sweeps=", ".join(sorted({str(name) for name in runs["sweep"].dropna()})),
        goal=scores.goal(runs, target),
        shown=shown,
        drawn=drawn,
        missing=missing,
        common=[note for note, number in notes.items() if number > 1],
        definitions=_definitions(shown, scores.all_columns(runs)),
        environment=_environment(loaded),
        problems=_problems(loaded),
        run_commands=dict.fromkeys(_run_commands(loaded)),
        listing=overview.listing(loaded),
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def _figures(loaded: Loaded, count: Count) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The figures that have data, and why the others have none."""
    drawn, missing = [], []
    for kind, (*words, _) in figures.KINDS.items():
        heading, caption = (each.replace("hosts", count) if kind == "time" else each for each in words)
        try:
            svg = _inline_svg(style.encode(figures.draw(kind, loaded), "svg", letters="none").decode(), kind)
        except Failure as failure:
            missing.append((heading, str(failure)))
            continue
        drawn.append({"kind": kind, "heading": heading, "caption": caption, "svg": Markup(svg)})
    return drawn, missing


def _inline_svg(svg: str, kind: str) -> str:
    """The SVG element in the page's colours. Its ids start with the kind, so that they are unique."""
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{kind}-", svg)
    for ink, name in ((style.INK, "ink"), (style.SOFT, "soft"), (style.GRID, "grid"), (style.PAPER, "paper")):
        svg = svg.replace(ink, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)

    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" ', svg)
    assert size, "matplotlib writes the size of an SVG in points"
    width = f"max-width: {float(size[1]) / 9:.4g}rem"  # 9-point letters get the size of the page's text
    return svg.replace(size[0], f'role="img" aria-labelledby="about-{kind}" style="{width}" ', 1)


# --- lists ------------------------------------------------------------------------------------------------------------


def _definitions(shown: list[Table], known: Mapping[str, Column]) -> Iterator[tuple[str, str]]:
    """The meaning of every column of the tables, and its name and unit in CSV and JSON."""
    columns = (column for one in shown for part in one.parts() for column in part.columns)
    for key, heading in {column.key: column.heading for column in columns if column.key in known}.items():
        unit = f", in {known[key].base}" if known[key].base else ""
        yield heading, f"{known[key].meaning} ({key}{unit})"


def _problems(loaded: Loaded) -> list[tuple[str, str]]:
    """Everything that kept a run, or a part of one, out of the tables."""
    runs = loaded.runs
    marked = runs[runs["marked"].notna()]
    return [
        *((run, state) for run, state in zip(runs["run"], runs["state"], strict=True) if state != "complete"),
        *((run, f"marked, {why}") for run, why in zip(marked["run"], marked["marked"], strict=True)),
        *(("", str(problem)) for problem in loaded.problems),
    ]


def _run_commands(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """For the first run of each group: a comment with its hosts, ranks and throttle, and the command that started it
    (a sweep's launch command, or else the command of each rank)."""
    for group in groups.by(loaded.complete):
        _, run_dir = min(zip(group.values("started_utc"), group.values("run_dir"), strict=True))
        hosts, per_host, rate = (group.key[name] for name in ("hosts", "ranks_per_host", "rate_mbit"))
        needs = "hosts not recorded" if hosts is None else f"hosts: {hosts:g}, ranks: {hosts * per_host:g}"
        if rate is not None:
            needs += f", links: tools/throttle.sh {rate:g}mbit"
        experiment = frame.experiment(run_dir)
        words = without_secrets(experiment.command) if experiment else frame.program(run_dir)
        yield f"# {needs}", shlex.join(words)


def _environment(loaded: Loaded) -> Table:
    """Software, hosts, devices, NICs, data and model of the complete runs, with the number of runs for each value."""
    counted: Counter[tuple[str, str]] = Counter()
    for run_dir in loaded.complete["run_dir"]:
        counted.update(list(dict.fromkeys(_facts(frame.manifest(run_dir)))))
    names = list(dict.fromkeys(name for name, _ in counted))
    order = sorted(counted.items(), key=lambda item: (names.index(item[0][0]), -item[1], item[0][1]))
    rows = [{"what": name, "value": value, "runs": number} for (name, value), number in order]
    columns = [Column("what", "what"), Column("value", "as recorded", prose=True), Column("runs", "runs")]
    return Table("environment", "Software and machines", columns, rows)


def _facts(manifest: records.Manifest) -> Iterator[tuple[str, str]]:
    """(name, value) of the surroundings in a manifest that are not in the captions of the tables."""
    yield from ((name, version) for name, version in manifest.versions.items() if version is not None)
    yield "hosts", ", ".join(manifest.hosts) or "not recorded"
    for rank in manifest.ranks:
        yield "device of a rank", str(rank.get("device") or "not recorded")
        if rank.get("cpu"):
            share = f", of which the host may use {rank['cores']}" if rank.get("cores") else ""
            yield "processor", f"{rank['cpu']}{share}"
    for link in manifest.links:
        speed = f"{link['speed_mbit']} Mbit/s negotiated" if link.get("speed_mbit") else "unknown speed"
        yield "NIC", f"{link.get('nic')} ({speed})"
    yield "data set", f"{manifest.data.get('name')}, SHA-256 {manifest.data.get('fingerprint') or 'not recorded'}"
    yield "model", str(manifest.model.get("name"))
