"""Checkpoints: atomic, checksummed, without pickle.

Every file system that a rank of the job writes to holds

    checkpoints/step-00000120/
        shared.safetensors      equal on all ranks (weights, optimizer state); written once per file system
        stage0.safetensors ...  instead, for a model in stages: equal on all ranks of that stage
        rank0000.safetensors    one for each rank that uses this file system (BatchNorm statistics, strategy state)
        checkpoint.json         written last: schema, save (a random token), step, best, progress, ranks, layout,
                                stages and cut, identity, files {name: {sha256, bytes}}, digest (SHA-256 of the rest)
    checkpoints/.saving-step-00000120-<token>/      a save in progress, renamed when it is complete
    checkpoints/.replaced-step-00000120-<token>/    the previous save of a step, valid until all hosts have the new one
    checkpoints/.removing-step-00000120-<token>/    an old checkpoint that is being removed

Any safetensors library can read the files. `hvdtrain.records.arrays_file` writes, reads and hashes them in one pass.
The library needs contiguous arrays, a second pass, and twice the memory to load.

A save takes three small gathers, and no state crosses the network. (1) All ranks learn rank 0's token, and each tries
to make the temporary folder of that name. One rank per file system succeeds and becomes its writer. (2) All ranks fsync
their files. Each writer writes and fsyncs checkpoint.json, fsyncs the folder, renames it, and fsyncs its parent. (3)
The checkpoint is complete everywhere, and the writers remove old ones. A rank that fails reports it in the next gather,
so all ranks raise the same Failure and none waits.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hvdtrain.records.arrays_file import JSON, Arrays, read
from hvdtrain.records.identity import differing
from hvdtrain.system.exits import (
    BAD_CONFIG,
    BAD_DATA,
    CANNOT_WRITE,
    FAILED,
    IO_ERROR,
    NO_PERMISSION,
    Failure,
    printable,
)
from hvdtrain.training.checkpoint_files import COMMON, MANIFEST, SCHEMA, SHARED, Saving, common, read_manifest
from hvdtrain.training.checkpoint_files import reason as reason_of

_CHECKPOINT = re.compile(r"step-(\d{8}|[1-9]\d{8,})|\.replaced-step-(\d{8,})-[0-9a-f]{16}")
_LEFTOVER = re.compile(r"\.(saving|replaced|removing)-step-\d{8,}-[0-9a-f]{16}")
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_HINTS = dict.fromkeys(_DENIED, "; hint: check the path and its permissions or choose another folder")
_HINTS |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; hint: free some space or choose another folder")
_HINTS[errno.EFBIG] = "; hint: raise the limit of file sizes (ulimit -f)"
_own, _name = "rank{:04d}.safetensors".format, "step-{:08d}".format


class Group(Protocol):
    """The ranks that save and load together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: JSON) -> list[JSON]:
        """Return the value of every rank, in rank order, on all ranks. Collective."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The arguments of `Checkpoints.save`. Arrays are writable and in the order in which they were saved."""

    step: int
    shared: Arrays
    local: Arrays
    """This rank's; empty if another number of ranks saved the checkpoint"""
    progress: dict[str, JSON]
    others: Sequence[Arrays] = ()
    """If other ranks or another layout saved the checkpoint: the local arrays of each, in rank order.

    They are those of this rank's stage, or of all stages if `recut`."""
    recut: bool = False
    """Whether the model was partitioned differently. Then `shared` holds all stages"""


class Checkpoints:
    """The checkpoints of one run in `folder`, whose path is equal on all hosts, whether or not they share it.

    `identity`: what a checkpoint must fit (see `records.identity`). `layout`: the local rank of each rank. `stages`:
    the stage of each rank. `cut`: the first layers of the stages. These are equal on all ranks. Layout, stages and cut
    may differ from those that saved a checkpoint. The last `keep` checkpoints and the last best one are kept. `check`
    raises ValueError for progress that is impossible at a step. `report` gets a line for each checkpoint that `newest`
    rejects, on rank 0 only. Only one job at a time may use the folder (`locks`).
    """

    def __init__(
        self,
        folder: Path,
        group: Group,
        *,
        keep: int,
        identity: dict[str, JSON],
        layout: Sequence[int] = (),
        stages: Sequence[int] = (),
        cut: Sequence[str] = (),
        check: Callable[[dict[str, JSON], int], object] = lambda progress, step: None,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        if keep < 1:
            raise Failure(f"{keep} checkpoints to keep; hint: keep 1 or more", BAD_CONFIG)
        self._folder, self._group, self._keep = folder, group, keep
        self._report: Callable[[str], None] = lambda line: report(printable(line)) if group.rank == 0 else None
        self._own, self._ranks = _own(group.rank), group.size
        self._layout, self._cut = list(layout) or [0] * group.size, list(cut)
        self._stages = list(stages) if cut else []
        self._shared = f"stage{self._stages[group.rank]}.safetensors" if cut else SHARED
        self._identity: dict[str, JSON] = json.loads(json.dumps(identity))
        self._check = check
        self.rejected: set[int] = set()
        """Steps whose checkpoints `newest` rejected: they are neither counted nor removed"""
        self.others = False
        """Whether `newest` rejected a checkpoint on this host because it belongs to another run"""

    def save(self, step: int, shared: Arrays, local: Arrays, progress: dict[str, JSON], best: bool = False) -> Path:
        """Save this rank's part of step `step` (>= 0), replacing an older save; return the folder. Collective.

        Arrays may have any layout and any dtype of safetensors (for bfloat16 pass its uint16 view). `best` and
        `progress` are rank 0's, except for `validation_scores`, which are equal on all ranks.

        If one rank fails, all raise the same Failure, older checkpoints are unchanged, and the temporary folder is
        removed: CANNOT_WRITE (permission, read-only), IO_ERROR (disk full or broken), FAILED (ranks at different steps,
        a value that cannot be stored, infinite or NaN weights).
        """
        final = self._folder / _name(step)
        task, own = f"save {final}", {"save": secrets.token_hex(8), "step": int(step), "best": bool(best)}

        def begin() -> JSON:
            _check_finite(shared | local)
            changing = {name: value for name, value in progress.items() if name != "validation_scores"}
            return own | {"progress": json.dumps(changing)}

        heads = self._agree(task, CANNOT_WRITE, begin)
        if len(steps := {head["step"] for head in heads}) > 1:
            raise Failure(f"cannot {task}: the ranks are at different steps, {sorted(steps)}", FAILED)
        head = heads[0] | {"progress": progress | json.loads(heads[0]["progress"])}
        saving = Saving(final, head["save"])
        try:
            parts = self._agree(task, CANNOT_WRITE, lambda: saving.write(shared, self._shared, self._own, local))
            head |= {"schema": SCHEMA, "ranks": self._ranks, "layout": self._layout, "identity": self._identity}
            head |= {"stages": self._stages, "cut": self._cut} if self._cut else {}
            head["files"] = {name: entry for part in parts for name, entry in part.items()}
            self._agree(task, CANNOT_WRITE, lambda: saving.publish(head))
        except Failure:
            saving.undo()
            raise
        self.rejected.discard(step)
        if saving.writer:
            with contextlib.suppress(OSError):  # the save is complete; the next one removes old checkpoints again
                self._prune(step)
        return final

    def newest(self, best: bool = False) -> Loaded | None:
        """Load the newest checkpoint that is valid on every rank; None if there is none. Collective.

        With `best`, only checkpoints that were saved as best count. Bytes, SHA-256 and identity are verified first. If
        one rank rejects a checkpoint, all do, and the previous one is tried. Raises Failure (NO_PERMISSION, IO_ERROR)
        if a rank cannot list an existing folder.
        """
        self._tidy("saving", "removing")
        surveys = self._agree(f"list {self._folder}", NO_PERMISSION, lambda: self._survey(best))
        for step, save, reasons in _choices(surveys):
            if save:
                name = next(name for _, token, _, name in surveys[self._group.rank] if token == save)
                loaded, reason = self._load(name, step)
                reasons = self._group.gather(reason)
                if loaded and not any(reasons):
                    if name != _name(step):
                        self.rejected.add(step)  # its successor is not on all hosts, so it is not one to keep
                    return loaded
                del loaded  # its memory is needed for the next one
            self.rejected.add(step)
            self._report(f"checkpoint {self._folder / _name(step)} rejected: {_first(reasons)}")
        kind = ("valid " if any(surveys) else "") + ("best " if best else "")
        self._report(f"no {kind}checkpoint in {self._folder}")
        return None

    def check_none(self) -> None:
        """Raise Failure (BAD_CONFIG, BAD_DATA) if there are checkpoints, although `newest` found none. Collective."""
        exists = any(self._group.gather(any(self._folder.glob("step-*"))))
        if any(self._group.gather(self.others)):
            raise Failure(
                f"{self._folder}: no checkpoint fits this run (reasons above); hint: use the options of the earlier "
                "run, or choose another --run-dir",
                BAD_CONFIG,
            )
        if exists:
            raise Failure(
                f"{self._folder}: no valid checkpoint (reasons above); hint: restore one from a copy, or start again "
                "with another --run-dir",
                BAD_DATA,
            )

    def _agree(self, task: str, denied: int, work: Callable[[], JSON]) -> list[JSON]:
        """Do this rank's part; return the results of all ranks, or raise the first rank's Failure on all ranks."""
        cause: Exception | None = None
        reply: dict[str, JSON] = {"error": None}
        try:
            reply["result"] = work()
        except Exception as error:  # any error, because the other ranks wait in the gather
            text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            cause, reply = error, {"error": text, "code": FAILED}
            if isinstance(error, OSError):
                hint = _HINTS.get(error.errno or 0, "")
                reply["error"] = f"{error.strerror or error} on {os.uname().nodename}{hint}"
                reply["code"] = denied if error.errno in _DENIED else IO_ERROR
        replies = self._group.gather(reply)
        if failed := [reply for reply in replies if reply["error"]]:
            text = _first([reply["error"] for reply in replies])
            raise Failure(f"cannot {task}: {text}", failed[0]["code"]) from cause
        return [reply["result"] for reply in replies]

    def _tidy(self, *kinds: str) -> None:
        """Remove only the leftovers of unfinished saves. Several ranks may do so at the same time."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if (leftover := _LEFTOVER.fullmatch(path.name)) and leftover[1] in kinds:
                    shutil.rmtree(path, ignore_errors=True)

    def _survey(self, best: bool) -> list[list[JSON]]:
        """Return [step, token of the save, None, name] for each checkpoint; if invalid, [step, None, reason, name]."""
        survey: list[list[JSON]] = []
        for name, step in self._names():
            try:
                if (manifest := self._manifest(name, step))["best"] or not best:
                    survey.append([step, manifest["save"], None, name])
            except Exception as error:
                survey.append([step, None, reason_of(error), name])
        return survey

    def _names(self) -> list[tuple[str, int]]:
        """Return (name, step) of all checkpoints, newest first, and a replaced one after its successor."""
        paths = self._folder.iterdir() if self._folder.exists() else ()
        matches = [match for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
        return sorted(((m[0], int(m[1] or m[2])) for m in matches), key=lambda pair: (pair[1], pair[0]), reverse=True)

    def _manifest(self, name: str, step: int) -> dict[str, JSON]:
        """Read the checkpoint.json of a checkpoint that fits this run. Raises ValueError or OSError."""
        manifest = read_manifest(self._folder / name)
        if manifest["step"] != step:
            raise ValueError(f"the folder's name disagrees with the step in its {MANIFEST}, {manifest['step']}")
        if (old := manifest["identity"]) != (new := self._identity):
            self.others = True
            raise ValueError(f"it does not fit this run: {'; '.join(differing(old, new))}")
        self._check(manifest["progress"], step)
        return manifest

    def _load(self, name: str, step: int) -> tuple[Loaded | None, str | None]:
        """Load this rank's part of a checkpoint, or return why it is invalid."""
        try:
            folder, manifest = self._folder / name, self._manifest(name, step)
            known = manifest["files"]
            saved = (manifest["ranks"], manifest.get("layout", self._layout), manifest.get("stages", []))
            recut, stage = manifest.get("cut", []) != self._cut, self._stages[self._group.rank] if self._cut else 0
            names = sorted(file for file in known if not COMMON.fullmatch(file))
            others: list[Arrays] = []
            if recut or saved != (self._ranks, self._layout, self._stages):
                whole = recut or not self._cut
                stages = dict(zip(map(_own, itertools.count()), saved[2], strict=False))
                others = [read(folder / file, known[file]) for file in names if whole or stages[file] == stage]
            shared = common(folder, manifest, None if recut else [self._shared])
            same = not recut and saved[::2] == (self._ranks, self._stages)
            local = read(folder / self._own, known[self._own]) if same else {}
            progress = manifest["progress"]
            return Loaded(step=step, shared=shared, local=local, progress=progress, others=others, recut=recut), None
        except Exception as error:  # any error, because the other ranks wait in the gather
            return None, reason_of(error)

    def _prune(self, step: int) -> None:
        """Remove what `step` replaced, and older checkpoints of this run except the last `keep` and the best.

        Checkpoints of other runs, later ones, and rejected ones are neither counted nor removed.
        """
        self._tidy("saving", "replaced", "removing")
        saved = []
        for name, other in self._names():
            with contextlib.suppress(Exception):
                if name == _name(other) and other <= step and other not in self.rejected:
                    saved.append((name, self._manifest(name, other)["best"]))
        best = next((name for name, is_best in saved if is_best), None)
        for name in [name for name, _ in saved[self._keep :] if name != best]:
            hidden = self._folder / f".removing-{name}-{secrets.token_hex(8)}"
            shutil.rmtree((self._folder / name).rename(hidden), ignore_errors=True)  # never visible in part


def _check_finite(arrays: Arrays) -> None:
    """Raise ValueError for infinite or NaN weights, from which no run could resume."""
    for name, array in arrays.items():
        if name.startswith(("parameter.", "average.", "drift.")) and not np.isfinite(array).all():
            raise ValueError(f"{name} contains infinity or NaN; earlier checkpoints are unchanged; hint: lower --lr")


def _choices(surveys: list[list[list[JSON]]]) -> Iterator[tuple[int, str | None, list[str | None]]]:
    """Yield (step, token, []) for each save that all ranks hold, newest step first.

    If ranks hold no common save of a step, yield (step, None, reasons by rank).
    """
    for step in sorted({entry[0] for survey in surveys for entry in survey}, reverse=True):
        views = [[entry for entry in survey if entry[0] == step] for survey in surveys]
        shared = set.intersection(*({save for _, save, _, _ in view if save} for view in views))
        reasons = [next((why for _, _, why, _ in view if why), None if view else "it is missing") for view in views]
        if not shared:
            yield step, None, reasons if any(reasons) else ["the hosts hold different saves of this step"]
        for save in (save for _, save, _, _ in views[0] if save in shared):
            yield step, save, []


def _first(reasons: list[str | None]) -> str:
    """Return the first rank's reason, followed by its rank unless all ranks have the same reason."""
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    return reason if len(set(reasons)) == 1 else f"{reason} (rank {rank})"
