"""Open captioning data by name."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.captions import shapes
from hvdtrain.captions.dataset import CaptionDataset
from hvdtrain.captions.prepare import cached
from hvdtrain.captions.prepared import open_captions
from hvdtrain.system.exits import BAD_DATA, Failure

RAW = "flickr8k:"


def load(name: str) -> CaptionDataset:
    """The data set with this name: 'shapes', 'flickr8k:DIR', or the path of a folder made by `hvdtrain data captions`.

    DIR is a prepared folder or contains the original files, which are prepared once on each host, in the user's cache.
    That starts worker processes, so a script that calls this function must guard its main program. Raises Failure:
    BAD_DATA for a missing, foreign or damaged folder, CANNOT_WRITE for the cache.
    """
    if name == "shapes":
        return shapes.load()
    folder = Path(name.removeprefix(RAW))
    if not folder.is_dir():
        known = "'shapes', 'flickr8k:DIR' or a folder made by `hvdtrain data captions`"
        raise Failure(f"unknown captions '{name}': {folder} is not a folder; hint: give {known}", BAD_DATA)
    if name.startswith(RAW) and not (folder / "index.json").exists():
        folder = cached(folder)
    return open_captions(folder)
