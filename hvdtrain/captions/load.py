"""Open captioning data by name.

dataset = load("shapes")                     # drawn on the fly: hvdtrain.captions.shapes
dataset = load("flickr8k:/path/to/Flickr8k") # the original files, prepared once in the cache
dataset = load("prepared")                   # a folder made by `hvdtrain data captions`
"""

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

    DIR is a prepared folder or contains the original files (hvdtrain.captions.sources). Original files are prepared
    once by the first process on the host, into `hvdtrain/captions` of the user's cache, while other processes wait.
    Preparing starts worker processes, so a script that calls this function must guard its main program. Raises Failure: BAD_DATA
    for a missing, foreign or damaged folder, CANNOT_WRITE for the cache.
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
