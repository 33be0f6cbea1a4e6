"""--resume: a run goes on with the settings of its manifest, which give way to flags, files and variables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain import records, strategies
from hvdtrain.config import batch_plan, options, parser, workloads
from hvdtrain.strategies import catalog
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

C = TypeVar("C", bound=options.TrainConfig)

OF_A_START = ("run_dir", "resume", "json", "dry_run", "debug")
"""Settings that are each start's own"""


def parse(cls: type[C], workload: str, purpose: str, argv: Sequence[str] | None = None) -> C:
    """The config of a start of `workload` with the flags `argv`, else those of this process: see `config.parse`.

    Raises Failure (65) if there is no run to go on with or its manifest is damaged, Failure (78) if it is another
    workload's.
    """
    given = sys.argv[1:] if argv is None else argv
    config = parser.parse(
        cls,
        given,
        prog=shlex.join(["python", *workloads.program(workload, sys.argv)]),
        purpose=purpose,
        earlier=functools.partial(earlier, cls, workload),
    )
    if catalog.help_requested(config.strategy):
        return config
    return dataclasses.replace(config, strategy=str(strategies.parse(config.strategy)))


def flags(argv: Sequence[str]) -> list[str]:
    """The words of a command line after its program, without --run-dir and --resume and the folders they name."""
    words, found = iter(itertools.pairwise([*argv[1:], "-"])), []
    for word, after in words:
        if word == "--run-dir" or (word == "--resume" and not after.startswith("-")):
            next(words, None)
        elif word != "--resume" and word.partition("=")[0] not in ("--run-dir", "--resume"):
            found.append(word)
    return found


def earlier(cls: type[C], workload: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run that is to go on; none if there is none, which only --resume DIR takes for an error."""
    asked, folder = settings["resume"], settings["run_dir"]
    if isinstance(asked, str):
        folder = asked
    if not asked or folder is None:
        return {}
    manifest = _manifest(Path(folder))
    if manifest is None and isinstance(asked, bool):
        return {}
    if manifest is None:
        raise Failure(
            f"--resume {folder}: no run there (no manifest.json); see `hvdtrain results list`, or start one with "
            "--run-dir",
            exits.BAD_DATA,
        )
    if manifest.workload != workload:
        words = ["python", *workloads.program(manifest.workload, manifest.argv), "--resume", str(folder)]
        raise Failure(f"{folder} is a run of {manifest.workload}: {shlex.join(words)}", exits.BAD_CONFIG)
    kept = {name: value for name, value in manifest.config.items() if name in settings and name not in OF_A_START}
    if "strategy" in kept:
        kept["strategy"] = strategies.canonical(str(kept["strategy"]))
    if kept.get("micro_batches") is None:  # its default follows from the number of stages, which may change
        kept["micro_batches"] = manifest.plan.get("micro_batches", 1)
    for given, counterpart in itertools.permutations(("batch_size", "global_batch_size")):
        if settings[given] is not None:
            kept.pop(counterpart, None)
    try:
        return parser.checked(cls, {name: value for name, value in kept.items() if value is not None})
    except ValueError as error:
        raise Failure(f"{folder}/manifest.json: its settings are damaged ({error})", exits.BAD_DATA) from error


def global_batch(config: options.TrainConfig, ranks: int) -> int:
    """Samples per step over all ranks. If only the number of ranks is another than that of the run that goes on, its
    steps are as large as before: --batch-size counts for the ranks that the run began with.

    Raises Failure (65) for a manifest that is damaged.
    """
    manifest = _manifest(Path(config.run_dir)) if config.resume and config.run_dir else None
    given = ("batch_size", "global_batch_size")
    kept = manifest.plan.get("global_batch") if manifest else None
    if manifest and type(kept) is int and all(manifest.config.get(name) == getattr(config, name) for name in given):
        return kept
    return batch_plan.global_batch(config, ranks)


def kept_cut(config: options.TrainConfig) -> tuple[str, ...]:
    """Where the run that goes on was cut into as many stages; empty if it was not. Raises Failure (65)."""
    manifest = _manifest(Path(config.run_dir)) if config.resume and config.run_dir else None
    same = manifest is not None and manifest.plan.get("stages", 1) == config.stages
    return tuple(manifest.plan.get("cut", ())) if manifest and same else ()


def _manifest(folder: Path) -> records.Manifest | None:
    """That of the run in this folder, None if there is none. Raises Failure (65) if it is damaged."""
    path = folder / "manifest.json"
    try:
        if not path.exists():
            return None
    except OSError as error:
        raise files.refused(f"--resume {folder}", error, exits.BAD_DATA, "check the folder") from error
    return records.read_document(path, records.Manifest)
