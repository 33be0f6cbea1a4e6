"""The default captioning data: 5,000 drawn scenes with five true sentences each, no download.

A scene is 64x64 RGB: a dark, slightly noisy background with two groups, side by side or one above the other. A group
contains one, two or three equal shapes: small or large, of one of six colours and four kinds. No scene occurs twice, so
a model can score in the test split only by seeing. The five sentences give the same facts in five orders. Nearly every
word is a fact, so a model that knows the language but not the image scores low.

Everything follows from one fixed seed and is drawn with NumPy alone: the same bytes on every host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.captions.dataset import CaptionDataset, assemble
from hvdtrain.captions.vocabulary import Vocabulary

SEED = 20220
SIZE = 64
COUNTS = (4000, 500, 500)  # scenes in train, validation and test
NUMBERS = ("one", "two", "three", "four", "five", "six")
SIZES = {"small": 5, "large": 8}  # half the width in pixels
COLOURS = {
    "red": (225, 45, 40),
    "green": (40, 175, 60),
    "blue": (50, 90, 235),
    "yellow": (235, 220, 50),
    "purple": (165, 60, 195),
    "white": (240, 240, 240),
}
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
GROUPS = 3 * len(SIZES) * len(COLOURS) * len(SHAPES)
ALONG = {1: (32,), 2: (20, 44), 3: (11, 32, 53)}  # centres of a group's shapes along its long side, in pixels
ACROSS = (16, 48)  # centres of the two groups
JITTER = (1, 3)  # largest displacement of a shape along and across, in pixels; three large ones never touch
GROUND, NOISE = 50, 12  # brightest gray of the background, and amplitude of its noise


@dataclass(frozen=True)
class Group:
    """Equal shapes next to each other."""

    shape: str
    colour: str
    size: str
    count: int

    @property
    def noun(self) -> str:
        """The name of the shape, in the plural if there are several."""
        return self.shape if self.count == 1 else SHAPES[self.shape]

    @property
    def number(self) -> str:
        return NUMBERS[self.count - 1]

    @property
    def whole(self) -> str:
        """All four facts: 'two small red circles'."""
        return f"{self.number} {self.size} {self.colour} {self.noun}"


@dataclass(frozen=True)
class Scene:
    """Two groups: the first is left of the second, or above it."""

    first: Group
    second: Group
    stacked: bool

    @classmethod
    def of(cls, number: int) -> Scene:
        """Scene `number` of the 2 * GROUPS^2 different scenes."""
        facts = (tuple(SHAPES), tuple(COLOURS), tuple(SIZES), (1, 2, 3))
        sizes = tuple(map(len, facts))
        stacked, *chosen = map(int, np.unravel_index(number, (2, *sizes, *sizes)))
        values: list[Any] = [fact[place] for fact, place in zip(2 * facts, chosen, strict=True)]
        return cls(Group(*values[:4]), Group(*values[4:]), bool(stacked))

    @property
    def sentences(self) -> tuple[str, ...]:
        """Five true sentences, each with its own order of facts."""
        first, second = self.first, self.second
        before, after = ("above", "below") if self.stacked else ("left of", "right of")
        here, there = ("at the top", "at the bottom") if self.stacked else ("on the left", "on the right")
        total = NUMBERS[first.count + second.count - 1]
        return (
            f"{first.whole} {before} {second.whole}",
            f"{second.whole} {after} {first.whole}",
            f"{here} {first.whole} {there} {second.whole}",
            f"{first.size} {first.noun} in {first.colour} and {second.size} {second.noun} in {second.colour}",
            f"{total} shapes with {first.number} {first.colour} {first.noun}"
            f" {'over' if self.stacked else 'beside'} {second.number} {second.colour} {second.noun}",
        )


def load() -> CaptionDataset:
    """The data set: images uint8 (N, 64, 64, 3), 4,000 for training, 500 for validation, 500 for testing."""
    stream = np.random.Generator(np.random.PCG64(SEED))
    numbers = stream.choice(2 * GROUPS**2, size=sum(COUNTS), replace=False)
    scenes = [Scene.of(int(number)) for number in numbers]
    images = draw(scenes, stream)
    references = [scene.sentences for scene in scenes]
    digest = hashlib.sha256(images.data)
    digest.update(repr((COUNTS, references)).encode())
    return assemble(
        name="shapes",
        vocabulary=Vocabulary.build(sentence for sentences in references[: COUNTS[0]] for sentence in sentences),
        images=images,
        names=[f"scene-{number}" for number in numbers],
        references=references,
        counts=COUNTS,
        fingerprint=digest.hexdigest(),
    )


def draw(scenes: list[Scene], stream: np.random.Generator) -> NDArray[np.uint8]:
    """Images of the scenes, uint8 (N, 64, 64, 3); background, noise and displacements come from `stream`."""
    gray = stream.integers(GROUND, size=(len(scenes), 1, 1, 1), dtype=np.uint8)
    images = stream.integers(NOISE, size=(len(scenes), SIZE, SIZE, 3), dtype=np.uint8) + gray
    reach = np.array(JITTER)
    moved = stream.integers(-reach, reach + 1, size=(len(scenes), 2, 3, 2)).tolist()
    stamps = {(shape, size): _stamp(shape, SIZES[size]) for shape in SHAPES for size in SIZES}
    for image, scene, moves in zip(images, scenes, moved, strict=True):
        for group, across, steps in zip((scene.first, scene.second), ACROSS, moves, strict=True):
            half, stamp = SIZES[group.size], stamps[group.shape, group.size]
            for along, (on, aside) in zip(ALONG[group.count], steps, strict=False):
                y, x = (across + aside, along + on) if scene.stacked else (along + on, across + aside)
                image[y - half : y + half + 1, x - half : x + half + 1][stamp] = COLOURS[group.colour]
    return images


def _stamp(shape: str, half: int) -> NDArray[np.bool_]:
    """The pixels of a shape in its square of 2 half + 1 pixels per side."""
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    inside: NDArray[np.bool_] = {
        "circle": x**2 + y**2 <= (half + 0.4) ** 2,
        "square": np.ones_like(x, bool),
        "triangle": 2 * np.abs(x) <= y + half + 1,
        "cross": np.minimum(np.abs(x), np.abs(y)) <= half // 4,
    }[shape]
    return inside
