"""The folder of a run: decides whether the run is finished and its records match the settings.

A finished run has COMPLETE, the same settings and program in experiment.json, a manifest that agrees with the dry run,
and links at the requested rate. Any other folder with that name is renamed. Folders are never deleted.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain import records
from hvdtrain.sweep import file
from hvdtrain.sweep.dry_run import MONITORS, DryRun
from hvdtrain.sweep.file import NEVER_FLAGS
from hvdtrain.sweep.grid import UNLIMITED, Run
from hvdtrain.system import exits, files
from hvdtrain.system.commands import calling_user
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secret_values

R = TypeVar("R", bound=records.Record)
LOG = Path("logs") / "launch.log"
TAIL_LINES = 6
SCRIPT_BYTES = files.MIB
"""A larger file that a command names is data"""


def state(folder: Path, run: Run, dry_run: DryRun | None) -> tuple[str, str | None]:
    """Returns the state and the reason for it: absent, done, unfinished, marked (a link was off its rate) or other."""
    if not folder.is_dir():
        return "absent", None
    if not (folder / "COMPLETE").is_file():
        return "unfinished", "no COMPLETE"
    request = read(folder / "experiment.json", records.Experiment)
    if request is None:
        return "other", "no experiment.json"
    settings = without_secret_values(run.experiment.settings)
    for name, expected in (("settings", settings), ("kind", run.kind), ("repeat", run.repeat)):
        if getattr(request, name) != expected:
            return "other", f"{name} differ"
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


def mismatch(folder: Path, run: Run, dry_run: DryRun | None) -> str | None:
    """How the records of a finished run differ from its settings; None if they agree.

    Without a dry run, config, batch plan and data are not compared.
    """
    manifest = read(folder / "manifest.json", records.Manifest)
    if manifest is None:
        hint = "; hint: the script must import hvdtrain and create an optimizer"
        return "no manifest.json" + (hint if "command" in run.experiment.settings else "")
    if not (folder / "COMPLETE").is_file():
        return "no COMPLETE: the run did not finish"
    if records.summary(folder) is None:
        return "no summary in metrics/rank0000.jsonl"
    config = manifest.config
    for key, value in (dry_run.config if dry_run else {}).items():
        monitor_option = key.startswith("monitor_") and key not in run.flags  # set only in energy runs
        new_option = key not in config and key not in run.flags  # did not exist when the run was made
        chosen = key == "strategy" and str(value).startswith("auto") and "chosen" in manifest.exchange
        exempt = key in NEVER_FLAGS or monitor_option or new_option or chosen
        if not exempt and config.get(key) != value:
            return f"{key} is {config.get(key)!r} in the manifest, expected {value!r}"
    if config.get("monitor", "none") != MONITORS[run.kind]:
        return f"monitor is {config.get('monitor')!r} in the manifest, expected {MONITORS[run.kind]!r}"
    for key, value in (dry_run.plan if dry_run else {}).items():
        measured = key in ("shares", "cut") and not value  # determined before step 0 if the settings do not give them
        if not measured and manifest.plan.get(key) != value:
            return "its batch sizes or steps differ from the request"
    if dry_run and manifest.data.get("fingerprint") != dry_run.fingerprint:
        return "it used different data"
    used, expected = (len(manifest.ranks), len(manifest.hosts)), (run.experiment.ranks, run.experiment.hosts)
    if used != expected:
        return f"it used {used[0]} ranks on {used[1]} hosts, expected {expected[0]} on {expected[1]}"
    return _link_mismatch(manifest.links, run)


def _link_mismatch(links: list[dict[str, Any]], run: Run) -> str | None:
    rate = run.experiment.rate
    if rate is None:
        return None
    expected = None if rate == UNLIMITED else (run.experiment.rate_bit_s or 0) / 1e6
    for link in links:
        throttle = link.get("throttle") or {}
        rates = {key: throttle.get(key) for key in ("up_mbit", "down_mbit")}
        if any(value != expected for value in rates.values()):
            return f"host {link.get('host')} was throttled to {rates}, expected {rate}"
    return None


def set_aside(folder: Path, why: str) -> Path:
    """Renames the folder to `<folder>-<why><n>`, where n is the first free number. Raises Failure (73)."""
    number = 1
    while (target := folder.with_name(f"{folder.name}-{why}{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return target


def make_owned(folder: Path) -> None:
    """Creates a folder and its parents for the calling user. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(exist_ok=True)
            set_owner(path)


def set_owner(path: Path) -> None:
    """Under sudo, gives the path to the calling user, because runs have that user's rights. Raises OSError."""
    user = pwd.getpwnam(calling_user()) if os.geteuid() == 0 else None
    if user and user.pw_uid:
        os.chown(path, user.pw_uid, user.pw_gid)


def make(folder: Path, request: records.Experiment) -> None:
    """Creates the folder with experiment.json and logs/ for the calling user. Raises Failure (73, 74)."""
    try:
        make_owned(folder / "logs")
        records.write_document(folder / "experiment.json", records.as_json(request))
        set_owner(folder / "experiment.json")
    except OSError as error:
        raise cannot_write(folder, error) from error
    except Failure as failure:
        raise Failure(str(failure).replace("--run-dir", "--root"), failure.code) from failure


def cannot_write(path: Path, error: OSError) -> Failure:
    return Failure(f"{path}: {error.strerror}; hint: choose another --root", exits.CANNOT_WRITE)


def tail(log: Path) -> list[str]:
    """The last non-empty lines of a log, without the launcher's list of settings."""
    try:
        with files.open_plain(log) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 16384))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    settings = ("mpirun.sh: ", "horovodrun.sh: ")
    return [line.rstrip() for line in lines if line.strip() and not line.startswith(settings)][-TAIL_LINES:]
