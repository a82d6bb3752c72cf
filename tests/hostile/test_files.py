"""Every hostile file: what is said of it, whether safetensors says the same, and what each command does."""

from pathlib import Path

import pytest
import safetensors
from tests.hostile.case import Case
from tests.hostile.files import DOCUMENTED, FILES

from zeropoint.checkpoint.read.safetensors_file import parse_header
from zeropoint.errors import CheckpointError

# The library maps the whole file, and whether a terabyte can be mapped depends on the machine.
COMPARED = [case for case in FILES if case.topic not in ("sparse", "path")]


@pytest.mark.parametrize("case", FILES, ids=str)
def test_a_file_is_accepted_or_refused_in_the_words_that_matter(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    if case.refusal is None:
        assert parse_header(path).stamp.size == path.stat().st_size
        return
    with pytest.raises(CheckpointError) as caught:
        parse_header(path)
    message = str(caught.value)
    assert said(case.refusal, message), message
    assert path.name in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 2000


def said(words: str, message: str) -> bool:
    """Whether a message has the words, or any of several that a bar divides."""
    return any(part in message for part in words.split("|"))


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_safetensors_decides_alike_but_for_the_documented_list(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    try:
        with safetensors.safe_open(path, "pt") as opened:
            theirs = set(opened.keys())
    except safetensors.SafetensorError:
        theirs = None
    if case.library is not None:
        assert case.library in DOCUMENTED
        assert case.refusal is not None
        assert theirs is not None, "the library has come to refuse it too: the case is documented no more"
    else:
        assert (theirs is None) == (case.refusal is not None)
    if case.refusal is None:
        assert {entry.name for entry in parse_header(path).entries} == theirs


def test_topic_and_name_make_each_case_unique() -> None:
    assert len({str(case) for case in FILES}) == len(FILES)
    assert {case.topic for case in FILES} == {
        "short", "length", "text", "spaces", "duplicate", "metadata", "keys", "offsets",
        "shape", "size", "dtype", "name", "many", "sparse", "booleans", "pickle", "GGUF",
        "other", "path",
    }  # fmt: skip
