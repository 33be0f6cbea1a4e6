"""Open captioning data by name: drawn scenes, and the folders that `hvdtrain data captions` makes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hvdtrain.captions import shapes
from hvdtrain.captions.dataset import CaptionDataset, assemble
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.data.prepared import AGAIN, PARTS, open_array, opening, texts, whole_numbers
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

SCHEMA = "hvdtrain.captions/1"
FILES = ("images.npy", "captions.json", "vocabulary.json")
WORDS_BYTES = 1024 * files.MIB  # twenty times the size of COCO


def load(name: str) -> CaptionDataset:
    """The data set with this name: 'shapes', or the path of a folder made by `hvdtrain data captions`.

    Raises Failure (BAD_DATA) for a missing, foreign or damaged folder.
    """
    if name == "shapes":
        return shapes.load()
    folder = Path(name)
    if not folder.is_dir():
        known = "'shapes' or a folder made by `hvdtrain data captions`"
        raise Failure(f"unknown captions '{name}': {folder} is not a folder; hint: give {known}", BAD_DATA)
    return open_captions(folder)


def open_captions(folder: str | Path) -> CaptionDataset:
    """The data set in a folder made by `prepare`; images stay a memory map.

    Small files are verified completely, the large one like in `data.prepared.open_images`.
    Raises Failure (BAD_DATA; NO_PERMISSION) with the file's name if anything differs from the index.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data captions", SCHEMA) as index:
        counts, stated = list(whole_numbers(index["counts"])), index["files"]
        shape = whole_numbers([index[name] for name in ("images", "height", "width", "channels")])
        images = open_array(folder / "images.npy", stated["images.npy"], shape, "uint8")
        documents = _document(folder / "captions.json", stated)["images"]
        vocabulary = Vocabulary.from_json(_document(folder / "vocabulary.json", stated), folder / "vocabulary.json")
        try:
            names = texts([image["name"] for image in documents])
            references = [texts(image["captions"]) for image in documents]
            if not all(references):
                raise ValueError("an image without a caption")
        except (KeyError, TypeError, ValueError) as error:
            message = f"{folder / 'captions.json'} is damaged ({error})"
            raise Failure(f"{message}; hint: prepare it again", BAD_DATA) from None
        digests = {name: stated[name]["sha256"] for name in FILES}
    if not len(names) == len(images) == sum(counts) or len(counts) != len(PARTS):
        message = f"{folder / 'index.json'}: its counts do not match captions.json"
        raise Failure(f"{message}; hint: prepare it again", BAD_DATA)
    if not counts[0]:
        raise Failure(f"{folder}: no training images; hint: prepare it again with another --split", BAD_DATA)
    return assemble(
        name=folder.name,
        vocabulary=vocabulary,
        images=images,
        names=names,
        references=references,
        counts=counts,
        fingerprint=hashlib.sha256(json.dumps([counts, digests]).encode()).hexdigest(),
    )


def _document(path: Path, stated: dict[str, Any]) -> Any:
    data = files.read(path, WORDS_BYTES)
    if hashlib.sha256(data).hexdigest() != stated[path.name]["sha256"]:
        raise Failure(f"{path} is damaged (its SHA-256 differs from the index); hint: {AGAIN}", BAD_DATA)
    return files.from_json(data)
