"""A run's folder in a sweep: whether the run is done and its records fit the settings; other folders are renamed.

A run is done when its folder has COMPLETE, point.json has the same settings, the manifest agrees with the workload's
dry run of these settings, and no link was off its rate. Any other folder of that name is renamed; it is never used and
never deleted.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.sweep.plan import UNLIMITED, Run
from hvdtrain.sweep.preview import MONITORS, Preview
from hvdtrain.system import exits, files
from hvdtrain.system.commands import calling_user
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secret_values

NOT_COMPARED = {"run_dir", "resume", "verify_data", "json", "dry_run", "debug", "monitor"}
LOG = Path("logs") / "launch.log"
TAIL_LINES = 6


def state(folder: Path, run: Run, preview: Preview | None) -> tuple[str, str | None]:
    """absent, done, unfinished, marked (a link was off its rate) or other; for the last three also the reason."""
    if not folder.is_dir():
        return "absent", None
    if not (folder / "COMPLETE").is_file():
        return "unfinished", "no COMPLETE"
    point = document(folder / "point.json")
    if point is None:
        return "other", "no point.json"
    settings = without_secret_values(run.point.settings)
    for name, wanted in (("settings", settings), ("kind", run.kind), ("repeat", run.repeat)):
        if point.get(name) != wanted:
            return "other", f"{name} differ"
    if problem := unfit(folder, run, preview):
        return "other", problem
    marked = point.get("marked")
    return ("marked", str(marked)) if marked else ("done", None)


def document(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file cannot be read or holds something else."""
    try:
        found = files.from_json(files.read(path, records.LONGEST_DOCUMENT_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def summary(folder: Path) -> dict[str, Any] | None:
    """The last summary in rank 0's records. Only the end of the file is read, whatever its size."""
    try:
        with files.open_plain(folder / "metrics" / "rank0000.jsonl") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - records.LONGEST_LINE_BYTES))
            tail = lines.read().splitlines()
    except OSError:
        return None
    for line in reversed(tail):
        with contextlib.suppress(ValueError):
            found = files.from_json(line)
            if isinstance(found, dict) and found.get("type") == "summary":
                return found
    return None


def unfit(folder: Path, run: Run, preview: Preview | None) -> str | None:
    """How a finished run's records differ from its settings; None if they agree. Without a preview, neither config nor
    plan nor data are compared."""
    manifest = document(folder / "manifest.json")
    if manifest is None:
        own = "command" in run.point.settings
        return "no manifest.json" + ("; does its script import hvdtrain and make an optimizer?" if own else "")
    if not (folder / "COMPLETE").is_file():
        return "no COMPLETE: the run did not finish"
    if summary(folder) is None:
        return "no summary in metrics/rank0000.jsonl"
    config, ranks = manifest.get("config", {}), manifest.get("ranks", [])
    for key, value in (preview.config if preview else {}).items():
        of_monitors = key.startswith("monitor_") and key not in run.flags  # the preview is of another kind of run
        absent = key not in config and key not in run.flags  # a setting that did not exist when the run was made
        if key not in NOT_COMPARED and not of_monitors and not absent and config.get(key) != value:
            return f"{key} is {config.get(key)!r} in its manifest, asked was {value!r}"
    if config.get("monitor", "none") != MONITORS[run.kind]:
        return f"monitor is {config.get('monitor')!r} in its manifest, asked was {MONITORS[run.kind]!r}"
    plan = manifest.get("plan", {})
    for key, value in (preview.plan if preview else {}).items():
        measured = key in ("shares", "cut") and not value  # before step 0, where the settings do not give them
        if not measured and plan.get(key) != value:
            return "its batches and steps are not those that were asked for"
    if preview and manifest.get("data", {}).get("fingerprint") != preview.fingerprint:
        return "its data are not those that are there now"
    hosts = {rank.get("host") for rank in ranks}
    if len(ranks) != run.point.ranks or len(hosts) != run.point.hosts:
        return f"it ran {len(ranks)} ranks on {len(hosts)} hosts, asked were {run.point.ranks} on {run.point.hosts}"
    return _unfit_links(manifest.get("links", []), run)


def _unfit_links(links: list[dict[str, Any]], run: Run) -> str | None:
    if run.point.rate is None:
        return None
    for link in links:
        throttle = link.get("throttle") or {}
        rates = {key: throttle.get(key) for key in ("up_mbit", "down_mbit")}
        wanted = None if run.point.rate == UNLIMITED else (run.point.rate_bit_s or 0) / 1e6
        if any(rate != wanted for rate in rates.values()):
            return f"host {link.get('host')} was throttled to {rates}, asked was {run.point.rate}"
    return None


def aside(folder: Path, why: str) -> Path:
    """Renames the folder to `<folder>-<why><n>`, n the first free number; returns that path. Raises Failure (73)."""
    number = 1
    while (target := folder.with_name(f"{folder.name}-{why}{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return target


def make_owned(folder: Path) -> None:
    """Makes a folder and those above it, owned by the user who will run in it. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(exist_ok=True)
            own(path)


def own(path: Path) -> None:
    """Gives it to the user who will run in it. Raises OSError."""
    user = pwd.getpwnam(calling_user()) if os.geteuid() == 0 else None
    if user and user.pw_uid:  # under sudo the hosts run as whoever called it
        os.chown(path, user.pw_uid, user.pw_gid)


def make(folder: Path, point: records.Point) -> None:
    """Makes the folder with point.json and logs/, owned by the user who will run in it. Raises Failure (73, 74)."""
    try:
        make_owned(folder / "logs")
        records.write_document(folder / "point.json", records.as_json(point))
        own(folder / "point.json")
    except OSError as error:
        raise cannot_write(folder, error) from error
    except Failure as failure:
        raise Failure(str(failure).replace("--run-dir", "--root"), failure.code) from failure


def cannot_write(path: Path, error: OSError) -> Failure:
    return Failure(f"{path}: {error.strerror}; choose another --root", exits.CANNOT_WRITE)


def tail(log: Path) -> list[str]:
    """The last lines of a log that are not empty and not the launcher's settings."""
    try:
        with files.open_plain(log) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 16384))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    said = [line.rstrip() for line in lines if line.strip() and not line.startswith(("mpirun.sh: ", "horovodrun.sh: "))]
    return said[-TAIL_LINES:]
