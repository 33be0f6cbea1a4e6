"""The folder that `hvdtrain data captions` makes, as a reader sees it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hvdtrain.captions.dataset import CaptionDataset, assemble
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.data.prepared import PARTS, open_array, opening, texts, whole_numbers
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

SCHEMA = "hvdtrain.captions/1"
FILES = ("pictures.npy", "captions.json", "vocabulary.json")
WORDS_BYTES = 1024 * files.MIB  # twenty times COCO's


def open_captions(folder: str | Path, *, verify: bool = False) -> CaptionDataset:
    """The data set in a folder made by `prepare`; pictures stay a memory map.

    Small files are checked whole, the large one as `prepared.open_images` tells.
    Raises Failure (BAD_DATA; NO_PERMISSION), which names the file, if anything is not as the index says.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data captions", SCHEMA) as index:
        counts, stated = list(whole_numbers(index["counts"])), index["files"]
        shape = whole_numbers([index[name] for name in ("pictures", "height", "width", "channels")])
        pictures = open_array(folder / "pictures.npy", stated["pictures.npy"], shape, "uint8", verify=verify)
        told = _document(folder / "captions.json", stated)["pictures"]
        vocabulary = Vocabulary.from_json(_document(folder / "vocabulary.json", stated), folder / "vocabulary.json")
        try:
            names = texts([picture["name"] for picture in told])
            references = [texts(picture["captions"]) for picture in told]
            if not all(references):
                raise ValueError("a picture without a caption")
        except (KeyError, TypeError, ValueError) as error:
            raise Failure(f"{folder / 'captions.json'} is damaged ({error}): prepare it again", BAD_DATA) from None
        digests = {name: stated[name]["sha256"] for name in FILES}
    if not len(names) == len(pictures) == sum(counts) or len(counts) != len(PARTS):
        raise Failure(f"{folder / 'index.json'}: its counts are not those of captions.json: prepare it again", BAD_DATA)
    if not counts[0]:
        raise Failure(f"{folder}: no training pictures: prepare it again with another --split", BAD_DATA)
    return assemble(
        name=folder.name,
        vocabulary=vocabulary,
        pictures=pictures,
        names=names,
        references=references,
        counts=counts,
        fingerprint=hashlib.sha256(json.dumps([counts, digests]).encode()).hexdigest(),
    )


def _document(path: Path, stated: dict[str, Any]) -> Any:
    data = files.read(path, WORDS_BYTES)
    if hashlib.sha256(data).hexdigest() != stated[path.name]["sha256"]:
        raise Failure(f"{path} is damaged (its SHA-256 is not the index's): copy or prepare it again", BAD_DATA)
    return files.from_json(data)
