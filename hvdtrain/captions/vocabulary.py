"""Sentences as numbers: what counts as a word, and which number it has.

**A caption is cleaned** before anything else is done with it: lower case, composed characters (NFC), and then only its
words, joined by single spaces. A word is an unbroken row of letters and digits of any script; an apostrophe between
two of them belongs to it, straight or curly, and becomes straight. All else (full stops, quotes, hyphens, symbols)
ends a word and is dropped. No word is dropped for being short: "A dog's well-known ball." is "a dog's well known ball".

**Numbers**: 0 pads, 1 starts a sentence, 2 ends it, 3 stands for every word that was too rare to be learnt; from 4 on
words by falling count, those of equal count by alphabet. So the same sentences give the same numbers in any order.
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
SPECIALS = ("<pad>", "<start>", "<end>", "<unknown>")  # no word looks like these: brackets are dropped


@functools.cache  # only who cleans captions needs it, and it takes 15 ms
def _word() -> re.Pattern[str]:
    """Letters and digits of any script, with their marks (vowels in Devanagari, say, which \\w leaves out), and
    apostrophes between them."""
    marks = "".join(each for each in map(chr, range(0x300, 0xFE00)) if unicodedata.category(each) in ("Mn", "Mc"))
    letters = rf"(?:[^\W_][{marks}]*)+"
    return re.compile(rf"{letters}(?:'{letters})*")


def clean(caption: str) -> str:
    """The caption's words in lower case, joined by single spaces; '' if it has none. Cleaning twice changes nothing."""
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
        """The words that cleaned `sentences` have at least `min_count` times altogether."""
        counts = Counter(word for sentence in sentences for word in sentence.split())
        often = (word for word, count in counts.items() if count >= min_count)
        return cls(sorted(often, key=lambda word: (-counts[word], word)))

    @classmethod
    def from_json(cls, document: Any, path: object) -> Self:
        """What `as_json` gave. Raises Failure (BAD_DATA), which names `path`, if it is anything else."""
        words = document.get("words") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
        if not isinstance(words, list) or not all(isinstance(word, str) and word.isprintable() for word in words):
            raise Failure(f"{path} is no vocabulary of schema {SCHEMA}: copy or prepare it again", BAD_DATA)
        if tuple(words[: len(SPECIALS)]) != SPECIALS or len(set(words)) < len(words):
            raise Failure(
                f"{path} is damaged: it must begin with {', '.join(SPECIALS)} and name each word once", BAD_DATA
            )
        if len(words) == len(SPECIALS):
            raise Failure(f"{path} holds no words: prepare it again with a smaller --min-count", BAD_DATA)
        return cls(words[len(SPECIALS) :])

    def as_json(self) -> dict[str, Any]:
        """A document fit for JSON, for `from_json`."""
        return {"schema": SCHEMA, "words": list(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> list[int]:
        """START, the numbers of a cleaned sentence's words, END."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in sentence.split()), END]

    def decode(self, ids: Iterable[int]) -> str:
        """The sentence up to END, without the other specials, but with "<unknown>" where a word is not known."""
        words = []
        for number in ids:
            if number == END:
                break
            if number not in (PAD, START):
                words.append(self.words[number])
        return " ".join(words)
