"""A second of fuzzing by commands; tests/hostile/fuzz_commands.py does it for as long as one likes."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hostile import fuzz_commands
from tests.hostile.command_subjects import Subject, Subjects
from tests.hostile.fuzz_commands import fuzz
from tests.hostile.mutations import mutate

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return Subjects(tmp_path_factory.mktemp("subjects"), ["compressed-tensors"]).found


def test_commands_finish_or_refuse_in_a_line_whatever_a_file_holds(
    subjects: list[Subject], tmp_path: Path
) -> None:
    for subject in subjects:
        tally = fuzz(subject, random.Random(subject.name), 2, tmp_path)
        assert not tally.failures, (subject.name, tally.failures)
        assert tally.counts.total() == 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_commands_stand_many_more_files(tmp_path: Path, part: int) -> None:
    found = Subjects(tmp_path / "subjects").found
    names = {subject.name.partition(",")[0] for subject in found}
    assert len(found) >= 40
    assert names >= {
        "config.json", "tokenizer.json", "tokenizer.model", "GGUF", "ONNX", "imatrix", "recipe", "plan",
        "search state", "cache of eval", "text", "token ids", "cloze", "compressed-tensors", "gptq", "awq",
    }  # fmt: skip
    for subject in found[part::8]:
        tally = fuzz(subject, random.Random(21), 40, tmp_path / "keep")
        assert not tally.failures, (subject.name, tally.failures)


@pytest.mark.parametrize("failure", [KeyError("a"), RuntimeError("b\nc")])
def test_a_planted_failure_is_found_and_its_file_kept(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control."""

    def fail(words: list[str]) -> int:
        raise failure

    monkeypatch.setattr(fuzz_commands, "main", fail)
    (tmp_path / "a").write_bytes(b"abc" * 9)
    subject = Subject(name="planted", folder=tmp_path, file="a", commands=[("inspect", "a")], mutate=mutate)
    with pytest.raises(type(failure)):
        fuzz(subject, random.Random(1), 5, tmp_path / "keep")
    assert len(list((tmp_path / "keep").iterdir())) == 1
    assert (tmp_path / "a").read_bytes() == b"abc" * 9
    assert type(failure).__name__ in capsys.readouterr().err


def test_a_command_that_does_not_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_commands, "CPU_SECONDS", 0.05)

    def run_on(words: list[str]) -> int:
        while words:
            pass
        return 0

    monkeypatch.setattr(fuzz_commands, "main", run_on)
    (tmp_path / "a").write_bytes(b"abc" * 9)
    subject = Subject(name="planted", folder=tmp_path, file="a", commands=[("inspect", "a")], mutate=mutate)
    assert fuzz(subject, random.Random(1), 1, tmp_path / "keep").failures == {"it does not end": 1}


def test_a_run_that_is_interrupted_counts_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter([0] * 25 + [130])
    subject = Subject(name="planted", folder=tmp_path, file="a", commands=[("inspect", "a")], mutate=mutate)
    (tmp_path / "a").write_bytes(b"abc" * 9)
    monkeypatch.setattr(fuzz_commands, "main", lambda _: next(statuses))
    monkeypatch.setattr(fuzz_commands, "Subjects", lambda _: SimpleNamespace(found=[subject]))
    tallies = fuzz_commands.run(100, 1, None, tmp_path / "keep")
    assert tallies["planted"].counts == {"done": 25}
    assert not (tmp_path / "keep").exists()
