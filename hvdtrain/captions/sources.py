"""Read captions and images in the forms of Flickr8k, Flickr30k and COCO; the first that is found is used.

  1. `Flickr8k.token.txt`, or Flickr30k's `results_20130124.token`: lines `name.jpg#0<TAB>sentence`. Flickr8k's official
     split is optional: all of `Flickr_8k.trainImages.txt`, `Flickr_8k.devImages.txt` and `Flickr_8k.testImages.txt`,
     with one image per line.
  2. Later copies of both: `captions.txt` or `captions.csv` with the header `image,caption`, in which sentences with
     commas are in double quotes, or Flickr30k's `results.csv` with the header `image_name| comment_number| comment`.
  3. `captions_*.json` in COCO's form, all of these files together: `{"images": [{"id": 9, "file_name": "a.jpg"}, ...],
     "annotations": [{"image_id": 9, "caption": "A dog ."}, ...]}`. The split is not read from the files' names.

The files and the images may be in any folders below the given one. If several images have the same name, the captions
must give enough of the path. **Bad captions**, images without captions, and wrong names in the official lists are
recorded with file and line. Blank lines, a byte order mark and CRLF are accepted.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.captions.vocabulary import clean
from hvdtrain.data.prepared import CONTROL
from hvdtrain.data.tree import SUFFIXES, walk
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, NO_PERMISSION, Failure

TOKENS = ("Flickr8k.token.txt", "results_20130124.token")
TABLES = ("captions.txt", "captions.csv", "results.csv")
COCO = "captions_*.json"
COLUMNS = {"image": "image", "image_name": "image", "caption": "caption", "comment": "caption"}
"""Name in the header of a table -> meaning of the column"""
LISTS = ("Flickr_8k.trainImages.txt", "Flickr_8k.devImages.txt", "Flickr_8k.testImages.txt")  # order of PARTS
SOURCE_BYTES = 1024 * files.MIB  # forty times the size of COCO's captions


@dataclass(kw_only=True)
class Source:
    """Captions and split found below `root`."""

    root: Path
    file: str = ""
    """Path of the captions, relative to `root`."""
    captions: dict[str, list[str]] = field(default_factory=dict)
    """Image, relative to `root` -> its usable cleaned sentences, one or more."""
    parts: dict[str, int] | None = None
    """Image -> 0, 1, 2 for train, validation, test; None if the source has no split."""
    problems: dict[str, str] = field(default_factory=dict)
    """file:line, or an image -> reason for skipping it."""
    crlf_lines: int = 0
    non_ascii_captions: int = 0
    unassigned_images: int = 0
    """Number of usable images that the source assigns to no part; they are skipped."""
    ignored: list[str] = field(default_factory=list)
    """Hidden and system files."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A caption as read from a file."""

    where: str
    image: str
    text: str


class CocoImage(msgspec.Struct):
    id: int
    file_name: str


class CocoCaption(msgspec.Struct):
    image_id: int
    caption: str


class Coco(msgspec.Struct):
    """A file of COCO's captions; other keys are left out."""

    images: list[CocoImage]
    annotations: list[CocoCaption]


def find(root: Path, max_words: int) -> Source:
    """Reads captions and lists images below `root`; captions may have up to `max_words` words.

    Raises Failure: BAD_DATA if no format is found or a whole file is unusable, NO_PERMISSION or IO_ERROR for unreadable
    files. Problems with single captions and images are in the result's `problems`.
    """
    if not root.is_dir():
        raise Failure(f"{root} is not a folder; hint: give the folder with images and captions", BAD_DATA)
    try:
        return _Reader(root, max_words).read()
    except OSError as error:
        code = NO_PERMISSION if isinstance(error, PermissionError) else IO_ERROR
        raise Failure(f"{error.filename}: {error.strerror}; hint: make everything in it readable", code) from None


class _Reader:
    def __init__(self, root: Path, max_words: int) -> None:
        self.root, self.max_words = root, max_words
        self.source = Source(root=root)
        self.files: dict[str, list[str]] = {}  # name -> paths of the files with this name, relative to root
        self.refused: dict[str, str] = {}  # image -> reason to skip it without opening it

    def read(self) -> Source:
        for path, reason in walk(self.root, self.root, self.source.ignored):
            self.files.setdefault(Path(path).name, []).append(path)
            reason = reason or ("a control character in its name" if CONTROL.search(path) else "")
            if reason and path.lower().endswith(SUFFIXES):
                self.refused[path] = reason
        self._captions()
        source = self.source
        if not source.captions:
            place, reason = next(iter(source.problems.items()), (source.file, "no captions in it"))
            message = f"no image below {self.root} has a usable caption"
            raise Failure(f"{self.root / place}: {reason}; {message}", BAD_DATA)
        source.parts = self._official() if Path(source.file).name == TOKENS[0] else None
        if source.parts is not None:
            source.unassigned_images = len(source.captions.keys() - source.parts.keys())
            source.captions = {image: source.captions[image] for image in source.parts}
        return source

    def _captions(self) -> None:
        """Separates captions from problems."""
        source = self.source
        first: dict[tuple[str, str], str] = {}
        named: set[str] = set()
        for line in self._lines():
            image, reason = self._image(line.image)
            named.update([image] if image in self.refused or not reason else self._candidates(line.image))
            words = clean(line.text)
            count = len(words.split())
            if not reason and not words:
                reason = "a caption without words"
            elif not reason and count > self.max_words:
                reason = f"{count} words, more than --max-words {self.max_words}"
            elif not reason and (image, words) in first:
                reason = f"the same caption of the same image as {first[image, words]}"
            if reason:
                source.problems[line.where] = reason
                continue
            first[image, words] = line.where
            source.non_ascii_captions += not line.text.isascii()
            source.captions.setdefault(image, []).append(words)
        for paths in self.files.values():
            for path in paths:
                if path.lower().endswith(SUFFIXES) and path not in named:
                    source.problems[path] = "an image without a caption"

    def _candidates(self, name: str) -> list[str]:
        """All files with the same last path component."""
        return self.files.get(Path(name).name, [])

    def _image(self, name: str) -> tuple[str, str]:
        """(path relative to root, or `name` if there is no such image; the reason why it is unusable, or '')."""
        paths = self._candidates(name)
        if len(paths) > 1:
            paths = [path for path in paths if f"/{path}".endswith(f"/{name}")]
        if len(paths) > 1:
            return name, f"two images have the name {name!r}: {paths[0]} and {paths[1]}"
        if not paths or not paths[0].lower().endswith(SUFFIXES):
            return name, f"there is no image {name!r}"
        return paths[0], self.refused.get(paths[0], "")

    def _lines(self) -> Iterator[Line]:
        """The captions, in the format that is found."""
        for name in (*TOKENS, *TABLES):
            if self._one(self.files.get(name, [])):
                self.source.file = self.files[name][0]
                return self._tokens() if name in TOKENS else self._table()
        if coco := sorted(path for name in self.files if fnmatch(name, COCO) for path in self.files[name]):
            self.source.file = coco[0]
            return itertools.chain.from_iterable(map(self._coco, coco))
        hint = f"give a folder with {TOKENS[0]}, {COCO} or {' or '.join(TABLES)} (header image,caption)"
        raise Failure(f"{self.root} contains no captions; hint: {hint}", BAD_DATA)

    def _one(self, paths: Sequence[str]) -> str:
        """The only path, or ''. Raises Failure if there are several."""
        if len(paths) > 1:
            message = f"{self.root} contains captions twice, in {paths[0]} and {paths[1]}"
            raise Failure(f"{message}; hint: remove one of them", BAD_DATA)
        return paths[0] if paths else ""

    def _text(self, file: str) -> Iterator[tuple[str, str]]:
        """(file:line, the line without its end) for each line that is not blank."""
        data = files.read(self.root / file, SOURCE_BYTES)
        for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            where = f"{file}:{number}"
            self.source.crlf_lines += raw.endswith(b"\r")
            try:
                line = raw.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                self.source.problems[where] = f"byte {error.start + 1} is not UTF-8"
                continue
            if line.strip():
                yield where, line

    def _tokens(self) -> Iterator[Line]:
        for where, line in self._text(self.source.file):
            key, tab, text = line.partition("\t")
            name, sharp, number = key.rpartition("#")
            if tab and sharp and number.strip().isdecimal() and name:
                yield Line(where=where, image=name, text=text)
            else:
                self.source.problems[where] = "expected name.jpg#0, a tab and a sentence"

    def _table(self) -> Iterator[Line]:
        lines = self._text(self.source.file)
        _, header = next(lines, ("", ""))
        separator = "|" if "|" in header else ","
        meanings = [COLUMNS.get(word.strip(' "').lower(), "") for word in header.split(separator)]
        if meanings.count("image") != 1 or meanings.count("caption") != 1:
            where = f"{self.root / self.source.file}:1"
            raise Failure(f"{where}: the header is {header[:60]!r}, but must be 'image,caption'", BAD_DATA)
        # Flickr30k's sentences between bars have quotation marks that are not those of CSV.
        quoting: Any = csv.QUOTE_NONE if separator == "|" else csv.QUOTE_MINIMAL
        for where, line in lines:
            # Parsed line by line, so that an extra quote spoils only one caption.
            try:
                fields = next(csv.reader([line], delimiter=separator, quoting=quoting, strict=True))
            except csv.Error as error:
                self.source.problems[where] = f"unbalanced quotes ({error})"
                continue
            found = {meaning: field.strip() for meaning, field in zip(meanings, fields, strict=False)}
            if len(fields) == len(meanings) and found["image"]:
                yield Line(where=where, image=found["image"], text=found["caption"])
            else:
                hint = "put a sentence with commas in double quotes"
                self.source.problems[where] = f"{len(fields)} fields instead of {len(meanings)}; hint: {hint}"

    def _coco(self, file: str) -> Iterator[Line]:
        data = files.read(self.root / file, SOURCE_BYTES)
        try:
            coco = msgspec.json.decode(data, type=Coco)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self.root / file} is not in COCO's form: {error}"
            raise Failure(f"{message}; hint: give COCO's captions as they are distributed", BAD_DATA) from None
        names = {image.id: image.file_name for image in coco.images}
        for number, each in enumerate(coco.annotations, start=1):
            name = names.get(each.image_id, f"with id {each.image_id}")
            yield Line(where=f"{file}: caption {number}", image=name, text=each.caption)

    def _official(self) -> dict[str, int] | None:
        """The split by the three official lists."""
        lists = [self._one(self.files.get(name, [])) for name in LISTS]
        if not any(lists):
            return None
        missing = [name for name, path in zip(LISTS, lists, strict=True) if not path]
        if missing:
            raise Failure(f"{self.root} has no {', '.join(missing)}; hint: give all three lists or none", BAD_DATA)
        cut: dict[str, int] = {}
        first: dict[str, str] = {}
        for part, file in enumerate(lists):
            for where, line in self._text(file):
                image, reason = self._image(line.strip())
                if image in cut:
                    self.source.problems[where] = f"{line.strip()} is in {first[image]} already"
                elif reason or image not in self.source.captions:
                    self.source.problems[where] = reason or f"{line.strip()} has no caption"
                else:
                    cut[image], first[image] = part, where
        return cut
