"""Every hostile directory: what is said of it, and what each command does with it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.hostile.case import Case
from tests.hostile.directories import DIRECTORIES
from tests.hostile.files import FILES
from tests.hostile.gguf_files import GGUF_FILES, GOOD_GGUF
from tests.hostile.layouts import LAYOUT_CASES, LAYOUTS
from tests.hostile.quantized import CONFIG, QUANTIZED, WEIGHTS, _case
from tests.hostile.test_files import said

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, ZeropointError


@pytest.mark.parametrize("case", DIRECTORIES, ids=str)
def test_a_directory_is_accepted_or_refused_in_the_words_that_matter(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    if case.refusal is None:
        source = open_source(path)
        assert source.entries
        assert all(note.isprintable() for note in source.notes)
        if source.config is None and Path("config.json") in source.companions:
            # It can be looked at, but the result could not say what is quantized.
            with pytest.raises(CheckpointError, match="is not a valid configuration"):
                make_plan(source, "int8:channel")
        else:
            assert make_plan(source, "int8:channel").weights
        return
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    assert said(case.refusal, str(caught.value)), str(caught.value)
    assert str(caught.value).isprintable()
    for command in (inspect_checkpoint, verify):
        with pytest.raises(ZeropointError):
            command(path)


@pytest.mark.parametrize("case", [*QUANTIZED, *LAYOUT_CASES, *GGUF_FILES], ids=str)
def test_a_wrong_configuration_of_quantized_weights_is_a_problem(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    assert case.refusal is not None
    with pytest.raises(ZeropointError) as caught:
        verify(path).require()
    message = str(caught.value)
    assert said(case.refusal, message), message
    assert message.isprintable()
    assert len(message) < 2000
    # Values of tensors are what verify looks at.
    assert problems_of(path) or "tensors" in case.name


def problems_of(path: Path) -> Sequence[str]:
    """Return what ``inspect`` says is wrong, also of a file whose head cannot be read."""
    try:
        return inspect_checkpoint(path).problems
    except CheckpointError as error:
        return (str(error),)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_checkpoint_that_the_wrong_ones_change_is_right(name: str, tmp_path: Path) -> None:
    path = Case(topic="quantized", name=name, content=LAYOUTS[name].files(), refusal=None).write(tmp_path)
    assert verify(path).problems == ()
    assert verify(path).values > 0


def test_the_gguf_file_that_the_wrong_ones_change_is_right(tmp_path: Path) -> None:
    path = Case(topic="quantized", name="GGUF", content={"model.gguf": GOOD_GGUF}, refusal=None).write(
        tmp_path
    )
    assert (verify(path).problems, verify(path).values) == ((), 64)


def test_the_configuration_that_the_wrong_ones_change_is_right(tmp_path: Path) -> None:
    verification = verify(_case("right", "", CONFIG, WEIGHTS).write(tmp_path))
    assert verification.problems == ()
    assert verification.values == 8 * 32


def test_the_corpus_is_large_and_each_case_its_own() -> None:
    corpus = (*FILES, *DIRECTORIES, *QUANTIZED, *LAYOUT_CASES, *GGUF_FILES)
    assert len(corpus) == len({str(case) for case in corpus})
    assert len(corpus) >= 600
    assert len(QUANTIZED) + len(LAYOUT_CASES) + len(GGUF_FILES) >= 300
    assert {case.topic for case in DIRECTORIES} == {
        "path", "shards", "twice", "index", "count", "indexes", "config",
        "name", "pickle", "other",
    }  # fmt: skip
