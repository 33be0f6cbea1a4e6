"""Convert sentences to numbers: the definition of a word, and the numbering of words.

A word is a sequence of letters and digits of any script in lower case (NFC). An apostrophe between two of them belongs
to the word. Everything else ends a word and is removed: "A dog's well-known ball." becomes "a dog's well known ball".

0 is padding, 1 starts a sentence, 2 ends it, and 3 stands for words that are too rare. From 4 on, words are sorted by
decreasing count and then alphabetically, so the order of the sentences does not matter.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

from hvdtrain.system.exits import BAD_DATA, Failure

SCHEMA = "hvdtrain.vocabulary/1"
PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIALS = ("<pad>", "<start>", "<end>", "<unknown>")  # cannot collide with words, which contain no brackets


@functools.cache  # it takes 15 ms, and only cleaning needs it
def _word() -> re.Pattern[str]:
    """Letters and digits of any script with their marks, such as Devanagari vowels, which \\w omits; and apostrophes
    between them."""
    marks = "".join(mark for mark in map(chr, range(0x300, 0xFE00)) if unicodedata.category(mark) in ("Mn", "Mc"))
    letters = rf"(?:[^\W_][{marks}]*)+"
    return re.compile(rf"{letters}(?:'{letters})*")


def clean(caption: str) -> str:
    """The caption's words in lower case, joined by single spaces; '' if there are none. Idempotent."""
    text = unicodedata.normalize("NFC", caption.lower()).replace("’", "'")
    return " ".join(_word().findall(text))


class Vocabulary:
    """Words and their numbers: word n is `words[n]`, specials included."""

    def __init__(self, words: Iterable[str]) -> None:
        """`words` without the specials."""
        self.words: tuple[str, ...] = (*SPECIALS, *words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def build(cls, sentences: Iterable[str], min_count: int = 1) -> Self:
        """The vocabulary of all words that occur at least `min_count` times in cleaned `sentences`."""
        counts = Counter(word for sentence in sentences for word in sentence.split())
        often = (word for word, count in counts.items() if count >= min_count)
        return cls(sorted(often, key=lambda word: (-counts[word], word)))

    @classmethod
    def from_json(cls, document: Any, path: object) -> Self:
        """The inverse of `as_json`. Raises Failure (BAD_DATA), naming `path`, for any other document."""
        words = document.get("words") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
        if not isinstance(words, list) or not all(isinstance(word, str) and word.isprintable() for word in words):
            raise Failure(f"{path} is not a vocabulary of schema {SCHEMA}; hint: copy or prepare it again", BAD_DATA)
        if tuple(words[: len(SPECIALS)]) != SPECIALS or len(set(words)) < len(words):
            raise Failure(
                f"{path} is damaged: it must begin with {', '.join(SPECIALS)} and list each word once", BAD_DATA
            )
        if len(words) == len(SPECIALS):
            raise Failure(f"{path} contains no words; hint: prepare it again with a smaller --min-count", BAD_DATA)
        return cls(words[len(SPECIALS) :])

    def as_json(self) -> dict[str, Any]:
        """A JSON-serializable document for `from_json`."""
        return {"schema": SCHEMA, "words": list(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> list[int]:
        """START, the numbers of a cleaned sentence's words, END."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in sentence.split()), END]

    def decode(self, ids: Iterable[int]) -> str:
        """The sentence up to END, without the other special tokens, and with "<unknown>" for unknown words."""
        words = []
        for number in ids:
            if number == END:
                break
            if number not in (PAD, START):
                words.append(self.words[number])
        return " ".join(words)
