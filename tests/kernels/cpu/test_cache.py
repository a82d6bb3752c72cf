"""Kernels on disk: believed when whole and ours, compiled anew otherwise, and never a reason to fail."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
import torch

import zeropoint
import zeropoint as zp
from zeropoint.kernels.cpu.machine import cache
from zeropoint.kernels.cpu.machine.cache import KernelCache
from zeropoint.kernels.cpu.machine.compilers import rebuilt_device, rebuilt_kernel
from zeropoint.kernels.cpu.machine.intrinsics import device, kernel
from zeropoint.kernels.cpu.machine.named_records import pack, reader

pytestmark = pytest.mark.rotating

ROOMS = ("machine", "encode", "decode", "statistics", "linear")


@pytest.mark.parametrize(
    "place",
    ["ops/lowering.py", "kernels/cpu/encode/rows.py", "kernels/cpu/encode/deep/new.py"]
    + [f"kernels/cpu/{room}/__init__.py" for room in ROOMS],
)
def test_a_change_of_what_is_compiled_asks_for_another_folder(place: str, tmp_path: Path) -> None:
    package = _copied(tmp_path)
    before = cache.source_hash(package)
    path = package / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(path.read_text("utf-8") + "x = 1\n" if path.exists() else "x = 1\n", "utf-8")
    assert cache.source_hash(package) != before


@pytest.mark.parametrize("place", ["kernels/cpu/host/calls.py", "ops/library.py"])
def test_a_change_of_what_is_not_compiled_leaves_kernels_where_they_are(place: str, tmp_path: Path) -> None:
    package = _copied(tmp_path)
    before = cache.source_hash(package)
    (package / place).write_text("x = 1\n", "utf-8")
    assert cache.source_hash(package) == before == cache.source_hash()


def _copied(folder: Path) -> Path:
    """Return a copy of the sources of kernels and of operators."""
    package = Path(zeropoint.__file__).parent
    for part in ("kernels", "ops"):
        shutil.copytree(package / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_kernels_on_disk_are_loaded_without_what_only_compiling_needs() -> None:
    program = (
        "import sys, torch, zeropoint as zp\n"
        "zp.quantize(torch.ones(2, 256), 'int4:g128').dequantize()\n"
        "sys.exit('numba.np.arrayobj' in sys.modules)"
    )
    zp.quantize(torch.ones(2, 256), "int4:g128").dequantize()  # compiles them where no run before has
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def _twice(x: int) -> int:
    return 2 * x


def _dispatcher(folder: Path | None) -> Any:
    """Return the function compiled at its first call, as in a process that has just begun."""
    compiled: Any = numba.njit(_twice)
    compiled._cache = KernelCache(_twice, folder, rebuilt_kernel)
    return compiled


def _result(folder: Path | None) -> tuple[int, bool]:
    """Return what the function gives, and whether it came from the disk."""
    compiled = _dispatcher(folder)
    return compiled(21), bool(compiled.stats.cache_hits)


def _linked(folder: Path) -> tuple[int, bool]:
    """Return what a kernel gives that calls a device function, and whether this came from the disk."""
    inner: Any = device(_twice)
    inner._cache = KernelCache(_twice, folder, rebuilt_device)

    def call(x: int) -> int:
        return inner(x) + 1  # type: ignore[no-any-return]

    outer: Any = kernel(call)
    outer._cache = KernelCache(call, None, rebuilt_kernel)
    return outer(21), bool(inner.stats.cache_hits)


def test_a_device_function_from_the_disk_is_linked_into_another_kernel(tmp_path: Path) -> None:
    assert _linked(tmp_path) == (43, False)
    assert _linked(tmp_path) == (43, True)
    (kept,) = tmp_path.iterdir()
    assert b"ELF" not in kept.read_bytes()  # LLVM IR alone


class Narrow(NamedTuple):
    """A record."""

    low: np.float32
    high: np.float32


class Wide(NamedTuple):
    """The same record after a field was added."""

    low: np.float32
    middle: np.float32
    high: np.float32


class Renamed(NamedTuple):
    """A record with the bytecode of the first, and its last field first."""

    high: np.float32
    low: np.float32


def _read(kind: Any, folder: Path) -> tuple[float, bool]:
    """Return the last field of a record, and whether the function that reads it came from the disk."""
    function = reader(kind)
    function.__name__ = function.__qualname__ = "unpack"
    function.__module__ = __name__
    unpack: Any = device(function)
    unpack._cache = KernelCache(function, folder, rebuilt_device)

    def call(packed: Any) -> Any:
        return unpack(packed).high

    outer: Any = kernel(call)
    outer._cache = KernelCache(call, None, rebuilt_kernel)
    return outer(pack(kind(*range(1, 1 + len(kind._fields))))), bool(unpack.stats.cache_hits)


@pytest.mark.parametrize(("kind", "last"), [(Wide, 3), (Renamed, 1)])
def test_another_declaration_of_a_record_is_not_read_by_the_function_on_disk(
    kind: Any, last: int, tmp_path: Path
) -> None:
    assert _read(Narrow, tmp_path) == (2, False)
    assert _read(Narrow, tmp_path) == (2, True)
    assert _read(kind, tmp_path) == (last, False)
    assert _read(kind, tmp_path) == (last, True)


def test_a_second_process_reads_what_the_first_compiled(tmp_path: Path) -> None:
    assert _result(tmp_path) == (42, False)
    assert _result(tmp_path) == (42, True)
    assert len(list(tmp_path.iterdir())) == 1


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda c: c[:20],
        lambda c: c[:-1],
        lambda c: c + b"\0",
        _flipped,
        lambda c: bytes([c[0] ^ 1]) + c[1:],
    ],
    ids=["empty", "cut in the seal", "cut", "longer", "a bit flipped", "another seal"],
)
def test_a_damaged_file_is_compiled_anew_and_mended(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    _result(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert _result(tmp_path) == (42, False)
    assert _result(tmp_path) == (42, True)


def test_a_file_that_cannot_be_read_is_compiled_anew(tmp_path: Path) -> None:
    _result(tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert _result(tmp_path) == (42, False)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_disk_without_room_keeps_nothing_and_fails_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        found = _result(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found == (42, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_folder_in_which_no_file_can_be_made_keeps_nothing_and_fails_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert _result(tmp_path) == (42, False)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_kernels_are_compiled_in_each_process() -> None:
    assert _result(None) == (42, False)
    assert _result(None) == (42, False)


def _directory(monkeypatch: pytest.MonkeyPatch, asked: Path, users: Path) -> Path | None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(asked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(users))
    found: Path | None = cache.cache_directory.__wrapped__()
    return found


def test_the_folder_is_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = _directory(monkeypatch, tmp_path / "asked", tmp_path / "users")
    assert found is not None
    assert found.parent == tmp_path / "asked"
    assert stat.S_IMODE(found.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_not_taken(
    mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared" / f"kernels-{cache.source_hash()}"
    shared.mkdir(parents=True)
    shared.chmod(mode)
    found = _directory(monkeypatch, tmp_path / "shared", tmp_path / "users")
    assert found is not None
    assert found.is_relative_to(tmp_path / "users")


def test_a_folder_of_another_user_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "theirs" / f"kernels-{cache.source_hash()}").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert _directory(monkeypatch, tmp_path / "theirs", tmp_path / "users") is None
