"""Pictures with captions -> one folder of arrays: `hvdtrain data captions Flickr8k prepared`.

**In**: what hvdtrain.captions.sources reads. **Out**: DST with
  * `pictures.npy` (N, height, width, 3) uint8, made of the files as hvdtrain.data.images tells;
  * `captions.json`: of each picture, in the same order, its name and its cleaned sentences;
  * `vocabulary.json`: of the training captions, hvdtrain.captions.vocabulary;
  * `index.json`: what all this is, statistics, every bad sample with its reason, sizes and SHA-256 of the files.

**The cut** into train, validation and test is the source's own if it has one (Flickr8k's three lists, Karpathy's
`split`); else `--split` says how pictures, never captions, are shared out, by lots of the seed and the picture's name.
Rows are train | validation | test.

**Bad samples**, captions and pictures alike, end the work with file and line, or are left out, counted and listed. A
picture that cannot be decoded takes its captions along.

**Safe at any moment**, as hvdtrain.data.images is and by its means: killed half way, the same command continues.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
from numpy.typing import NDArray

from hvdtrain import __version__
from hvdtrain.captions import sources
from hvdtrain.captions.prepared import FILES, SCHEMA
from hvdtrain.captions.sources import Source
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.config.constraints import bounded, problem
from hvdtrain.config.parser import flag
from hvdtrain.data import stratify
from hvdtrain.data.images import ImagesConfig, check_destination, drop_bad_rows, make, named, seal, write_json
from hvdtrain.data.pixels import Bad
from hvdtrain.data.prepared import PARTS, cache_folder, caching
from hvdtrain.data.tree import Tree, draw_lot
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure, printable

SUMMARY = "hvdtrain.data.captions/1"
AUTOMATIC_MAX_BAD = 400  # 1 % of Flickr8k's captions: with more than that, somebody should look


@dataclass(frozen=True, kw_only=True)
class CaptionsConfig:
    """What `hvdtrain data captions` does."""

    source: str
    """Folder with pictures and captions: Flickr8k as it is distributed, a captions.txt table, or COCO's JSON."""
    destination: str
    """Folder to make; must not exist."""
    size: str = "224x224"
    """Width x height of the prepared pictures in pixels."""
    min_count: int = bounded(5, least=1)
    """How often the training captions must have a word for the vocabulary to have it."""
    max_words: int = bounded(34, least=1)
    """A caption with more words than this is a bad sample."""
    split: str = "6000/1000/1000"
    """Shares of the pictures for train/validation/test, where the source has no cut of its own."""
    seed: int = 0
    """Which pictures go where, and the order of rows; the same seed gives the same bytes."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """What to do about an unusable caption or picture: stop and name it, or leave it out and list it."""
    max_bad_samples: int = 100
    """With skip: stop when there are more than this many."""
    workers: int = 0
    """Processes; 0 takes all cores."""
    dry_run: bool = False
    """Only list what would be made."""

    def __post_init__(self) -> None:
        if wrong := problem(self, flag):
            raise Failure(wrong, BAD_CONFIG)
        parts = self.split.split("/")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise Failure(
                f"--split {self.split}: expected TRAIN/VALIDATION/TEST, whole numbers that tell their shares, for"
                " example 6000/1000/1000",
                BAD_CONFIG,
            )
        _ = self.images  # its constructor checks the fields that both have

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Of train, validation and test, exact."""
        parts = [int(part) for part in self.split.split("/")]
        return tuple(Fraction(part, sum(parts)) for part in parts)

    @property
    def images(self) -> ImagesConfig:
        """What is done to the pictures."""
        names = ("source", "destination", "size", "seed", "on_bad_sample", "max_bad_samples", "workers", "dry_run")
        return ImagesConfig(dtype="uint8", **{name: getattr(self, name) for name in names})


def _plan(config: CaptionsConfig) -> tuple[Source, Tree]:
    """The captions; and the pictures in the order of rows, labelled by part, with unusable captions as bad samples."""
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
    # All that the result depends on besides the source.
    settings = [SCHEMA, PIL.__version__, config.size, config.min_count, config.max_words, config.split, config.seed]
    digest = hashlib.sha256(json.dumps([source.digest, settings]).encode()).hexdigest()
    tree = Tree(
        root=source.root,
        classes=list(PARTS),
        files=[files[row] for row in order],
        labels=parts,
        lots=lots[order],
        bad=source.problems,
        digest=digest,
    )
    return source, tree


def prepare(config: CaptionsConfig) -> dict[str, Any]:
    """Prepares the data and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for a source, a caption or a picture that is unusable, NO_PERMISSION for a folder that
    cannot be read, CANNOT_WRITE if the destination exists, IO_ERROR for a full disk, RESUMABLE when interrupted.
    """
    check_destination(config.source, config.destination)
    source, tree = _plan(config)
    everything = np.arange(len(tree.files))
    describe = functools.partial(_describe, config, source, tree, everything, {})
    made = make(config.images, tree, describe, functools.partial(_finish, config, source, tree))
    return {**made, "schema": SUMMARY}


def _finish(config: CaptionsConfig, source: Source, tree: Tree, result: Path, bad: Bad) -> dict[str, Any]:
    """Drops the bad rows, writes the words and the index."""
    good = np.setdiff1d(np.arange(len(tree.files)), list(bad))
    drop_bad_rows(result / "samples.npy", config.images, good)
    described = _describe(config, source, tree, good, bad)  # raises if a part is empty
    pictures = [{"name": tree.files[row], "captions": source.captions[tree.files[row]]} for row in good]
    write_json(result / "captions.json", {"schema": SCHEMA, "pictures": pictures})
    write_json(result / "vocabulary.json", _vocabulary(config, source, tree, good).as_json())
    names = {name: "samples.npy" if name == "pictures.npy" else name for name in FILES}
    index = seal(result, {"schema": SCHEMA, **described}, names)
    (result / "samples.npy").rename(result / "pictures.npy")  # last: a restart looks for the old name
    files.sync(result)
    return index


def _vocabulary(config: CaptionsConfig, source: Source, tree: Tree, rows: NDArray[np.int64]) -> Vocabulary:
    """The vocabulary of the training captions among `rows`."""
    told = (source.captions[tree.files[row]] for row in rows if tree.labels[row] == 0)
    return Vocabulary.build((sentence for sentences in told for sentence in sentences), config.min_count)


def _describe(config: CaptionsConfig, source: Source, tree: Tree, rows: NDArray[np.int64], bad: Bad) -> dict[str, Any]:
    """What the index says of the data. Raises Failure (BAD_DATA) if a part has no picture."""
    vocabulary = _vocabulary(config, source, tree, rows)
    parts: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(PARTS):
        told = [source.captions[tree.files[row]] for row in rows if tree.labels[row] == number]
        if not told:
            raise Failure(f"{tree.root}: no picture is left for {part}: more pictures, or another --split", BAD_DATA)
        words = [word for sentences in told for sentence in sentences for word in sentence.split()]
        known = set(vocabulary.words)
        lengths = [len(sentence.split()) for sentences in told for sentence in sentences]
        parts[part] = {
            "pictures": len(told),
            "captions": len(lengths),
            "captions_per_picture": dict(sorted(Counter(map(len, told)).items())),
            "words": len(words),
            "words_per_caption": {"least": min(lengths), "mean": len(words) / len(lengths), "most": max(lengths)},
            "unknown_words_share": sum(word not in known for word in words) / len(words),
        }
    height, width, channels = config.images.row_shape
    return {
        "made_by": f"hvdtrain {__version__}, Pillow {PIL.__version__}",
        "pictures": len(rows),
        "counts": [parts[part]["pictures"] for part in PARTS],
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
            "pictures_in_no_part": source.uncut_pictures,
        },
        "bad_samples": [{"file": name, "reason": reason} for name, reason in named(tree, bad).items()],
    }


def cached(source: Path) -> Path:
    """The prepared folder of `source`, in the user's cache: made by the first process of the host that asks.

    The others wait for it, also those of other runs. Bad samples are left out, and told on stderr, when it is made.
    Raises Failure as `prepare` does.
    """
    home = cache_folder("captions")
    asked: dict[str, Any] = {"source": str(source.resolve()), "on_bad_sample": "skip"}
    asked["max_bad_samples"] = AUTOMATIC_MAX_BAD
    key = _plan(CaptionsConfig(destination=str(home), **asked))[1].digest[:32]
    destination = home / key
    if destination.exists():  # it is renamed into place, so it is whole
        return destination
    with caching(home), files.locked(home / f"{key}.lock"):
        if not destination.exists():
            print(f"{source}: preparing it once, into {destination}", file=sys.stderr, flush=True)
            _tell(source, prepare(CaptionsConfig(destination=str(destination), **asked)))
    return destination


def _tell(source: Path, made: dict[str, Any]) -> None:
    captions = sum(part["captions"] for part in made["statistics"].values())
    print(
        f"{source}: {made['pictures']:,} pictures ({'/'.join(map(str, made['counts']))}), {captions:,} captions,"
        f" {made['vocabulary']:,} words, {made['seconds']:.0f} s",
        file=sys.stderr,
    )
    if made["bad_samples"]:
        worst = made["bad_samples"][0]
        print(
            f"{source}: bad samples, left out: {len(made['bad_samples'])}, listed in {made['destination']}/index.json;"
            f" the first is {printable(worst['file'])}: {printable(worst['reason'])}",
            file=sys.stderr,
        )
