"""Checkpoints: whole or absent, checksummed, free of pickle.

On disk, on every file system that a rank of the job writes to:

    checkpoints/step-00000120/
        shared.safetensors      equal on all ranks (weights, optimizer state): written once per file system
        stage0.safetensors ...  in its place, of a model cut into stages: equal on all ranks of that stage
        rank0000.safetensors    one per rank that uses this file system (BatchNorm statistics, strategy state)
        checkpoint.json         written last: schema, save (a random token), step, best, progress, ranks, layout,
                                stages and cut, identity, files {name: {sha256, bytes}}, digest (SHA-256 of the rest)
    checkpoints/.saving-step-00000120-<token>/      a save on its way, renamed when it is whole
    checkpoints/.replaced-step-00000120-<token>/    the one before of the same step, valid until the new is on all hosts
    checkpoints/.removing-step-00000120-<token>/    an old one on its way out

The files are in the safetensors format, for any safetensors library to read. `hvdtrain.records.arrays_file` writes,
reads and hashes them in one pass; the library wants contiguous arrays, holds two copies while it loads, and needs a
second pass.

A save is three small gathers. (1) All ranks learn rank 0's token, and each tries to make the temp folder of that name:
one rank per file system succeeds and is its writer, whether all hosts share a disk, some or none. No state crosses the
network. (2) All files are fsynced; the writers write and fsync checkpoint.json, fsync the folder, rename it and fsync
its parent. (3) It is in place everywhere: the writers remove old ones. A rank that fails says so in the next gather, so
that all ranks raise the same Failure and none is left waiting.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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

from hvdtrain.records.arrays_file import JSON, Arrays, pieces, read, stated, write
from hvdtrain.records.identity import differing
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, CANNOT_WRITE, FAILED, IO_ERROR, NO_PERMISSION, Failure, printable

SCHEMA = "hvdtrain/checkpoint/1"
_MANIFEST = "checkpoint.json"
_SHARED = "shared.safetensors"
_CHECKPOINT = re.compile(r"step-(\d{8}|[1-9]\d{8,})|\.replaced-step-(\d{8,})-[0-9a-f]{16}")
_COMMON = re.compile(r"(shared|stage\d{1,4})\.safetensors")
_FILE = re.compile(rf"{_COMMON.pattern}|rank\d{{4,9}}\.safetensors")
_MANIFEST_BYTES = 64 * files.MIB  # it holds progress and two entries per rank
_LEFTOVER = re.compile(r"\.(saving|replaced|removing)-step-\d{8,}-[0-9a-f]{16}")
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_ADVICE = dict.fromkeys(_DENIED, "; check the path and its permissions or choose another folder")
_ADVICE |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some room or choose another folder")
_ADVICE[errno.EFBIG] = "; raise the limit of file sizes (ulimit -f)"
_own, _name = "rank{:04d}.safetensors".format, "step-{:08d}".format
_FIELDS = {"save": str, "step": int, "best": bool, "progress": dict, "ranks": int, "identity": dict, "files": dict}


class Group(Protocol):
    """The ranks that save and load together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: JSON) -> list[JSON]:
        """The value of every rank, in rank order, on all ranks. Collective."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What save() was given; the arrays are writable and in the order they were saved in."""

    step: int
    shared: Arrays
    local: Arrays
    """This rank's; empty if another number of ranks saved it"""
    progress: dict[str, JSON]
    others: Sequence[Arrays] = ()
    """If another number of ranks saved it, or as many in another layout: what each had as its own, in rank order, of
    those of this one's stage, of all if `recut`"""
    recut: bool = False
    """Whether the model was cut into other stages; `shared` holds all of them then"""


class Checkpoints:
    """The checkpoints of one run in `folder`: the same path on every host, on one file system or on several.

    `identity` is what a checkpoint must fit (see `records.identity`), `layout` the local rank of each rank, `stages`
    the stage of each and `cut` where they begin, which may be other than those that saved it; all are equal on all
    ranks. The last `keep` and the last one saved as best stay. `check` raises ValueError for progress that no
    checkpoint of its step can hold. `report` gets one line for each checkpoint that newest() refuses; it is called on
    rank 0 only. One job at a time may use the folder (`lock`).
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
            raise Failure(f"{keep} checkpoints to keep: give 1 or more", BAD_CONFIG)
        self._folder, self._group, self._keep = folder, group, keep
        self._report: Callable[[str], None] = lambda line: report(printable(line)) if group.rank == 0 else None
        self._own, self._ranks = _own(group.rank), group.size  # a group may lose ranks later
        self._layout, self._cut = list(layout) or [0] * group.size, list(cut)
        self._stages = list(stages) if cut else []
        self._shared = f"stage{self._stages[group.rank]}.safetensors" if cut else _SHARED
        self._identity: dict[str, JSON] = json.loads(json.dumps(identity))
        self._check = check
        self._refused: set[int] = set()
        self.others = False
        """Whether newest() refused a checkpoint on this host because it is of another run"""

    def save(self, step: int, shared: Arrays, local: Arrays, progress: dict[str, JSON], best: bool = False) -> Path:
        """Save this rank's part of step `step` (>= 0) and return the checkpoint's folder. Collective.

        Arrays may have any layout and any dtype of safetensors' (bfloat16: hand over its uint16 view); `best` is rank
        0's, and so is `progress` but for its `validation_scores`, which are alike on all ranks. A checkpoint of the
        same step is replaced. When one rank fails, all raise the same Failure, older checkpoints are as they were and
        the temp folder is gone: CANNOT_WRITE (permission, read-only), IO_ERROR (no room, broken disk), FAILED (ranks
        at different steps, a dtype or value that cannot be stored, weights that are infinite or NaN).
        """
        final = self._folder / _name(step)
        task, mine = f"save {final}", {"save": secrets.token_hex(8), "step": int(step), "best": bool(best)}

        def begin() -> JSON:
            _finite(shared | local)
            told = {name: value for name, value in progress.items() if name != "validation_scores"}  # alike on all
            return mine | {"progress": json.dumps(told)}

        heads = self._agree(task, CANNOT_WRITE, begin)
        if len(steps := {head["step"] for head in heads}) > 1:
            raise Failure(f"cannot {task}: the ranks are at different steps, {sorted(steps)}", FAILED)
        head = heads[0] | {"progress": progress | json.loads(heads[0]["progress"])}
        saving = _Saving(final, head["save"])
        try:
            parts = self._agree(task, CANNOT_WRITE, lambda: saving.write(shared, self._shared, self._own, local))
            head |= {"schema": SCHEMA, "ranks": self._ranks, "layout": self._layout, "identity": self._identity}
            head |= {"stages": self._stages, "cut": self._cut} if self._cut else {}
            head["files"] = {name: entry for part in parts for name, entry in part.items()}
            self._agree(task, CANNOT_WRITE, lambda: saving.publish(head))
        except Failure:
            saving.undo()
            raise
        self._refused.discard(step)
        if saving.writer:
            with contextlib.suppress(OSError):  # the save is done; the next one tries again to remove the old ones
                self._prune(step)
        return final

    def newest(self, best: bool = False) -> Loaded | None:
        """The newest checkpoint that every rank finds valid, or None (`report` says why); `best`: of those that were
        saved as best. Collective.

        Bytes, SHA-256 and identity are verified before anything is used; what one rank refuses all refuse, and the one
        before it is tried. Raises Failure if a rank cannot list the folder that exists: NO_PERMISSION or IO_ERROR.
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
                        self._refused.add(step)  # its successor is not on all hosts, so not one of those to keep
                    return loaded
                del loaded  # its memory is needed for the next one
            self._refused.add(step)
            self._report(f"checkpoint {self._folder / _name(step)} refused: {_told(reasons)}")
        kind = ("valid " if any(surveys) else "") + ("best " if best else "")
        self._report(f"no {kind}checkpoint in {self._folder}")
        return None

    def _agree(self, task: str, denied: int, work: Callable[[], JSON]) -> list[JSON]:
        """Do this rank's part; return the results of all ranks, or raise on all ranks the Failure of the first."""
        cause: Exception | None = None
        reply: dict[str, JSON] = {"error": None}
        try:
            reply["result"] = work()
        except Exception as error:  # whatever it is: the other ranks wait in the gather
            told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            cause, reply = error, {"error": told, "code": FAILED}
            if isinstance(error, OSError):
                reply["error"] = (
                    f"{error.strerror or error} on {os.uname().nodename}{_ADVICE.get(error.errno or 0, '')}"
                )
                reply["code"] = denied if error.errno in _DENIED else IO_ERROR
        replies = self._group.gather(reply)
        if failed := [reply for reply in replies if reply["error"]]:
            reasons = _told([reply["error"] for reply in replies])
            raise Failure(f"cannot {task}: {reasons}", failed[0]["code"]) from cause
        return [reply["result"] for reply in replies]

    def _tidy(self, *kinds: str) -> None:
        """Remove what unfinished saves left behind, and nothing else; any number of ranks may do so at once."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if (leftover := _LEFTOVER.fullmatch(path.name)) and leftover[1] in kinds:
                    shutil.rmtree(path, ignore_errors=True)

    def _survey(self, best: bool) -> list[list[JSON]]:
        """[step, token of the save, None, name] of each checkpoint here; [step, None, why, name] if refused."""
        found: list[list[JSON]] = []
        for name, step in self._names():
            try:
                if (manifest := self._manifest(name, step))["best"] or not best:
                    found.append([step, manifest["save"], None, name])
            except Exception as error:
                found.append([step, None, why(error), name])
        return found

    def _names(self) -> list[tuple[str, int]]:
        """(name, step) of all checkpoints: newest first, a replaced one behind its successor."""
        paths = self._folder.iterdir() if self._folder.exists() else ()
        matches = [match for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
        return sorted(((m[0], int(m[1] or m[2])) for m in matches), key=lambda pair: (pair[1], pair[0]), reverse=True)

    def _manifest(self, name: str, step: int) -> dict[str, JSON]:
        """The checkpoint.json of a checkpoint that fits this run; else raises ValueError or OSError."""
        manifest = read_manifest(self._folder / name)
        if manifest["step"] != step:
            raise ValueError(f"the folder's name disagrees with the step in its {_MANIFEST}, {manifest['step']}")
        if (old := manifest["identity"]) != (new := self._identity):
            self.others = True
            raise ValueError(f"it does not fit this run: {'; '.join(differing(old, new))}")
        self._check(manifest["progress"], step)
        return manifest

    def _load(self, name: str, step: int) -> tuple[Loaded | None, str | None]:
        """This rank's part of a checkpoint, or why it is refused."""
        try:
            folder, manifest = self._folder / name, self._manifest(name, step)
            known, own = manifest["files"], self._own
            saved = (manifest["ranks"], manifest.get("layout", self._layout), manifest.get("stages", []))
            recut, stage = manifest.get("cut", []) != self._cut, self._stages[self._group.rank] if self._cut else 0
            names = sorted(file for file in known if not _COMMON.fullmatch(file))  # some ranks may have died
            others: list[Arrays] = []
            if recut or saved != (self._ranks, self._layout, self._stages):
                whole = recut or not self._cut
                stages = dict(zip(map(_own, itertools.count()), saved[2], strict=False))
                others = [read(folder / file, known[file]) for file in names if whole or stages[file] == stage]
            elif own not in known:  # this rank had died, and the others went on: it starts as one of those
                own = min((file for file in names if (folder / file).exists()), default=own)
            shared = common(folder, manifest, None if recut else [self._shared])
            same = not recut and (not others or (own in known and saved[::2] == (self._ranks, self._stages)))
            local = read(folder / own, known[own]) if same else {}
            progress = manifest["progress"]
            return Loaded(step=step, shared=shared, local=local, progress=progress, others=others, recut=recut), None
        except Exception as error:  # whatever it is: the other ranks wait in the gather
            return None, why(error)

    def _prune(self, step: int) -> None:
        """Remove what `step` replaced, and of this run's checkpoints up to it all but the last `keep` and the best.

        Those of other runs (identity), later ones and those that newest() refused are neither counted nor touched.
        """
        self._tidy("saving", "replaced", "removing")
        ours = []
        for name, other in self._names():
            with contextlib.suppress(Exception):
                if name == _name(other) and other <= step and other not in self._refused:
                    ours.append((name, self._manifest(name, other)["best"]))
        best = next((name for name, is_best in ours if is_best), None)
        for name in [name for name, _ in ours[self._keep :] if name != best]:
            hidden = self._folder / f".removing-{name}-{secrets.token_hex(8)}"
            shutil.rmtree((self._folder / name).rename(hidden), ignore_errors=True)  # so nobody ever sees a half one


def common(folder: Path, manifest: dict[str, JSON], names: Sequence[str] | None = None) -> Arrays:
    """What was equal on all ranks, of the files `names`; None: of all stages. Raises ValueError, OSError."""
    stages = sorted(set(manifest.get("stages", [])))
    names = names or [f"stage{stage}.safetensors" for stage in stages] or [_SHARED]
    if missing := [name for name in names if name not in manifest["files"] and name != _SHARED]:
        raise ValueError(f"{missing[0]} is on another host: only a folder that all hosts share holds all stages")
    return {name: array for file in names for name, array in read(folder / file, manifest["files"][file]).items()}


def read_manifest(path: Path) -> dict[str, JSON]:
    """The checkpoint.json of any run's checkpoint; raises ValueError or OSError."""
    try:
        manifest = files.from_json(files.read(path / _MANIFEST, _MANIFEST_BYTES))
    except ValueError as error:
        raise ValueError(f"its {_MANIFEST} is not JSON: {error}") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its {_MANIFEST} is of schema {schema!r:.80}, this version reads {SCHEMA!r}")
    if manifest.pop("digest", None) != _digest(manifest):
        raise ValueError(f"its {_MANIFEST} is damaged (SHA-256 differs)")
    for field, kind in _FIELDS.items():
        if type(manifest.get(field)) is not kind:
            raise ValueError(f"its {_MANIFEST} has no {field}, or a wrong one")
    if not all(type(stage) is int for stage in manifest.get("stages", [])):
        raise ValueError(f"its {_MANIFEST} has wrong stages")
    for name, entry in manifest["files"].items():
        if not _FILE.fullmatch(name) or not isinstance(entry, dict):
            raise ValueError(f"its {_MANIFEST} names {name!r:.80}, which is no file of a checkpoint")
        if type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
            raise ValueError(f"its {_MANIFEST} tells neither bytes nor SHA-256 of {name}")
    return dict(manifest)


class _Saving:
    """One save on its way to this rank's disk; `writer` if this rank is the one that made the temp folder there."""

    def __init__(self, final: Path, token: str) -> None:
        self.final, self.writer, self.published = final, False, False
        self.shared: dict[str, JSON] = {}
        self.temp = final.with_name(f".saving-{final.name}-{token}")
        self.replaced = final.with_name(f".replaced-{final.name}-{token}")

    def write(self, shared: Arrays, name: str, own: str, local: Arrays) -> dict[str, JSON]:
        """Write this rank's files, the shared one under `name`; {name: {sha256, bytes}}."""
        if not self.final.parent.is_dir():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            files.sync(self.final.parent.parent)
        with contextlib.suppress(FileExistsError):  # another rank of this file system was faster
            self.temp.mkdir()
            self.writer = True
        if self.writer or name != _SHARED:
            with contextlib.suppress(FileExistsError):  # another rank of this stage was faster
                self.shared = {name: write(self.temp / name, pieces(shared))}
        return self.shared | {own: write(self.temp / own, pieces(local))}

    def publish(self, manifest: dict[str, JSON]) -> None:
        """Complete the temp folder and give it its name."""
        if not self.writer:
            return
        # Of what is common those of this file system: other processors may differ in the last bit.
        names = [path.name for path in self.temp.iterdir() if _COMMON.fullmatch(path.name)]
        common = {name: self.shared.get(name) or stated(self.temp / name) for name in names}
        own = {name: each for name, each in manifest["files"].items() if not _COMMON.fullmatch(name)}
        manifest["files"] = common | own
        manifest["digest"] = _digest(manifest)
        write(self.temp / _MANIFEST, [memoryview(json.dumps(manifest, indent=1).encode())])
        files.sync(self.temp)
        if self.final.exists():
            self.final.rename(self.replaced)
        self.temp.rename(self.final)
        self.published = True
        files.sync(self.final.parent)

    def undo(self) -> None:
        """Leave the disk as it was, as far as a failing disk allows; the next start removes the rest."""
        if self.writer:
            with contextlib.suppress(OSError):
                if self.published:
                    self.final.rename(self.temp)
                if self.replaced.exists():
                    self.replaced.rename(self.final)
            shutil.rmtree(self.temp, ignore_errors=True)


def _finite(arrays: Arrays) -> None:
    """Raises ValueError if weights are no numbers: nothing could go on from them."""
    for name, array in arrays.items():
        if name.startswith(("parameter.", "drift.")) and not np.isfinite(array).all():
            raise ValueError(f"{name} holds infinity or NaN; earlier checkpoints stay as they are, lower --lr")


def _choices(surveys: list[list[list[JSON]]]) -> Iterator[tuple[int, str | None, list[str | None]]]:
    """Newest step first: (step, token, []) for each save that all ranks hold; if none, (step, None, why by rank)."""
    for step in sorted({entry[0] for survey in surveys for entry in survey}, reverse=True):
        views = [[entry for entry in survey if entry[0] == step] for survey in surveys]
        common = set.intersection(*({save for _, save, _, _ in view if save} for view in views))
        reasons = [next((why for _, _, why, _ in view if why), None if view else "it is missing") for view in views]
        if not common:
            yield step, None, reasons if any(reasons) else ["the hosts hold different saves of this step"]
        for save in (save for _, save, _, _ in views[0] if save in common):
            yield step, save, []


def _told(reasons: list[str | None]) -> str:
    """Why, in one line: the first rank's reason with its rank, or without if all ranks have the same."""
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    return reason if len(set(reasons)) == 1 else f"{reason} (rank {rank})"


def why(error: Exception) -> str:
    """An error of reading a checkpoint, for people."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing (the folder is not hvdtrain's, or it was saved on other hosts)"
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _digest(manifest: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
