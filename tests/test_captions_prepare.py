"""`hvdtrain data captions`: from the formats as they are distributed to a prepared folder, good inputs and bad."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import fails
from PIL import Image
from sklearn.datasets import load_sample_images

from hvdtrain.captions.dataset import CaptionDataset
from hvdtrain.captions.prepare import CaptionsConfig, prepare
from hvdtrain.captions.prepared import load, open_captions
from hvdtrain.system.exits import BAD_DATA

PHOTOS = load_sample_images().images
LISTS = ("Flickr_8k.trainImages.txt", "Flickr_8k.devImages.txt", "Flickr_8k.testImages.txt")
TEXTS = ("A {} in the sun .", 'The "{}", seen from afar', "{} , and nothing else")

Told = dict[str, list[str]]


def told(count: int = 12) -> Told:
    """Images with three captions each."""
    things = ("temple", "flower", "caf\u00e9")
    return {f"p{n:02}.jpg": [text.format(f"{things[n % 3]} {n}") for text in TEXTS] for n in range(count)}


def write_images(folder: Path, names: list[str]) -> None:
    """Real photographs, a different part of them for each name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        y, x = 11 * number % 360, 17 * number % 550
        Image.fromarray(PHOTOS[number % 2][y : y + 60, x : x + 80]).save(folder / name, quality=90)


def flickr(root: Path, captions: Told) -> Path:
    """The two folders of the original archives."""
    write_images(root / "Flicker8k_Dataset", list(captions))
    lines = [f"{name}#{n}\t{text}\n" for name, texts in captions.items() for n, text in enumerate(texts)]
    (root / "Flickr8k_text").mkdir()
    (root / "Flickr8k_text" / "Flickr8k.token.txt").write_text("".join(lines))
    return root


def table(root: Path, captions: Told) -> Path:
    """The layout of later copies."""
    write_images(root / "Images", list(captions))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "caption"])
    writer.writerows([name, caption] for name, texts in captions.items() for caption in texts)
    (root / "captions.txt").write_text(text.getvalue())
    return root


def kaggle(root: Path, captions: Told) -> Path:
    """Flickr30k's table, in which a sentence may have quotation marks and a comma."""
    write_images(root / "flickr30k_images", list(captions))
    rows = [f"{name}| {n}| {text}\n" for name, texts in captions.items() for n, text in enumerate(texts)]
    (root / "results.csv").write_text("".join(["image_name| comment_number| comment\n", *rows]))
    return root


def coco(root: Path, captions: Told) -> Path:
    """COCO's two folders and files, with other annotations beside them."""
    (root / "annotations").mkdir(parents=True)
    (root / "annotations" / "instances_val2017.json").write_text("{}")
    names = list(captions)
    for part, chosen in (("train2017", names[:9]), ("val2017", names[9:])):
        write_images(root / part, chosen)
        images = [{"id": 100 + number, "file_name": name, "width": 80} for number, name in enumerate(chosen)]
        told_of = [{"id": 1, "image_id": e["id"], "caption": text} for e in images for text in captions[e["file_name"]]]
        document = {"info": {}, "images": images, "annotations": told_of}
        (root / "annotations" / f"captions_{part}.json").write_text(json.dumps(document))
    return root


def config(tmp_path: Path, **changes: Any) -> CaptionsConfig:
    settings = {"source": str(tmp_path / "in"), "destination": str(tmp_path / "out"), "size": "20x16", "min_count": 1}
    return CaptionsConfig(**{**settings, "split": "4/1/1", "workers": 1, **changes})


def references(dataset: CaptionDataset) -> dict[str, tuple[str, ...]]:
    """By the image's file name."""
    parts = (dataset.train, dataset.validation, dataset.test)
    return {Path(n).name: r for part in parts for n, r in zip(part.names, part.references, strict=True)}


# Good inputs.


@pytest.mark.parametrize("make", [flickr, table, kaggle, coco])
def test_every_format_gives_the_same_captions(tmp_path: Path, make: Callable[[Path, Told], Path]) -> None:
    captions = told()
    make(tmp_path / "in", captions)
    made = prepare(config(tmp_path))
    dataset = open_captions(tmp_path / "out")
    assert references(dataset)["p05.jpg"] == (
        "a caf\u00e9 5 in the sun",
        "the caf\u00e9 5 seen from afar",
        "caf\u00e9 5 and nothing else",
    )
    assert references(dataset).keys() == captions.keys()
    assert made["counts"] == [8, 2, 2] and made["bad_samples"] == []
    assert made["source"]["non_ascii_captions"] == 12
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [24, 6, 6]


def test_the_vocabulary_is_of_training_captions_that_are_frequent(tmp_path: Path) -> None:
    flickr(tmp_path / "in", told())
    made = prepare(config(tmp_path, min_count=5))
    dataset = open_captions(tmp_path / "out")
    words = [word for five in dataset.train.references for sentence in five for word in sentence.split()]
    assert set(dataset.vocabulary.words[4:]) == {word for word in words if words.count(word) >= 5}
    rare = [word not in dataset.vocabulary.words for word in words]
    assert made["statistics"]["train"]["unknown_words_share"] == pytest.approx(np.mean(rare))
    assert made["vocabulary"] == len(dataset.vocabulary)


def test_the_official_lists_decide(tmp_path: Path) -> None:
    captions = told()
    source = flickr(tmp_path / "in", captions)
    names = sorted(captions)
    cut = (names[5:10], names[:2], names[2:4])  # 4, 10 and 11 are in no list
    for file, part in zip(LISTS, cut, strict=True):
        (source / "Flickr8k_text" / file).write_text("\r\n".join(part) + "\r\n")
    made = prepare(config(tmp_path))
    dataset = open_captions(tmp_path / "out")
    for part, expected in zip((dataset.train, dataset.validation, dataset.test), cut, strict=True):
        assert sorted(Path(name).name for name in part.names) == expected
    assert made["split"] == "the source's" and made["source"]["images_in_no_part"] == 3
    assert made["bad_samples"] == [] and made["source"]["crlf_lines"] == 9


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    flickr(tmp_path / "in", told(30))
    cuts = {}
    for name, changes in {"a": {}, "b": {"workers": 2}, "c": {"seed": 1}}.items():
        prepare(config(tmp_path, destination=str(tmp_path / name), **changes))
        cuts[name] = open_captions(tmp_path / name)
    a, b, c = cuts["a"], cuts["b"], cuts["c"]
    assert a.fingerprint == b.fingerprint != c.fingerprint and a.train.names != c.train.names
    assert [len(part.names) for part in (c.train, c.validation, c.test)] == [20, 5, 5]
    names = [name for part in (a.train, a.validation, a.test) for name in part.names]
    assert len(set(names)) == 30, "each image, with all its captions, is in one part"


# Bad samples.


def swap(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old.encode(), new.encode())


A_LINE = 'p03.jpg#1\tThe "temple 3", seen from afar'
A_ROW = 'p03.jpg,"The ""temple 3"", seen from afar"'
# Format, change of its text, place in the error, reason in the error.
BAD: dict[str, tuple[Callable[[Path, Told], Path], Callable[[bytes], bytes], str, str]] = {
    "no image": (flickr, swap("p03.jpg#1", "p03.jpg.1#1"), "token.txt:11", "there is no image 'p03.jpg.1'"),
    "outside": (flickr, swap("p03.jpg#1", "../../x.jpg#1"), "token.txt:11", "there is no image '../../x.jpg'"),
    "empty": (flickr, swap(A_LINE, "p03.jpg#1\t \u201c...\u201d !"), "token.txt:11", "without words"),
    "long": (flickr, swap(A_LINE, A_LINE + " a b" * 15), "token.txt:11", "36 words, more than --max-words 34"),
    "duplicate": (flickr, swap(A_LINE, "p03.jpg#1\ta TEMPLE 3 in the sun"), "token.txt:11",
                  "the same caption of the same image as Flickr8k_text/Flickr8k.token.txt:10"),
    "spaces for tab": (flickr, swap("p03.jpg#1\t", "p03.jpg#1    "), "token.txt:11", "expected name.jpg#0, a tab"),
    "latin-1": (flickr, lambda text: text.replace(A_LINE.encode(), b"p03.jpg#1\tcaf\xe9"), "token.txt:11", "byte 14"),
    "comma": (table, swap(A_ROW, "p03.jpg,The temple, seen"), "captions.txt:12", "3 fields"),
    "open quote": (table, swap(A_ROW, 'p03.jpg,"The temple'), "captions.txt:12", "unbalanced quotes"),
}  # fmt: skip


def spoil(source: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the text of the captions, and checks that it changed."""
    found = [*source.rglob("*.token.txt"), *source.rglob("captions.*")]
    text = found[0].read_bytes()
    found[0].write_bytes(change(text))
    assert found[0].read_bytes() != text


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_caption_is_an_error_or_skipped(tmp_path: Path, kind: str) -> None:
    make, change, place, reason = BAD[kind]
    source = make(tmp_path / "in", told())
    spoil(source, change)
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, str(source), place, reason, "--on-bad-sample skip")
    assert not (tmp_path / "out").exists()
    made = prepare(config(tmp_path, on_bad_sample="skip"))
    assert len(made["bad_samples"]) == 1 and reason in made["bad_samples"][0]["reason"]
    assert made["bad_samples"][0]["file"].endswith(place)
    left = references(open_captions(tmp_path / "out"))
    assert left["p03.jpg"] == ("a temple 3 in the sun", "temple 3 and nothing else")
    assert all(len(sentences) == 3 for name, sentences in left.items() if name != "p03.jpg")
    assert len(left) == 12


def test_crlf_byte_order_mark_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    source = table(tmp_path / "in", told())
    plain = prepare(config(tmp_path))
    spoil(source, lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n") + b"\r\n \r\n")
    other = prepare(config(tmp_path, destination=str(tmp_path / "other")))
    assert other["source"]["crlf_lines"] > 36 and plain["source"]["crlf_lines"] == 0
    assert plain["files"] == other["files"]


BAD_IMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "there is no image 'p03.jpg'"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:900]), "truncated"),
    "link": (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "a link that leaves the tree"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_the_captions_of_a_bad_image_are_skipped(tmp_path: Path, kind: str) -> None:
    break_it, reason = BAD_IMAGES[kind]
    source = flickr(tmp_path / "in", told())
    break_it(source / "Flicker8k_Dataset" / "p03.jpg")
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, reason, "--on-bad-sample skip")
    made = prepare(config(tmp_path, on_bad_sample="skip"))
    assert all(reason in bad["reason"] for bad in made["bad_samples"]) and made["bad_samples"]
    dataset = open_captions(tmp_path / "out")
    assert references(dataset).keys() == told().keys() - {"p03.jpg"}
    by_hand = {name: source / name for name in dataset.train.names}
    for name, row in zip(dataset.train.names, dataset.train.inputs, strict=True):
        image = Image.open(by_hand[name]).resize((20, 16), Image.Resampling.BILINEAR)
        assert np.array_equal(row, np.asarray(image)), "rows after the skipped one still match their names"


def test_an_image_without_a_caption_is_bad(tmp_path: Path) -> None:
    source = table(tmp_path / "in", told())
    write_images(source / "Images", ["more.jpg"])
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "Images/more.jpg: an image without a caption")
    assert len(prepare(config(tmp_path, on_bad_sample="skip"))["bad_samples"]) == 1


def test_two_images_of_the_same_name_need_a_folder(tmp_path: Path) -> None:
    source = table(tmp_path / "in", told())
    write_images(source / "Images" / "more", ["p03.jpg"])
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "two images have the name 'p03.jpg'")
    spoil(source, swap("p03.jpg", "more/p03.jpg"))
    made = prepare(config(tmp_path, on_bad_sample="skip"))
    assert [bad["file"] for bad in made["bad_samples"]] == ["Images/p03.jpg"], "its captions belong to the other image"


def test_bad_lines_in_the_official_lists(tmp_path: Path) -> None:
    captions = told()
    source = flickr(tmp_path / "in", captions)
    names = sorted(captions)
    for file, part in zip(LISTS, (names[:8], [names[3], *names[8:10]], ["gone.jpg", *names[10:]]), strict=True):
        (source / file).write_text("\n".join(part))
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "devImages.txt:1: p03.jpg is in Flickr_8k.trainImages.txt:4")
    made = prepare(config(tmp_path, on_bad_sample="skip"))
    assert [bad["file"] for bad in made["bad_samples"]] == [f"{LISTS[1]}:1", f"{LISTS[2]}:1"]
    assert made["counts"] == [8, 2, 2], "an image in two lists belongs to the first"
    (source / LISTS[1]).unlink()
    fails(lambda: prepare(replace(config(tmp_path), destination="x")), BAD_DATA, "has no Flickr_8k.devImages.txt")


# --- unsuitable sources and options -------------------------------------------------------------------------------


def test_a_folder_without_captions_is_an_error_with_the_known_formats(tmp_path: Path) -> None:
    write_images(tmp_path / "in", ["p.jpg"])
    words = ("contains no captions", "Flickr8k.token.txt", "captions.txt")
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, str(tmp_path / "in"), *words)
    fails(lambda: prepare(config(tmp_path, source="nowhere")), BAD_DATA, "nowhere is not a folder")


def test_an_unusable_source_is_an_error(tmp_path: Path) -> None:
    source = table(tmp_path / "in", told())
    text = (source / "captions.txt").read_text()
    (source / "captions.txt").write_text(text.replace("image,caption", "photo,caption"))
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "captions.txt:1: the header is 'photo,caption'")
    (source / "captions.txt").write_text("image,caption\nnone.jpg,a dog\n")
    fails(lambda: prepare(config(tmp_path, on_bad_sample="skip")), BAD_DATA, "captions.txt:2: there is no image")
    (source / "captions.txt").write_text("image,caption\np01.jpg,a dog\n")
    skip = config(tmp_path, on_bad_sample="skip")
    fails(lambda: prepare(skip), BAD_DATA, "no images for validation")
    coco(tmp_path / "coco", told())
    (tmp_path / "coco" / "annotations" / "captions_val2017.json").write_text('{"images": [{"id": "a"}]}')
    damaged = config(tmp_path, source=str(tmp_path / "coco"))
    fails(lambda: prepare(damaged), BAD_DATA, "captions_val2017.json is not in COCO's form")


# --- the prepared folder, and the cache ---------------------------------------------------------------------------


def test_a_damaged_folder_is_an_error(tmp_path: Path) -> None:
    flickr(tmp_path / "in", told())
    prepare(config(tmp_path))
    for name, change, words in (
        ("images.npy", lambda data: data[:-1], "images.npy has"),
        ("captions.json", lambda data: data.replace(b"temple", b"tomato", 1), "captions.json is damaged"),
        ("vocabulary.json", lambda data: data + b" ", "vocabulary.json is damaged"),
        ("index.json", lambda data: data.replace(b"captions/1", b"captions/9", 1), "hvdtrain.captions/9"),
        ("index.json", lambda data: data.replace(b"  8,", b"  9,", 1), "its counts do not match"),
        ("index.json", None, "index.json does not exist"),
    ):
        path = tmp_path / "out" / name
        data = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(data))
            assert path.read_bytes() != data
        fails(lambda: load(str(tmp_path / "out")), BAD_DATA, words)
        path.write_bytes(data)
    for name, change, words in (
        ("captions.json", lambda document: document["images"][0].update(captions="abc"), "is damaged ('abc'"),
        ("captions.json", lambda document: document["images"][0].update(captions=[]), "an image without a caption"),
        ("captions.json", lambda document: document["images"][0].update(captions=["\x1b[2J"]), r"\x1b[2J"),
        ("vocabulary.json", lambda document: document.update(words=document["words"][:4]), "contains no words"),
    ):
        rejects_document(tmp_path / "out", name, change, words)


def rejects_document(folder: Path, name: str, change: Callable[[Any], object], words: str) -> None:
    """A changed document whose digest matches the index is an error, too."""
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    document = json.loads(before[name])
    change(document)
    (folder / name).write_text(json.dumps(document))
    index = json.loads(before["index.json"])
    index["files"][name]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    fails(lambda: load(str(folder)), BAD_DATA, words)
    for file, content in before.items():
        (folder / file).write_bytes(content)
