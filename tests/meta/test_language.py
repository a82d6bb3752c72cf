"""The library speaks the terms of PyTorch, vLLM and NVIDIA documentation: no private words or numbers.

The rule reads names of files, identifiers split at underscores and capitals, docstrings, comments, messages
and pages. Like every rule of the house it is tested on a planted violation and on the tree.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.our_files import files_below

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
FILES = ("README.md", "CONTRIBUTING.md")

BANNED: dict[str, str] = {
    "attendants?": "other files of a checkpoint",
    "beside": "next to, with, in addition to",
    "b(?:rought|ring|rings|ringing) back": "dequantized",
    "fates?": "action, decision",
    "go(?:es|ing)? on": "continues, resumes",
    "learners?": "QAT configuration",
    "openings?": "unfuse (a module), start (of a text)",
    "originals": "source checkpoint, float model",
    "partners?": "fused layers, layers that share a scheme",
    "st(?:and|ands|ood|anding) for": "mean, represent, replace",
    "told": "reported, printed, passed",
    "turned": "transposed, converted",
    "about nothing": "matches nothing",
    "le(?:ft|ave|aves) alone": "kept",
    "lone": "single, unbatched",
    "whoever": "users, callers",
    "sunk": "moved",
    "what became of": "record, result",
    "wish(?:es)?": "option",
    "yardstick": "reference",
}
"""What is not written -> what is written instead. Patterns match whole words."""

EXCUSED: dict[tuple[str, str], str] = {
    ("src/zeropoint/cli/demonstration.py", "opening"): "a sentence about a surgeon, of the data"
}
"""(path, word) -> why it may stand there. One that excuses nothing is an error."""

NUMBERED = re.compile(
    r"\b(?:bad inputs?|catalogue|(?:case|finding|issue|item)s? [A-Z]?[0-9]+(?: (?:and|to) [0-9]+)?[.:;])"
    r"|(?:\"\"\"|# )[A-Z][0-9]{1,3}(?: and [A-Z]?[0-9]+)?[.:](?![0-9])"
    r"|\"\"\"[0-9]{1,3}(?:(?:,| to| and) [0-9]+)*:"
    r"|\"\"\"[0-9]{1,3}(?:(?:,| to| and) [0-9]+)+\.(?![0-9])",
    re.IGNORECASE,
)
"""An entry, by its number, of a list that readers do not have: words say what the entry says."""

PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def words(text: str) -> str:
    """Return a text with its identifiers split into words."""
    return _CAMEL.sub(" ", text).replace("_", " ")


def violations(name: str, source: str) -> list[tuple[str, str]]:
    """Return ``(place, word)`` for each banned word in the name of a file and in its text."""
    # A phrase may be broken over two lines, with a comment sign in between.
    joined = re.sub(r"\n[ #]*", " ", source)
    return [
        (name, match[0].lower())
        for text in (name, joined)
        for match in PATTERN.finditer(re.sub(" +", " ", words(text)))
    ]


def numbered(name: str, source: str) -> list[str]:
    """Return a violation for each entry of a list outside of the tree that a text names by its number."""
    return [f"{name}: {match[0]}" for match in NUMBERED.finditer(source)]


def tree() -> Iterator[Path]:
    """Yield every Python file and page that the rule is about: ours but this one, which lists the words."""
    for folder in FOLDERS:
        pages = [path for path in files_below(ROOT / folder) if path.suffix in {".py", ".md"}]
        yield from (path for path in pages if path != Path(__file__).resolve())
    yield from (ROOT / name for name in FILES)


@pytest.mark.parametrize(
    "text",
    [
        "# what is told of it",
        "class Learner: ...",
        "def find_partner(): ...",
        "numbers that codes stand\n    # for",
        "OPENING = 1",
    ],
)
def test_a_banned_word_is_found(text: str) -> None:
    assert violations("x.py", text)


@pytest.mark.parametrize("text", ["besides", "stand_by", "the original tensor", "opened files", "foretold"])
def test_other_words_are_not(text: str) -> None:
    assert not violations("x.py", text)


def test_names_of_files_are_read_too() -> None:
    assert violations("src/zeropoint/checkpoint/fates.py", "") == [
        ("src/zeropoint/checkpoint/fates.py", "fates")
    ]


def test_the_tree_uses_the_words_of_the_field() -> None:
    found = {
        violation
        for path in tree()
        for violation in violations(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    }
    assert sorted(found - EXCUSED.keys()) == []
    assert sorted(EXCUSED.keys() - found) == [], "excuses that excuse nothing"


@pytest.mark.parametrize(
    "text",
    [
        '"""Bad inputs 40 and 41."""',
        "# Bad input 5",
        '"""Catalogue cases 1 to 4."""',
        '"""D77: by size."""',
        '"""D77 and F96: EIO."""',
        "# E87.",
        '"""82, 83: index."""',
        '"""66, 67."""',
        "as issue 19.",
    ],
)
def test_an_entry_of_a_list_that_is_not_here_is_found(text: str) -> None:
    assert numbered("x.py", text)


@pytest.mark.parametrize(
    "text",
    [
        '"""127.6 / 64 rounds to 128."""',
        "# S3 refuses a range",
        "(OCP MX 1.0, section 5.3)",
        '"""64 pairs."""',
    ],
)
def test_numbers_of_other_kinds_are_not(text: str) -> None:
    assert not numbered("x.py", text)


def test_the_tree_says_in_words_what_lists_outside_of_it_number() -> None:
    assert [v for path in tree() for v in numbered(str(path), path.read_text(encoding="utf-8"))] == []
