"""A journal that is cut, flipped, forged or from elsewhere: believed only as far as bytes prove it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from tests.faults.replay import Disk, State, make, on_disk
from tests.faults.stage import JOURNAL, LOCK, Stage, digests
from tests.faults.tiny import write_tiny

from zeropoint.checkpoint.run.journal import Journal

pytestmark = pytest.mark.rotating

NAME = f"out/{JOURNAL}"


def halfway(stage: Stage) -> State:
    """Return the disk as a run leaves it that is killed right before the first file gets its name."""
    start = on_disk(stage.work)
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    first = next(number for number, call in enumerate(layer.calls) if call.name == "rename")
    disk = Disk(start)
    disk.play(layer.calls[:first])
    return disk.now()


def lines_of(state: State) -> list[bytes]:
    """Return the records of the journal, as they stand."""
    data = state[NAME]
    assert data is not None
    return data.splitlines(keepends=True)


def survived(stage: Stage, state: State, journals: Sequence[bytes]) -> int:
    """Put each journal in place of the real one, and run the same command; return how often it went well."""
    for journal in journals:
        make({**state, NAME: journal}, stage.work)
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()
    return stage.tally.resumes


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forged(lines: list[bytes], stage: Stage) -> dict[str, bytes]:
    """Return journals that were put together wrongly."""
    whole = b"".join(lines)
    shuffled = lines[1:]
    random.Random(7).shuffle(shuffled)
    return {
        "empty": b"",
        "zeros": bytes(10 << 20),
        "a line end": b"\n",
        "an empty record": b"00000000 00000000 \n",
        "zeros behind": whole + bytes(1 << 20),
        "text": b"not a journal\n" * 100,
        "doubled": whole + whole,
        "last record doubled": whole + lines[-1],
        "two swapped": b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]),
        "shuffled": b"".join([lines[0], *shuffled]),
        "first missing": b"".join(lines[1:]),
        "one missing": b"".join([*lines[:4], *lines[5:]]),
        "reversed": b"".join(reversed(lines)),
        "one character less in each line": b"".join(line[1:] for line in lines),
    }


def test_a_journal_put_together_wrongly_is_seen_through(stage: Stage) -> None:
    state = halfway(stage)
    wrong = forged(lines_of(state), stage)
    assert survived(stage, state, list(wrong.values())) == len(wrong)


def test_a_journal_cut_or_flipped_at_some_places_resumes(stage: Stage) -> None:
    state = halfway(stage)
    data = b"".join(lines_of(state))
    rng = random.Random(8)
    cuts = [data[: rng.randrange(len(data))] for _ in range(15)]
    flips = [flipped(data, rng.randrange(8 * len(data))) for _ in range(15)]
    assert survived(stage, state, cuts + flips) == 30


@pytest.mark.slow
def test_a_journal_cut_or_flipped_at_every_fifth_byte_and_around_every_record_resumes(stage: Stage) -> None:
    state = halfway(stage)
    lines = lines_of(state)
    data = b"".join(lines)
    around = {end + step for end in accumulate(map(len, lines)) for step in (-2, -1, 0, 1, 2)}
    places = sorted({place for place in around if place < len(data)} | set(range(0, len(data), 5)))
    wrong = [data[:place] for place in places] + [flipped(data, 8 * p + p % 8) for p in places]
    assert survived(stage, state, wrong) == len(wrong)


def read_journal(path: Path) -> list[dict[str, object]]:
    journal = Journal(path)
    journal.close()
    return journal.records


@pytest.mark.slow
def test_wherever_it_is_cut_or_flipped_only_records_before_are_read(stage: Stage, tmp_path: Path) -> None:
    lines = lines_of(halfway(stage))
    data, path = b"".join(lines), tmp_path / "journal"
    path.write_bytes(data)
    whole = read_journal(path)
    assert len(whole) == len(lines)
    ends = list(accumulate(map(len, lines)))
    for bit in range(8 * len(data)):
        good = sum(end <= bit // 8 for end in ends)
        for journal in (flipped(data, bit), data[: bit // 8]) if bit % 8 == 0 else (flipped(data, bit),):
            path.write_bytes(journal)
            assert read_journal(path) == whole[:good], bit
        assert path.stat().st_size == (ends[good - 1] if good else 0)
        stage.tally.points += 1
        stage.tally.faults += 1


PARTIAL = "out/.model-00002-of-00003.safetensors.partial"
Change = Callable[[bytes], bytes | None]
CHANGES: dict[str, Change] = {
    "one byte shorter": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "one byte longer": lambda data: data + b"x",
    "twice": lambda data: data + data,
    "first bit flipped": lambda data: flipped(data, 0),
    "last bit flipped": lambda data: flipped(data, 8 * len(data) - 1),
    "zeros": lambda data: bytes(len(data)),
    "shifted by a byte": lambda data: b"x" + data[:-1],
    "gone": lambda _: None,
}


def with_partial(state: State, change: Change) -> State:
    """Return a state in which a partial file is another than the journal says."""
    data = state[PARTIAL]
    assert data is not None
    changed = change(data)
    rest = {name: content for name, content in state.items() if name != PARTIAL}
    return rest if changed is None else {**rest, PARTIAL: changed}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_as_the_journal_says_is_done_again(stage: Stage, change: str) -> None:
    make(with_partial(halfway(stage), CHANGES[change]), stage.work)
    stage.tally.points += 1
    stage.tally.faults += 1
    stage.check_resumed()
    assert stage.tally.compared == stage.golden_bytes


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_a_partial_file_is_done_again(stage: Stage) -> None:
    state = halfway(stage)
    data = state[PARTIAL]
    assert data is not None
    for place in range(len(data)):
        make({**state, PARTIAL: flipped(data, 8 * place + place % 8)}, stage.work)
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()
    assert stage.tally.resumes == len(data)


def test_the_journal_of_another_scheme_is_refused_and_begun_anew_on_request(stage: Stage) -> None:
    state = halfway(replace(stage, scheme="int4:g32"))
    state.pop(f"out/{LOCK}")
    make(state, stage.work)
    ran, _ = stage.run()
    assert ran.status == 1
    assert "differs in 'recipe'" in ran.err
    assert "int4:g32" in ran.err
    assert "restart" in ran.err
    assert on_disk(stage.work) == state
    stage.options = (*stage.options, "--restart")
    stage.check_resumed()
    assert stage.tally.compared == stage.golden_bytes


def test_the_journal_of_a_source_with_other_numbers_proves_nothing(stage: Stage) -> None:
    # Same names, shapes and sizes, so that only the state of the files tells them apart.
    folder = stage.work / "other"
    write_tiny(folder, seed=1)
    state = halfway(replace(stage, source=folder))
    make({name: data for name, data in state.items() if not name.startswith("other")}, stage.work)
    stage.check_resumed()
    assert stage.tally.compared == stage.golden_bytes


def test_a_journal_that_is_trusted_without_the_bytes_is_found_out(stage: Stage) -> None:
    make(with_partial(halfway(stage), CHANGES["zeros"]), stage.work)
    ran, _ = stage.run(plant="trusting")
    assert ran.status == 1 or digests(stage.out) != stage.golden


def test_a_scale_that_is_not_proved_with_its_codes_is_found_out(stage: Stage) -> None:
    state = halfway(stage)
    data = state[PARTIAL]
    assert data is not None
    begin = 8 + int.from_bytes(data[:8], "little")
    wrong = 0
    for place in range(begin, len(data), 80):
        make({**state, PARTIAL: flipped(data, 8 * place)}, stage.work)
        ran, _ = stage.run(plant="codes only")
        wrong += ran.status == 0 and digests(stage.out) != stage.golden
    assert wrong > 0
