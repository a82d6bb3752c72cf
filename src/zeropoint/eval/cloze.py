"""Cloze items: choices between a written sentence and an altered one.

In a sentence one content word is replaced by another word that has the same tag somewhere in the text; a
model chooses the sentence that it finds likelier. Tagged text is in the Brown corpus's format: words as
``word/tag``, a sentence a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ..checkpoint.model.tokens import read_text
from ..checkpoint.read.storage import shown
from ..errors import CalibrationError

CONTENT_TAGS = frozenset(("jj", "nn", "nns", "rb", "vb", "vbd", "vbg", "vbn"))
"""Tags of the Brown corpus for adjectives, nouns, adverbs and verbs; names and numbers are not replaced."""
_SHORTEST, _LONGEST = 8, 24
"""Words of a sentence: so many that they say what fits, so few that many sentences are quick."""
_WORD = re.compile(r"[a-z]{3,}", re.ASCII)
_SEED = 0
_BYTES = 64 << 20
"""Of text that are read: the Brown corpus has a sixth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClozeItem:
    """Two sentences that differ in a word.

    right: the one that stands in the text. wrong: the other one.
    """

    right: str
    wrong: str


Tagged = Sequence[tuple[str, str]]
"""A sentence: words with their tags."""


def tagged_sentences(text: str) -> Iterator[Tagged]:
    """Yield tagged sentences: words with their tags, in lower case.

    text: words as ``word/tag``, a sentence a line; lines of anything else are left out.

    >>> list(tagged_sentences("The/at dog/nn barked/vbd ./."))
    [[('The', 'at'), ('dog', 'nn'), ('barked', 'vbd'), ('.', '.')]]
    """
    for line in text.splitlines():
        parts = [word.rpartition("/") for word in line.split()]
        if parts and all(word and tag for word, _, tag in parts):
            yield [(word, tag.lower()) for word, _, tag in parts]


def cloze_items(path: Path | str, most: int) -> list[ClozeItem]:
    """Return cloze items of a tagged file, deterministically.

    path: of the file. most: how many at most; they are spread over the file. Raises CalibrationError for a
    file that cannot be read, and one without sentences to make items of.
    """
    text = read_text(
        path, what="tagged text", remedy="give words as word/tag, a sentence a line", most=_BYTES
    )
    sentences = list(tagged_sentences(text))
    words: dict[str, list[str]] = {}
    for sentence in sentences:
        for word, tag in sentence:
            if tag in CONTENT_TAGS and _WORD.fullmatch(word):
                words.setdefault(tag, []).append(word)
    known = {tag: frozenset(found) for tag, found in words.items()}
    usable = [s for s in sentences if _SHORTEST <= len(s) <= _LONGEST and _places(s, known)]
    if not usable:
        raise CalibrationError(
            f"{shown(Path(path))} has no sentence of {_SHORTEST} to {_LONGEST} words as word/tag, with tags "
            "of the Brown corpus; give one sentence a line, such as 'The/at dog/nn barked/vbd ./.'"
        )
    step = max(1, len(usable) // most)
    random = Random(_SEED)
    return [_item(sentence, _places(sentence, known), words, random) for sentence in usable[::step][:most]]


def _places(sentence: Tagged, known: Mapping[str, frozenset[str]]) -> list[int]:
    """Return replaceable places: lower-case content words but the first.

    known: the words of each tag, of which one must be no word of the sentence.
    """
    own = {word for word, _ in sentence}
    return [
        at
        for at, (word, tag) in enumerate(sentence)
        if at and tag in CONTENT_TAGS and _WORD.fullmatch(word) and known[tag] - own
    ]


def _item(
    sentence: Tagged, places: Sequence[int], words: Mapping[str, Sequence[str]], random: Random
) -> ClozeItem:
    """Return an item; replacements are drawn by frequency, against rarity cues."""
    at, own = random.choice(places), {word for word, _ in sentence}
    others = [word for word in words[sentence[at][1]] if word not in own]
    plain = [word for word, _ in sentence]
    wrong = [*plain[:at], random.choice(others), *plain[at + 1 :]]
    return ClozeItem(right=joined(plain), wrong=joined(wrong))


def joined(words: Sequence[str]) -> str:
    """Return words and marks as they are written.

    words: of a sentence, marks apart; quotation marks as ``` `` ``` and ``''``.

    >>> joined(["``", "No", "''", ",", "he", "said", "."])
    '"No", he said.'
    """
    text = " ".join(words)
    text = re.sub(r"`` ?", '"', text)
    text = re.sub(r" ?''", '"', text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)
