"""The files of one checkpoint on one file system: checkpoint.json, read and verified, and an atomic save."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.records.arrays_file import JSON, Arrays, pieces, read, stated, write
from hvdtrain.system import files

SCHEMA = "hvdtrain/checkpoint/1"
MANIFEST = "checkpoint.json"
SHARED = "shared.safetensors"
COMMON = re.compile(r"(shared|stage\d{1,4})\.safetensors")
_FILE = re.compile(rf"{COMMON.pattern}|rank\d{{4,9}}\.safetensors")
_MANIFEST_BYTES = 64 * files.MIB  # it holds progress and two entries per rank
_FIELDS = {"save": str, "step": int, "best": bool, "progress": dict, "ranks": int, "identity": dict, "files": dict}


def read_manifest(path: Path) -> dict[str, JSON]:
    """Read the checkpoint.json of any run's checkpoint. Raises ValueError or OSError."""
    try:
        manifest = files.from_json(files.read(path / MANIFEST, _MANIFEST_BYTES))
    except ValueError as error:
        raise ValueError(f"its {MANIFEST} is not JSON: {error}") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its {MANIFEST} has schema {schema!r:.80}, and this version reads {SCHEMA!r}")
    if manifest.pop("digest", None) != digest(manifest):
        raise ValueError(f"its {MANIFEST} is damaged (SHA-256 differs)")
    for field, kind in _FIELDS.items():
        if type(manifest.get(field)) is not kind:
            raise ValueError(f"its {MANIFEST} has no valid {field}")
    if not all(type(stage) is int for stage in manifest.get("stages", [])):
        raise ValueError(f"its {MANIFEST} has no valid stages")
    for name, entry in manifest["files"].items():
        if not _FILE.fullmatch(name) or not isinstance(entry, dict):
            raise ValueError(f"its {MANIFEST} lists {name!r:.80}, which is not a file of a checkpoint")
        if type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
            raise ValueError(f"its {MANIFEST} has no valid size and SHA-256 for {name}")
    return dict(manifest)


def common(folder: Path, manifest: dict[str, JSON], names: Sequence[str] | None = None) -> Arrays:
    """Read the arrays that all ranks of a stage share, from the files `names`; None for all stages.

    Raises ValueError or OSError.
    """
    stages = sorted(set(manifest.get("stages", [])))
    names = names or [f"stage{stage}.safetensors" for stage in stages] or [SHARED]
    if missing := [name for name in names if name not in manifest["files"] and name != SHARED]:
        raise ValueError(f"{missing[0]} is on another host: only a folder that all hosts share holds all stages")
    return {name: array for file in names for name, array in read(folder / file, manifest["files"][file]).items()}


def reason(error: Exception) -> str:
    """Say for people why a checkpoint cannot be read."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing (not a checkpoint of hvdtrain, or saved on other hosts)"
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def digest(manifest: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Saving:
    """A save in progress; `writer` is True if this rank made the temporary folder on its file system."""

    def __init__(self, final: Path, token: str) -> None:
        self.final, self.writer, self.published = final, False, False
        self.shared: dict[str, JSON] = {}
        self.temp = final.with_name(f".saving-{final.name}-{token}")
        self.replaced = final.with_name(f".replaced-{final.name}-{token}")

    def write(self, shared: Arrays, name: str, own: str, local: Arrays) -> dict[str, JSON]:
        """Write this rank's files, with the shared arrays in `name`; return {name: {sha256, bytes}}."""
        if not self.final.parent.is_dir():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            files.sync(self.final.parent.parent)
        with contextlib.suppress(FileExistsError):  # another rank of this file system was faster
            self.temp.mkdir()
            self.writer = True
        if self.writer or name != SHARED:
            with contextlib.suppress(FileExistsError):  # another rank of this stage was faster
                self.shared = {name: write(self.temp / name, pieces(shared))}
        return self.shared | {own: write(self.temp / own, pieces(local))}

    def publish(self, manifest: dict[str, JSON]) -> None:
        """Complete the temporary folder and rename it."""
        if not self.writer:
            return
        # Keep the shared files of this file system, because other processors may differ in the last bit.
        names = [path.name for path in self.temp.iterdir() if COMMON.fullmatch(path.name)]
        shared = {name: self.shared.get(name) or stated(self.temp / name) for name in names}
        own = {name: entry for name, entry in manifest["files"].items() if not COMMON.fullmatch(name)}
        manifest["files"] = shared | own
        manifest["digest"] = digest(manifest)
        write(self.temp / MANIFEST, [memoryview(json.dumps(manifest, indent=1).encode())])
        files.sync(self.temp)
        if self.final.exists():
            self.final.rename(self.replaced)
        self.temp.rename(self.final)
        self.published = True
        files.sync(self.final.parent)

    def undo(self) -> None:
        """Restore the disk as far as a failing disk allows. The next start removes the rest."""
        if self.writer:
            with contextlib.suppress(OSError):
                if self.published:
                    self.final.rename(self.temp)
                if self.replaced.exists():
                    self.replaced.rename(self.final)
            shutil.rmtree(self.temp, ignore_errors=True)
