"""Captions and pictures as they are distributed, in three formats; the first of these that is found is read.

  1. `Flickr8k.token.txt`: lines `name.jpg#0<TAB>sentence`. Beside it or not, the official cut: all of
     `Flickr_8k.trainImages.txt`, `Flickr_8k.devImages.txt` and `Flickr_8k.testImages.txt`, a picture's name a line.
  2. `captions.txt`: a CSV table with the header `image,caption`; a sentence with commas stands in double quotes.
  3. one JSON file (`captions*.json`, `dataset*.json`, or the only one), of either kind:
     COCO's `{"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}`, or
     Karpathy's `{"images": [{"filename", "split", "sentences": [{"raw"}]}]}`, whose `restval` is training data.

These files and the pictures may be in any folders below the one that is given; a picture is found by its name, and
where several have it, by as much of its path as the captions tell.

**What is wrong with a caption** leaves it out, and is kept with its file and line (of JSON, its place in the list): no
picture of that name, or two; no words; more words than allowed; the same words as an earlier one of the same picture;
a wrong separator or quotes that do not end; bytes that are no UTF-8. So is a picture that no caption names, and a name
in the official lists that is there twice or has no captions. Blank lines, a byte order mark and CRLF do no harm.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.captions.vocabulary import clean
from hvdtrain.data.prepared import CONTROL
from hvdtrain.data.tree import walk
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, NO_PERMISSION, Failure

TOKENS, TABLE = "Flickr8k.token.txt", "captions.txt"
LISTS = ("Flickr_8k.trainImages.txt", "Flickr_8k.devImages.txt", "Flickr_8k.testImages.txt")  # as data.prepared.PARTS
KARPATHY = {"train": 0, "restval": 0, "val": 1, "test": 2}
SOURCE_BYTES = 1024 * files.MIB  # of a captions file: forty times COCO's
PICTURES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")


@dataclass(kw_only=True)
class Source:
    """The captions and the cut that were found below `root`."""

    root: Path
    file: str = ""
    """The captions, relative to `root`."""
    captions: dict[str, list[str]] = field(default_factory=dict)
    """Picture, relative to `root` -> its usable cleaned sentences, at least one."""
    parts: dict[str, int] | None = None
    """Picture -> 0, 1, 2 for train, validation, test; None if the source has no cut."""
    problems: dict[str, str] = field(default_factory=dict)
    """file:line, or a picture -> why it is left out."""
    crlf_lines: int = 0
    non_ascii_captions: int = 0
    uncut_pictures: int = 0
    """Good ones that the source puts into no part; they are left out."""
    digest: str = ""
    """SHA-256 over the text files, and the pictures' names, sizes and times of change."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A caption as it was read."""

    where: str
    picture: str
    text: str
    part: str | None = None


def find(root: Path, max_words: int) -> Source:
    """Reads what is below `root`; a caption may have `max_words` words.

    Raises Failure: BAD_DATA if none of the formats is there or a whole file is unusable, NO_PERMISSION or IO_ERROR
    if something cannot be read. What is wrong with single captions and pictures is in the result's `problems`.
    """
    if not root.is_dir():
        raise Failure(f"{root} is no folder: give the folder with the pictures and their captions", BAD_DATA)
    try:
        return _Reader(root, max_words).read()
    except OSError as error:
        code = NO_PERMISSION if isinstance(error, PermissionError) else IO_ERROR
        raise Failure(f"{error.filename}: {error.strerror}: everything in it must be readable", code) from None


class _Reader:
    def __init__(self, root: Path, max_words: int) -> None:
        self.root, self.max_words = root, max_words
        self.source = Source(root=root)
        self.digest = hashlib.sha256()
        self.files: dict[str, list[str]] = {}  # name -> the paths, relative to root, of files that have it
        self.refused: dict[str, str] = {}  # picture -> why it need not be opened

    def read(self) -> Source:
        for path, status, reason in walk(self.root, self.root):
            self.files.setdefault(Path(path).name, []).append(path)
            if path.lower().endswith(PICTURES):
                self.digest.update(os.fsencode(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0"))
                if reason := reason or ("a control character in its name" if CONTROL.search(path) else ""):
                    self.refused[path] = reason
        cut = self._captions()
        source = self.source
        if not source.captions:
            place, reason = next(iter(source.problems.items()), (source.file, "no captions in it"))
            raise Failure(f"{self.root / place}: {reason}; nothing below {self.root} is a captioned picture", BAD_DATA)
        source.parts = self._official() if Path(source.file).name == TOKENS else (cut or None)
        if source.parts is not None:
            cut = {picture: part for picture, part in source.parts.items() if part >= 0}
            source.uncut_pictures = len(source.captions.keys() - cut.keys())
            source.captions = {picture: source.captions[picture] for picture in cut}
            source.parts = cut
        source.digest = self.digest.hexdigest()
        return source

    def _captions(self) -> dict[str, int]:
        """Sorts the captions into good ones and problems; returns what the lines tell of parts, -1 for unknown ones."""
        source = self.source
        cut: dict[str, int] = {}
        first: dict[tuple[str, str], str] = {}
        named: set[str] = set()
        for line in self._lines():
            picture, reason = self._picture(line.picture)
            named.update([picture] if picture in self.refused or not reason else self._called(line.picture))
            words = clean(line.text)
            count = len(words.split())
            if not reason and not words:
                reason = "a caption without words"
            elif not reason and count > self.max_words:
                reason = f"{count} words, more than --max-words {self.max_words}"
            elif not reason and (picture, words) in first:
                reason = f"the same caption of the same picture as {first[picture, words]}"
            if reason:
                source.problems[line.where] = reason
                continue
            first[picture, words] = line.where
            source.non_ascii_captions += not line.text.isascii()
            source.captions.setdefault(picture, []).append(words)
            if line.part is not None:
                cut[picture] = KARPATHY.get(line.part, -1)
        for paths in self.files.values():
            for path in paths:
                if path.lower().endswith(PICTURES) and path not in named:
                    source.problems[path] = "a picture without a caption"
        return cut

    def _called(self, name: str) -> list[str]:
        """All files that have the name's last part."""
        return self.files.get(Path(name).name, [])

    def _picture(self, name: str) -> tuple[str, str]:
        """(path relative to root, or the name itself if there is no such picture; why it is unusable, or '')."""
        paths = self._called(name)
        if len(paths) > 1:
            paths = [path for path in paths if f"/{path}".endswith(f"/{name}")]
        if len(paths) > 1:
            return name, f"two pictures have the name {name!r}: {paths[0]} and {paths[1]}"
        if not paths or not paths[0].lower().endswith(PICTURES):
            return name, f"there is no picture {name!r}"
        return paths[0], self.refused.get(paths[0], "")

    def _lines(self) -> Iterator[Line]:
        """The captions, in whichever format they are."""
        for name, read in ((TOKENS, self._tokens), (TABLE, self._table)):
            if self._one(self.files.get(name, [])):
                self.source.file = self.files[name][0]
                return read()
        documents = {name: paths for name, paths in self.files.items() if name.endswith(".json")}
        likely = {name: paths for name, paths in documents.items() if name.startswith(("captions", "dataset"))}
        found = self._one([path for paths in (likely or documents).values() for path in paths])
        if not found:
            raise Failure(
                f"{self.root} holds no captions: looked for {TOKENS}, {TABLE} (header image,caption) and COCO's JSON",
                BAD_DATA,
            )
        self.source.file = found
        return self._document()

    def _one(self, paths: Sequence[str]) -> str:
        """The only path, or ''. Raises Failure if there are several."""
        if len(paths) > 1:
            hint = "leave one there, or give a folder that holds only one"
            raise Failure(f"{self.root} holds captions twice, in {paths[0]} and {paths[1]}: {hint}", BAD_DATA)
        return paths[0] if paths else ""

    def _text(self, file: str) -> Iterator[tuple[str, str]]:
        """(file:line, the line without its end) of each line that is not blank."""
        data = files.read(self.root / file, SOURCE_BYTES)
        self.digest.update(data)
        for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            where = f"{file}:{number}"
            self.source.crlf_lines += raw.endswith(b"\r")
            try:
                line = raw.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                self.source.problems[where] = f"byte {error.start + 1} is no UTF-8"
                continue
            if line.strip():
                yield where, line

    def _tokens(self) -> Iterator[Line]:
        for where, line in self._text(self.source.file):
            key, tab, text = line.partition("\t")
            name, sharp, number = key.rpartition("#")
            if tab and sharp and number.strip().isdecimal() and name:
                yield Line(where=where, picture=name, text=text)
            else:
                self.source.problems[where] = "expected name.jpg#0, a tab and a sentence"

    def _table(self) -> Iterator[Line]:
        lines = self._text(self.source.file)
        _, header = next(lines, ("", ""))
        if [word.strip() for word in header.split(",")] != ["image", "caption"]:
            where = f"{self.root / self.source.file}:1"
            raise Failure(f"{where}: the header is {header[:60]!r}, but must be 'image,caption'", BAD_DATA)
        for where, line in lines:
            # Line by line, so that one quote too many spoils one caption, not all that follow.
            try:
                fields = next(csv.reader([line], strict=True))
            except csv.Error as error:
                self.source.problems[where] = f"its quotes do not match ({error})"
                continue
            if len(fields) == 2 and fields[0]:
                yield Line(where=where, picture=fields[0], text=fields[1])
            else:
                quotes = "put a sentence with commas into double quotes"
                self.source.problems[where] = f"{len(fields)} fields, not picture and caption: {quotes}"

    def _document(self) -> Iterator[Line]:
        file = self.source.file
        data = files.read(self.root / file, SOURCE_BYTES)
        self.digest.update(data)
        try:
            document = files.from_json(data)
            images = document["images"]
            if "annotations" in document:
                yield from self._annotations(images, document["annotations"])
            else:
                yield from self._sentences(images)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            hint = "expected COCO's images[] and annotations[], or images[] with sentences[]"
            raise Failure(f"{self.root / file} is no captions file ({what}): {hint}", BAD_DATA) from None

    def _annotations(self, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> Iterator[Line]:
        # how many pictures have each id; of two with one id nobody knows which a caption is about
        ids = Counter(number for number, _ in {(image["id"], image.get("file_name")) for image in images})
        by_id = {image["id"]: image for image in images if ids[image["id"]] == 1}
        for number, annotation in enumerate(annotations):
            where = f"{self.source.file}:annotations[{number}]"
            image = by_id.get(annotation["image_id"])
            if image is None:
                many = ids[annotation["image_id"]]
                told = f"{many} images have" if many else "no image has"
                self.source.problems[where] = f"{told} the id {annotation['image_id']!r}"
                continue
            yield Line(where=where, picture=_name(image), text=_said(annotation["caption"]), part=image.get("split"))

    def _sentences(self, images: list[dict[str, Any]]) -> Iterator[Line]:
        for number, image in enumerate(images):
            for place, sentence in enumerate(image["sentences"]):
                where = f"{self.source.file}:images[{number}].sentences[{place}]"
                yield Line(where=where, picture=_name(image), text=_said(sentence["raw"]), part=image.get("split"))

    def _official(self) -> dict[str, int] | None:
        """The cut of the three lists."""
        lists = [self._one(self.files.get(name, [])) for name in LISTS]
        if not any(lists):
            return None
        missing = [name for name, path in zip(LISTS, lists, strict=True) if not path]
        if missing:
            raise Failure(f"{self.root} lacks {', '.join(missing)}: all three lists, or none of them", BAD_DATA)
        cut: dict[str, int] = {}
        first: dict[str, str] = {}
        for part, file in enumerate(lists):
            for where, line in self._text(file):
                picture, reason = self._picture(line.strip())
                if picture in cut:
                    self.source.problems[where] = f"{line.strip()} is in {first[picture]} already"
                elif reason or picture not in self.source.captions:
                    self.source.problems[where] = reason or f"{line.strip()} has no caption"
                else:
                    cut[picture], first[picture] = part, where
        return cut


def _said(value: Any) -> str:
    """A document's caption; one that is no text has no words."""
    return value if isinstance(value, str) else ""


def _name(image: dict[str, Any]) -> str:
    """With its folder, if the document tells it."""
    name = str(image["file_name"] if "file_name" in image else image["filename"])
    return f"{image['filepath']}/{name}" if image.get("filepath") else name
