"""Convert images with captions to a folder of arrays: `hvdtrain data captions Flickr8k prepared`.

**Input**: the formats of hvdtrain.captions.sources. **Output**: DST with `images.npy` (N, height, width, 3) uint8,
converted as hvdtrain.data.images describes; `captions.json`, names and cleaned sentences in the same order;
`vocabulary.json`, the words of the training captions; and `index.json` with statistics and every bad sample.

**The split** is the source's own if it has one (Flickr8k's three lists, a column `split`). Otherwise images are split
in the proportions of `--split`, by a hash of the seed and the image's name.

Bad samples may be captions or images; the captions of an undecodable image are skipped with it. Interruptions are safe
at any time, as in hvdtrain.data.images.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from hvdtrain import __version__
from hvdtrain.captions import sources
from hvdtrain.captions.prepared import FILES, SCHEMA
from hvdtrain.captions.sources import Source
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.config.constraints import bounded
from hvdtrain.data import stratify
from hvdtrain.data.images import ImageOptions, drop_bad_rows, make, named
from hvdtrain.data.making import check_destination, seal, write_json
from hvdtrain.data.pixels import Bad
from hvdtrain.data.prepared import PARTS
from hvdtrain.data.tree import Tree, draw_lot
from hvdtrain.system.exits import BAD_DATA, Failure

SUMMARY = "hvdtrain.data.captions/1"


@dataclass(frozen=True, kw_only=True)
class CaptionsConfig(ImageOptions):
    """Options of `hvdtrain data captions`."""

    source: str
    """Folder with images and captions: the original Flickr8k, Flickr30k or COCO, or a captions.txt table."""
    size: str = "224x224"
    """Width x height of the prepared images in pixels."""
    split: str = "6000/1000/1000"
    """Shares of train/validation/test images, for a source without a split."""
    min_count: int = bounded(5, least=1)
    """Minimum number of occurrences in the training captions for a word to enter the vocabulary."""
    max_words: int = bounded(34, least=1)
    """A caption with more words is a bad sample."""


def prepare(config: CaptionsConfig) -> dict[str, Any]:
    """Prepares the data and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for an unusable source, caption or image, NO_PERMISSION for an unreadable folder,
    CANNOT_WRITE if the destination exists, IO_ERROR if the disk is full.
    """
    check_destination(config.source, config.destination)
    source = sources.find(Path(config.source), config.max_words)
    files = sorted(source.captions)
    lots = np.array([draw_lot(config.seed, file) for file in files], np.uint64)
    if source.parts is None:
        order, table = stratify(np.zeros(len(files), np.int64), lots, 1, config.shares)
        parts = np.repeat(np.arange(len(PARTS)), table[0])
    else:
        parts = np.array([source.parts[file] for file in files], np.int64)
        order = np.lexsort((lots, parts))
        parts = parts[order]
    # The images in row order, labelled by part, with unusable captions as bad samples.
    tree = Tree(
        root=source.root,
        classes=list(PARTS),
        files=[files[row] for row in order],
        labels=parts,
        lots=lots[order],
        bad=source.problems,
        ignored=source.ignored,
    )
    describe = functools.partial(_describe, config, source, tree, np.arange(len(tree.files)), {})
    made = make(config, tree, describe, functools.partial(_finish, config, source, tree))
    return {**made, "schema": SUMMARY}


def _finish(config: CaptionsConfig, source: Source, tree: Tree, result: Path, bad: Bad) -> dict[str, Any]:
    """Removes the bad rows, writes words and index."""
    good = np.setdiff1d(np.arange(len(tree.files)), list(bad))
    drop_bad_rows(result / "samples.npy", config, good)
    described = _describe(config, source, tree, good, bad)  # raises if a part is empty
    images = [{"name": tree.files[row], "captions": source.captions[tree.files[row]]} for row in good]
    write_json(result / "captions.json", {"schema": SCHEMA, "images": images})
    write_json(result / "vocabulary.json", _vocabulary(config, source, tree, good).as_json())
    (result / "samples.npy").rename(result / "images.npy")
    return seal(result, {"schema": SCHEMA, **described}, FILES)


def _vocabulary(config: CaptionsConfig, source: Source, tree: Tree, rows: NDArray[np.int64]) -> Vocabulary:
    """The vocabulary of the training captions among `rows`."""
    images = (source.captions[tree.files[row]] for row in rows if tree.labels[row] == 0)
    return Vocabulary.build((sentence for sentences in images for sentence in sentences), config.min_count)


def _describe(config: CaptionsConfig, source: Source, tree: Tree, rows: NDArray[np.int64], bad: Bad) -> dict[str, Any]:
    """Contents of the index. Raises Failure (BAD_DATA) if a part has no image."""
    vocabulary = _vocabulary(config, source, tree, rows)
    parts: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(PARTS):
        images = [source.captions[tree.files[row]] for row in rows if tree.labels[row] == number]
        if not images:
            message, hint = f"{tree.root}: no images for {part}", "add images, or change --split"
            if source.parts is not None:
                hint = "the source's split must name images for train, val and test"
            raise Failure(f"{message}; hint: {hint}", BAD_DATA)
        words = [word for sentences in images for sentence in sentences for word in sentence.split()]
        known = set(vocabulary.words)
        lengths = [len(sentence.split()) for sentences in images for sentence in sentences]
        parts[part] = {
            "images": len(images),
            "captions": len(lengths),
            "captions_per_image": dict(sorted(Counter(map(len, images)).items())),
            "words": len(words),
            "words_per_caption": {"least": min(lengths), "mean": len(words) / len(lengths), "most": max(lengths)},
            "unknown_words_share": sum(word not in known for word in words) / len(words),
        }
    height, width, channels = config.row_shape
    return {
        "made_by": f"hvdtrain {__version__}, Pillow {PIL.__version__}",
        "images": len(rows),
        "counts": [parts[part]["images"] for part in PARTS],
        "vocabulary": len(vocabulary),
        "min_count": config.min_count,
        "max_words": config.max_words,
        "statistics": parts,
        "split": "the source's" if source.parts is not None else {"shares": config.split, "seed": config.seed},
        "width": width,
        "height": height,
        "channels": channels,
        "dtype": "uint8",
        "resize": "Pillow bilinear",
        "source": {
            "folder": config.source,
            "captions": source.file,
            "crlf_lines": source.crlf_lines,
            "non_ascii_captions": source.non_ascii_captions,
            "images_in_no_part": source.unassigned_images,
        },
        "bad_samples": [{"file": name, "reason": reason} for name, reason in named(tree, bad).items()],
    }
