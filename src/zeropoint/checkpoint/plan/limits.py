"""Limits of a run: worker threads, memory, and the resulting tile size."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sized
from dataclasses import dataclass, replace

import torch

from ...errors import CheckpointError, OptionError, option, parse_size, size_of
from ...ops import registry
from ...ops.devices import CPU, device_named
from ...schemes import Scheme

BASE_MEMORY = 400 << 20
"""Resident memory of Python with torch, numba and the compiled kernels, before the first tile."""
KERNEL_BYTES, REFERENCE_BYTES = 16, 400
"""Temporaries for each number of a tile: codes and bytes to write; with plain torch, also float64 steps."""
DECODING_BYTES = 8
"""Temporaries for each number that is decoded: its codes twice, and its value, in addition to the tile."""
TILE_VALUES = 1 << 22
"""Numbers in a tile: so many that calls cost little, so few that the error is measured in cache."""
TENSOR_BYTES = 160
"""Memory for each tensor: its name and place, and the hashes and errors of what was read or written."""
WORKER_BYTES = 256 << 10
"""Memory of a thread before its first tile: its stack, and Python's and torch's state of it."""
DEFAULT_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run.

    They change speed and no bytes, except for statistics that a GPU computes. workers: threads. max_memory:
    bytes of the whole process. tile_values: numbers in a tile, memory permitting. device: where weights are
    quantized and models run on data, whose sums a GPU rounds in its own way.

    Raises CheckpointError for limits under which nothing can run.
    """

    workers: int
    max_memory: int = DEFAULT_MEMORY
    tile_values: int = TILE_VALUES
    base_memory: int = BASE_MEMORY
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise CheckpointError(f"workers (={self.workers}) must be at least 1")
        if self.tile_values < 1:
            raise CheckpointError(f"tile_values (={self.tile_values}) must be at least 1")
        if self.max_memory <= self.base_memory:
            raise CheckpointError(
                f"{self._given} is too little: Python and torch alone need "
                f"{_option(self.base_memory)}; use 512M or more"
            )
        if self.workers > 1 and self.workers * WORKER_BYTES > self.max_memory:
            raise CheckpointError(
                f"{self._given} is too little for {option('workers', self.workers)}: a thread takes "
                f"{size_of(WORKER_BYTES)}; use {option('workers', available_cores())}"
            )

    @staticmethod
    def default(
        workers: int | None = None,
        max_memory: int | str | None = None,
        device: torch.device | str | None = None,
    ) -> Limits:
        """Return limits; by default every core, 2 GiB, and the CPU.

        max_memory: bytes, or a text such as ``"1G"``, for which OptionError is raised where it is no size.
        device: see :func:`~zeropoint.ops.devices.device_named`, which says what is raised.
        """
        return Limits(
            workers=available_cores() if workers is None else workers,
            max_memory=DEFAULT_MEMORY if max_memory is None else parse_size(max_memory),
            device=device_named(device),
        )

    @property
    def on_gpu(self) -> bool:
        """Whether models run on a GPU."""
        return self.device.type != CPU.type

    @property
    def batches_at_once(self) -> int:
        """Concurrent batches: one per worker on the CPU, one on a GPU."""
        return 1 if self.on_gpu else self.workers

    @property
    def mark(self) -> str:
        """Device suffix of cache keys: GPU results are apart; CPU has none."""
        return f", on {self.device.type}" if self.on_gpu else ""

    def short_of(self, missing: int, what: str = "") -> str:
        """Return the end of an out-of-memory message: the limit and the option.

        missing: bytes beyond the limit. what: text before the option.
        """
        if self.on_gpu:
            return f"more than is free on {self.device}{what}; leave {option('device', str(self.device))} out"
        enough = f"{-(-(self.max_memory + missing) >> 20)}M"
        return f"more than the process may take{what}; use {option('max_memory', enough)}"

    def require(self, nbytes: int, what: str, remedy: str) -> None:
        """Raise CheckpointError where ``what`` takes more memory than the limit leaves."""
        missing = nbytes - (self.max_memory - self.base_memory)
        if missing > 0:
            raise CheckpointError(
                f"{what} takes about {size_of(nbytes)}, {size_of(missing)} {self.short_of(missing)}, "
                f"or {remedy}"
            )

    def require_model(self, *, runs: bool) -> None:
        """Raise OptionError for a GPU where the command runs no model."""
        if self.on_gpu and not runs:
            raise OptionError(
                f"{option('device', str(self.device))} is where a model runs on data, and none runs here; "
                f"add {option('calibration', metavar='FILE')}, or leave it out"
            )

    def require_gram(self, shape: tuple[int, int], *, workers: int = 1) -> None:
        """Raise CheckpointError where solving a weight exceeds the memory limit.

        That is a Gram matrix, its sum over experts, its factors, and a weight of each worker, in float64.
        """
        rows, columns = shape
        needed = self.base_memory + 8 * (6 * columns**2 + 6 * workers * rows * columns)
        if needed > self.max_memory:
            raise CheckpointError(
                f"a weight of {rows} x {columns} with its Gram matrix takes about {size_of(needed)}, more "
                f"than the process may take; use {option('max_memory', f'{-(-needed >> 20)}M')}"
            )

    @property
    def _given(self) -> str:
        """The bound as an option."""
        return option("max_memory", _option(self.max_memory))

    def reserve(self, *tables: Sized | None) -> Limits:
        """Return the limits less the memory for the entries of ``tables``.

        Raises CheckpointError when nothing is left.
        """
        count = sum(len(table) for table in tables if table is not None)
        base = self.base_memory + TENSOR_BYTES * count
        if base >= self.max_memory:
            raise CheckpointError(
                f"{self._given} is too little for {count} tensors, of which "
                f"{TENSOR_BYTES} bytes each are kept in memory next to {size_of(self.base_memory)} of Python "
                f"and torch; use at least {_mebibytes(base + (64 << 20))}"
            )
        return replace(self, base_memory=base)

    def rows(self, columns: int, alignment: int, value_bytes: int, *, kept: int = 0) -> int:
        """Return the rows of a tile, a multiple of ``alignment``.

        value_bytes: memory that each number of a tile takes while it is worked on. kept: bytes that are held
        over several tiles. Raises CheckpointError when not even ``alignment`` rows fit into a worker's share
        of the memory.
        """
        share = (self.max_memory - self.base_memory) // self.workers
        values = min(self.tile_values, max(0, share - kept) // value_bytes)
        rows = values // max(1, columns) // alignment * alignment
        if rows:
            return rows
        needed = kept + alignment * columns * value_bytes
        if needed > share:
            least = _mebibytes(self.base_memory + needed)
            raise CheckpointError(
                f"{self._given} with {option('workers', self.workers)} is too little for "
                f"{alignment} rows of {columns} columns; use "
                f"{option('max_memory', _mebibytes(self.base_memory + self.workers * needed))}, or "
                f"{option('workers', 1)} and {least}"
            )
        return alignment


def _option(nbytes: int) -> str:
    """Return a number of bytes as --max-memory takes it, in few digits.

    >>> _option(100 << 20), _option(3 << 29), _option(1000)
    ('100M', '1.5G', '1000')
    """
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >> power and not (nbytes << 2) % (1 << power):
            return f"{nbytes / (1 << power):g}{unit}"
    return str(nbytes)


def _mebibytes(nbytes: int) -> str:
    """Return a number of bytes rounded up, as --max-memory takes it."""
    return f"{-(-nbytes >> 20)}M"


@functools.lru_cache(maxsize=256)
def value_bytes(scheme: Scheme, dtype: torch.dtype) -> int:
    """Return the memory per value of a tile during quantization, source included."""
    ops = (registry.Op.QUANTIZE_DYNAMIC, registry.Op.MEASURE)
    slow = any(_is_reference(op, scheme, dtype, dtype) for op in ops)
    return dtype.itemsize + (REFERENCE_BYTES if slow else KERNEL_BYTES)


@functools.lru_cache(maxsize=256)
def decoding_bytes(scheme: Scheme, own_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Return the memory per value of a tile during decoding, result excluded."""
    slow = _is_reference(registry.Op.DEQUANTIZE, scheme, own_dtype, dtype)
    return REFERENCE_BYTES if slow else DECODING_BYTES


def _is_reference(op: registry.Op, scheme: Scheme, own_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether plain torch does an operation on a CPU."""
    request = registry.Request(
        op=op, scheme=scheme, shape=(128, 1024), dtype=dtype, own_dtype=own_dtype, device=CPU
    )
    return registry.explain(request).chosen == "reference"


def give_back() -> None:
    """Return freed memory to the operating system; glibc keeps it otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def available_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
