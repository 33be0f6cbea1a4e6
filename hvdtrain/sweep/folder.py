"""The folder of a run: decides whether the run is finished and its records match the settings.

A finished run has COMPLETE, the same settings and program in experiment.json, a manifest that agrees with the dry run,
and links at the requested rate. Any other folder with that name is renamed. Folders are never deleted.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from hvdtrain import records
from hvdtrain.sweep import file
from hvdtrain.sweep.dry_run import MONITORS
from hvdtrain.sweep.file import NEVER_FLAGS
from hvdtrain.sweep.grid import Run
from hvdtrain.system import exits, files
from hvdtrain.system.commands import as_calling_user
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secret_values

R = TypeVar("R", bound=records.Record)
LOG = Path("logs") / "launch.log"
TAIL_LINES = 6
SCRIPT_BYTES = files.MIB
"""A larger file that a command names is data"""


def state(folder: Path, run: Run, dry_run: Mapping[str, Any] | None) -> tuple[str, str | None]:
    """Returns the state and the reason for it: absent, done, unfinished, marked (a link was off its rate) or other."""
    if not folder.is_dir():
        return "absent", None
    if not (folder / "COMPLETE").is_file():
        return "unfinished", "no COMPLETE"
    request = read(folder / "experiment.json", records.Experiment)
    if request is None or request.settings != without_secret_values(run.experiment.settings):
        return "other", "experiment.json has other settings"
    if request.program is not None and request.program != program(run):  # older sweeps did not record it
        return "other", "the script, or a Python file beside it, has changed"
    if problem := mismatch(folder, run, dry_run):
        return "other", problem
    return ("marked", request.marked) if request.marked else ("done", None)


def program(run: Run) -> str | None:
    """See `records.Experiment.program`. Raises Failure (74, 77) if a file cannot be read."""
    if "command" not in (settings := run.experiment.settings):
        return None
    digest = hashlib.sha256()
    named = {path.absolute() for path in map(Path, file.program(settings["command"])) if path.is_file()}
    beside = {path for script in named if script.suffix == ".py" for path in script.parent.glob("*.py")}
    for path in sorted(named | beside):
        try:
            if path.stat().st_size > SCRIPT_BYTES:
                continue
            content = files.read(path, SCRIPT_BYTES)
        except OSError as error:
            raise files.refused(path, error, exits.IO_ERROR, "a sweep reads its scripts") from None
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def read(path: Path, cls: type[R]) -> R | None:
    """The record in a file; None if it is missing or damaged."""
    try:
        return records.read_document(path, cls)
    except Failure:
        return None


def mismatch(folder: Path, run: Run, dry_run: Mapping[str, Any] | None) -> str | None:
    """How the records of a finished run differ from its settings; None if they agree.

    Without a dry run, config and data are not compared.
    """
    manifest = read(folder / "manifest.json", records.Manifest)
    if manifest is None:
        hint = "; hint: the script must import hvdtrain and create an optimizer"
        return "no manifest.json" + (hint if "command" in run.experiment.settings else "")
    if not (folder / "COMPLETE").is_file() or records.summary(folder) is None:
        return "no COMPLETE or no summary: the run did not finish"
    for key, value in (dry_run["config"] if dry_run else {}).items():
        monitor_option = key.startswith("monitor_") and key not in run.flags  # set only in energy runs
        new_option = key not in manifest.config and key not in run.flags  # did not exist when the run was made
        chosen = key == "strategy" and str(value).startswith("auto") and "chosen" in manifest.exchange
        exempt = key in (*NEVER_FLAGS, "seed") or monitor_option or new_option or chosen
        if not exempt and manifest.config.get(key) != value:
            return f"{key} is {manifest.config.get(key)!r} in the manifest, expected {value!r}"
    if dry_run and manifest.data.get("fingerprint") != dry_run["data"]["fingerprint"]:
        return "it used different data"
    experiment, throttles = run.experiment, [link.get("throttle") or {} for link in manifest.links]
    rates = {throttle.get(key) for throttle in throttles for key in ("up_mbit", "down_mbit")}
    rate = None if experiment.rate_bit_s is None else experiment.rate_bit_s / 1e6
    for what, used, expected in (
        ("monitor", manifest.config.get("monitor", "none"), MONITORS[run.kind]),
        ("number of ranks", len(manifest.ranks), experiment.ranks),
        ("number of hosts", len(manifest.hosts), experiment.hosts),
        ("throttle in Mbit/s", rates, {rate} if experiment.rate and rates else rates),
    ):
        if used != expected:
            return f"its {what} was {used}, expected {expected}"
    return None


def set_aside(folder: Path, why: str) -> Path:
    """Renames the folder to `<folder>-<why><n>`, where n is the first free number. Raises Failure (73)."""
    targets = (folder.with_name(f"{folder.name}-{why}{number}") for number in itertools.count(1))
    target = next(target for target in targets if not target.exists())
    try:
        folder.rename(target)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return target


def make(folder: Path, request: records.Experiment) -> IO[bytes]:
    """Creates the folder with experiment.json for the calling user, and opens its log. Raises Failure (73, 74)."""
    try:
        with as_calling_user():
            (folder / LOG).parent.mkdir(parents=True)
            records.write_document(folder / "experiment.json", records.as_json(request))
            return (folder / LOG).open("wb")
    except OSError as error:
        raise cannot_write(folder, error) from error
    except Failure as failure:
        raise Failure(str(failure).replace("--run-dir", "--root"), failure.code) from failure


def cannot_write(path: Path, error: OSError) -> Failure:
    return Failure(f"{path}: {error.strerror}; hint: choose another --root", exits.CANNOT_WRITE)


def tail(log: Path) -> list[str]:
    """The last non-empty lines of a log."""
    with log.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 16384))
        lines = stream.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
