"""Quantized checkpoints that are cut, flipped or shrink while they are read: inspect and verify say so.

For sources of quantize, tests/faults has the same.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import safetensors
from tests.checkpoint import manifests
from tests.checkpoint.written import quantize, save, weight

from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read import quantized_layers as stored
from zeropoint.checkpoint.read.storage import OpenFile, Place, opened
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, ZeropointError

ONE = Limits(workers=1)
SHARD = "model.safetensors"
COMMANDS = {"inspect": inspect_checkpoint, "verify": lambda path: verify(path, limits=ONE)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output without a manifest, as other tools leave it."""
    root = tmp_path_factory.mktemp("truncated")
    source = save(root / "in", {"m.up.weight": weight(8, 32), "m.norm.weight": weight(16)})
    quantize(source, root / "out", "int4:g16")
    (root / "out" / manifests.NAME).unlink()
    return root / "out"


def _ends(shard: Path) -> tuple[int, list[int]]:
    """Return where the header ends, and where each tensor does."""
    found = manifests.places(shard).values()
    return min(begin for begin, _ in found), sorted(begin + size for begin, size in found)


def _refusals(whole: Path, out: Path, sizes: list[int], command: Callable[[Path], object]) -> int:
    """Cut the shard to each of some sizes; return how often it is refused by its name."""
    shutil.copytree(whole, out)
    count = 0
    for size in sorted(sizes, reverse=True):
        os.truncate(out / SHARD, size)
        with pytest.raises(CheckpointError, match=SHARD):
            command(out)
        count += 1
    return count


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shard_cut_in_its_header_or_at_a_tensor_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    header, ends = _ends(whole / SHARD)
    size = (whole / SHARD).stat().st_size
    around = {at + shift for at in (header, *ends) for shift in (-1, 0, 1)} | {*range(header, header + 9)}
    sizes = [*range(0, header, 7), *(at for at in around if at < size), size - 1]
    assert _refusals(whole, tmp_path / "out", sizes, COMMANDS[name]) == len(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_shard_cut_anywhere_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    sizes = list(range((whole / SHARD).stat().st_size))
    assert _refusals(whole, tmp_path / "out", sizes, COMMANDS[name]) == len(sizes)


def _flip_header(whole: Path, out: Path, step: int) -> int:
    """Flip bits of the header; return after how many the library still reads the file and verify runs."""
    shutil.copytree(whole, out)
    path = out / SHARD
    raw = path.read_bytes()
    header, _ = _ends(path)
    accepted = 0
    for at in range(0, 8 * header, step):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        for command in COMMANDS.values():
            try:
                safetensors.deserialize(bytes(changed))
            except safetensors.SafetensorError:
                with pytest.raises(CheckpointError, match=SHARD):
                    command(out)
            else:
                accepted += _survives(command, out)
    return accepted


def _survives(command: Callable[[Path], object], out: Path) -> bool:
    try:
        command(out)
    except ZeropointError:
        return False
    return True


def test_a_flipped_bit_of_a_header_is_refused_where_the_library_does(whole: Path, tmp_path: Path) -> None:
    assert _flip_header(whole, tmp_path / "out", step=29) > 0


@pytest.mark.slow
def test_each_flipped_bit_of_a_header_is_refused_where_the_library_does(whole: Path, tmp_path: Path) -> None:
    assert _flip_header(whole, tmp_path / "out", step=1) > 0


@pytest.mark.parametrize("which", ["in", "out"])
def test_a_file_that_shrinks_while_it_is_verified_is_an_error_and_no_crash(
    which: str, tmp_path: Path
) -> None:
    """With a mapped file this would be SIGBUS, the end of the process."""
    source = save(tmp_path / "in", {f"m.{n}.weight": weight(64, 512, seed=n) for n in range(4)})
    quantize(source, tmp_path / "out", "int8:channel")
    path = tmp_path / which / SHARD
    last = sorted(begin for begin, _ in manifests.places(path).values())[-1]
    little = Limits(workers=1, tile_values=512)

    def shrink(done: int, total: int, name: str) -> None:
        os.truncate(path, last)

    with pytest.raises(CheckpointError, match=rf"{which}/{SHARD}.* changed"):
        verify(tmp_path / "out", source, limits=little, on_progress=shrink)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    header, _ = _ends(out / SHARD)

    def shrunken(path: Place) -> closing[OpenFile]:
        os.truncate(out / SHARD, header)
        return opened(path)

    monkeypatch.setattr(stored, "opened", shrunken)
    found = ""
    try:
        found = "; ".join(map(str, COMMANDS[name](out).problems))  # type: ignore[attr-defined]
    except CheckpointError as error:
        found = str(error)
    assert "changed while reading" in found or "changed since the checkpoint was opened" in found
