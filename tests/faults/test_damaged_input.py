"""A source that is cut, flipped or shrinks while it is read: an error with the file, and nothing written."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from tests.faults.stage import Stage, digests, run_here
from tests.faults.tiny import SHARDS, shard_name

pytestmark = pytest.mark.rotating

NAMES = [shard_name(number) for number in range(len(SHARDS))]


def header_end(path: Path) -> int:
    """Return where the bytes of tensors begin."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def boundaries(path: Path) -> list[int]:
    """Return the offsets at which tensors begin and end, by safetensors' own reader."""
    begin = header_end(path)
    with safe_open(path, "pt") as opened:
        sizes = [opened.get_tensor(name).nbytes for name in opened.offset_keys()]
    offsets = [begin]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets


@pytest.fixture
def damaged(stage: Stage, tmp_path: Path) -> Stage:
    """A stage whose source is a copy that may be damaged."""
    copy = tmp_path / "source"
    shutil.copytree(stage.source, copy)
    stage.source = copy
    return stage


def refuses(stage: Stage, name: str, data: bytes) -> None:
    """Assert that a shard with these bytes is refused, and that nothing is written."""
    path = stage.source / name
    whole = path.read_bytes()
    path.write_bytes(data)
    stage.source_digests = digests(stage.source)
    try:
        ran, _ = stage.run()
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_failed(ran)
        assert name in ran.err
        assert not stage.out.exists()
    finally:
        path.write_bytes(whole)


def cuts(path: Path) -> list[int]:
    """Return the sizes to which a shard is cut."""
    size, head = path.stat().st_size, header_end(path)
    around = {offset + step for offset in boundaries(path) for step in (-1, 0, 1)}
    return sorted(n for n in {*range(head + 9), *around, size - 1} if n < size)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_shard_is_refused_before_anything_is_written(damaged: Stage, name: str) -> None:
    whole = (damaged.source / name).read_bytes()
    chosen = cuts(damaged.source / name)
    for size in {*chosen[:10], *chosen[::20], *chosen[-15:]}:
        refuses(damaged, name, whole[:size])
    assert damaged.tally.points > 35


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_cut_anywhere_is_refused_before_anything_is_written(damaged: Stage, name: str) -> None:
    whole = (damaged.source / name).read_bytes()
    for size in cuts(damaged.source / name):
        refuses(damaged, name, whole[:size])
    assert damaged.tally.points > header_end(damaged.source / name)


def accepted_elsewhere(path: Path) -> bool:
    """Return whether the safetensors library opens a file and reads every tensor of it."""
    try:
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                opened.get_tensor(name)
    except (SafetensorError, OSError, ValueError, UnicodeDecodeError):
        return False
    return True


def flips(stage: Stage, name: str, bits: list[int]) -> None:
    """Flip bits of a header one by one: what another reader refuses must be refused, and no run may crash."""
    path = stage.source / name
    whole = path.read_bytes()
    for bit in bits:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        stage.clear()
        accepted = accepted_elsewhere(path)
        ran = run_here(stage.arguments)
        stage.tally.points += 1
        stage.tally.faults += 1
        if ran.status:
            assert ran.err.startswith("error: ")
            assert ran.err.count("\n") == 1
            assert not stage.out.exists(), "a refused source leaves something behind"
        else:
            assert accepted, f"bit {bit} of {name}: safetensors refuses what was quantized"
    path.write_bytes(whole)


def test_some_flipped_bits_of_a_header_never_quantize_what_safetensors_refuses(damaged: Stage) -> None:
    bits = random.Random(3).sample(range(8 * header_end(damaged.source / NAMES[0])), 100)
    flips(damaged, NAMES[0], bits)
    assert damaged.tally.points == len(bits)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_flipped_bit_of_a_header_quantizes_what_safetensors_refuses(damaged: Stage, name: str) -> None:
    count = 8 * header_end(damaged.source / name)
    flips(damaged, name, list(range(count)))
    assert damaged.tally.points == count


def shrinking(stage: Stage, at: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Cut every shard to half its size in front of the read ``at`` of one; return how many there were."""
    real, reads = os.preadv, 0
    shards = {(stage.source / name).stat().st_ino for name in NAMES}

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        reads += os.fstat(descriptor).st_ino in shards
        if reads == at:
            for name in NAMES:
                path = stage.source / name
                os.truncate(path, path.stat().st_size // 2)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return lambda: reads


def shrunk_anywhere(
    damaged: Stage, built: Stage, monkeypatch: pytest.MonkeyPatch, *, plant: str | None = None
) -> None:
    """Let the source shrink at each read in turn: an error each time, and nothing for a loader to open."""
    with monkeypatch.context() as patched:
        count = shrinking(damaged, -1, patched)
        assert damaged.run()[0].status == 0
    total = count()
    assert total > len(NAMES)
    for at in range(1, total + 1):
        damaged.clear()
        shutil.rmtree(damaged.source)
        shutil.copytree(built.source, damaged.source)
        with monkeypatch.context() as patched:
            shrinking(damaged, at, patched)
            ran, _ = damaged.run(plant=plant)
        damaged.source_digests = digests(damaged.source)
        damaged.tally.points += 1
        damaged.tally.faults += 1
        damaged.check_failed(ran)
        assert any(name in ran.err for name in NAMES), ran.err
        assert not list(damaged.work.rglob("*.safetensors*"))


def test_a_shard_that_shrinks_at_any_read_is_an_error(
    damaged: Stage, built: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk_anywhere(damaged, built, monkeypatch)
    assert damaged.tally.points > len(NAMES)


def test_zeros_behind_the_end_of_a_shard_would_be_found_out(
    damaged: Stage, built: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        shrunk_anywhere(damaged, built, monkeypatch, plant="zeros behind the end")
