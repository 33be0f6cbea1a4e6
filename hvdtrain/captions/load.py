"""Captioning data by name.

dataset = load("shapes")                     # drawn on the fly, no download: hvdtrain.captions.shapes
dataset = load("flickr8k:/path/to/Flickr8k") # as it is distributed; prepared once, into the cache
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


def load(name: str, *, verify: bool = False) -> CaptionDataset:
    """The data set called `name`: 'shapes', 'flickr8k:DIR', or the path of a folder made by `hvdtrain data captions`.

    DIR is a prepared folder too, or the data as distributed (hvdtrain.captions.sources): the first process of the host
    that asks prepares it once, into `hvdtrain/captions` of the user's cache, and the others wait for it.
    `verify` compares the SHA-256 of a folder's large array even if this host has done so before.
    Preparing starts worker processes, so a script that calls this must guard its main program.
    Raises Failure: BAD_DATA for a folder that is missing, foreign or damaged, CANNOT_WRITE for the cache.
    """
    if name == "shapes":
        return shapes.load()
    folder = Path(name.removeprefix(RAW))
    if not folder.is_dir():
        known = "'shapes', 'flickr8k:DIR' or a folder made by `hvdtrain data captions`"
        raise Failure(f"no captions '{name}', {folder} is no folder: name {known}", BAD_DATA)
    if name.startswith(RAW) and not (folder / "index.json").exists():
        folder = cached(folder)
    return open_captions(folder, verify=verify)
