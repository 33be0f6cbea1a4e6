"""--resume: a run continues with the options of its manifest. Flags, files and variables take precedence."""

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
from hvdtrain.strategies import automatic, catalog
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

C = TypeVar("C", bound=options.TrainConfig)

PER_START = ("run_dir", "resume", "json", "dry_run", "debug")
"""Options that apply to one start of a run only"""


def parse(cls: type[C], workload: str, purpose: str, argv: Sequence[str] | None = None) -> C:
    """Parse the config of `workload` from the flags `argv`, by default this process's. See `parser.parse`.

    Raises Failure (65) if there is no run to resume or its manifest is damaged, Failure (78) if another workload made
    the run.
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
    if automatic.rule(config.strategy):
        run = kept(config)
        return dataclasses.replace(config, strategy=str(run.config["strategy"])) if run else config
    return dataclasses.replace(config, strategy=str(strategies.parse(config.strategy, config.optimizer)))


def flags(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without --run-dir and --resume and their values."""
    words, kept = iter(itertools.pairwise([*argv[1:], "-"])), []
    for word, after in words:
        if word == "--run-dir" or (word == "--resume" and not after.startswith("-")):
            next(words, None)
        elif word != "--resume" and word.partition("=")[0] not in ("--run-dir", "--resume"):
            kept.append(word)
    return kept


def earlier(cls: type[C], workload: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the run to resume. Empty if there is none; with --resume DIR that is an error."""
    resume, folder = settings["resume"], settings["run_dir"]
    if isinstance(resume, str):
        folder = resume
    if not resume or folder is None:
        return {}
    manifest = _manifest(Path(folder))
    if manifest is None and isinstance(resume, bool):
        return {}
    if manifest is None:
        raise Failure(
            f"--resume {folder}: no run there (no manifest.json); hint: see `hvdtrain results list`, or start "
            "a run with --run-dir",
            exits.BAD_DATA,
        )
    if manifest.workload != workload:
        words = ["python", *workloads.program(manifest.workload, manifest.argv), "--resume", str(folder)]
        raise Failure(f"{folder} is a run of {manifest.workload}; hint: {shlex.join(words)}", exits.BAD_CONFIG)
    kept = {name: value for name, value in manifest.config.items() if name in settings and name not in PER_START}
    if "strategy" in kept:
        kept["strategy"] = strategies.canonical(str(kept["strategy"]))
    if kept.get("micro_batches") is None:  # the default depends on the number of stages, which may change
        kept["micro_batches"] = manifest.plan.get("micro_batches", 1)
    for given, counterpart in itertools.permutations(("batch_size", "global_batch_size")):
        if settings[given] is not None:
            kept.pop(counterpart, None)
    try:
        return parser.checked(cls, {name: value for name, value in kept.items() if value is not None})
    except ValueError as error:
        raise Failure(f"{folder}/manifest.json: its settings are damaged ({error})", exits.BAD_DATA) from error


def global_batch(config: options.TrainConfig, ranks: int) -> int:
    """Return the samples per step over all ranks.

    A run that is resumed with another number of ranks keeps its global batch, unless --batch-size or
    --global-batch-size changes. Raises Failure (65) for a damaged manifest.
    """
    run, sizes = kept(config), ("batch_size", "global_batch_size")
    batch = run.plan.get("global_batch") if run else None
    if run and type(batch) is int and all(run.config.get(name) == getattr(config, name) for name in sizes):
        return batch
    return batch_plan.global_batch(config, ranks)


def kept(config: options.TrainConfig) -> records.Manifest | None:
    """Return the manifest of the run to resume; None if there is none. Raises Failure (65) if it is damaged."""
    return _manifest(Path(config.run_dir)) if config.resume and config.run_dir else None


def _manifest(folder: Path) -> records.Manifest | None:
    """Read the manifest in a folder; None if there is none. Raises Failure (65) if it is damaged."""
    path = folder / "manifest.json"
    try:
        if not path.exists():
            return None
    except OSError as error:
        raise files.refused(f"--resume {folder}", error, exits.BAD_DATA, "check the folder") from error
    return records.read_document(path, records.Manifest)
