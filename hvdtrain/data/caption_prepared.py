"""The folder that `hvdtrain data captions` makes, as a reader sees it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hvdtrain.data.captions import CaptionDataset, assemble
from hvdtrain.data.prepared import PARTS, open_array, opening
from hvdtrain.data.vocabulary import Vocabulary
from hvdtrain.exits import BAD_DATA, Failure

SCHEMA = "hvdtrain.captions/1"
FILES = ("pictures.npy", "captions.json", "vocabulary.json")


def open_captions(folder: str | Path, *, verify: bool = False) -> CaptionDataset:
    """The data set in a folder made by `prepare`; pictures stay a memory map.

    Small files are checked whole, the large one by its size, head and, with `verify`, its SHA-256.
    Raises Failure (BAD_DATA), which names the file, if anything is not as the index says.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data captions", SCHEMA) as index:
        counts, files = [int(count) for count in index["counts"]], index["files"]
        shape = (index["pictures"], index["height"], index["width"], index["channels"])
        pictures = open_array(folder / "pictures.npy", files["pictures.npy"], shape, "uint8", verify=verify)
        told = _document(folder / "captions.json", files)["pictures"]
        vocabulary = Vocabulary.from_json(_document(folder / "vocabulary.json", files), folder / "vocabulary.json")
        names = [str(picture["name"]) for picture in told]
        references = [tuple(map(str, picture["captions"])) for picture in told]
        digests = {name: files[name]["sha256"] for name in FILES}
    if not len(names) == len(pictures) == sum(counts) or len(counts) != len(PARTS):
        raise Failure(f"{folder / 'index.json'}: its counts are not those of captions.json: prepare it again", BAD_DATA)
    return assemble(
        name=folder.name,
        vocabulary=vocabulary,
        pictures=pictures,
        names=names,
        references=references,
        counts=counts,
        fingerprint=hashlib.sha256(json.dumps([counts, digests]).encode()).hexdigest(),
    )


def _document(path: Path, files: dict[str, Any]) -> Any:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != files[path.name]["sha256"]:
        raise Failure(f"{path} is damaged (its SHA-256 is not the index's): copy or prepare it again", BAD_DATA)
    return json.loads(data)
