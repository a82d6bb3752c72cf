"""Results of units and scans: hashes, journal records, and a compact table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import xxhash

from ...columns import PackedBytes
from ...errors import CheckpointError, printable
from ..measure.tensor_error import TensorError, error_in
from .units import Unit

_MOST, _PARTS = 1e300, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The extremes of the unit of this number.

    scales: how many it has, where the mean is asked for. sum: of these, in parts, as :func:`exact_sum` gives
    them.
    """

    number: int
    low: float
    high: float
    scales: int = 0
    sum: tuple[float, ...] = ()


def mean_scale(found: Collection[ScanResult]) -> float | None:
    """Return the mean scale over a weight's units, rounded once, or None.

    >>> mean_scale([ScanResult(number=n, low=0.0, high=1.0, scales=2, sum=(n + 0.5,)) for n in (0, 1)])
    0.5
    """
    number = sum(each.scales for each in found)
    return math.fsum(part for each in found for part in each.sum) / number if number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """The result of the unit of this number.

    digests: SHA-256 of what it wrote into each of its spans, in hexadecimal. checks: XXH3 of the same, where
    this process wrote it; empty for what a record says. error: what quantization did to it; None for a copy.
    """

    number: int
    digests: tuple[str, ...]
    checks: tuple[str, ...] = ()
    error: TensorError | None

    @staticmethod
    def of(unit: Unit, hashes: Sequence[Hashes], error: TensorError | None = None) -> UnitResult:
        """Return the result of a unit from the hashes of its spans."""
        digests, checks = zip(*(each.digests for each in hashes), strict=True)
        return UnitResult(number=unit.number, digests=digests, checks=checks, error=error)

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON document; :meth:`parse` is the lossless inverse."""
        error = None if self.error is None else asdict(self.error)
        return {"unit": self.number, "sha256": list(self.digests), "error": error}

    @staticmethod
    def parse(document: object, units: Sequence[Unit]) -> UnitResult:
        """Return the result in a document; raises CheckpointError where no unit fits."""
        match document:
            case {"unit": int(number), "sha256": [*digests], "error": error} if 0 <= number < len(units):
                if all(isinstance(digest, str) for digest in digests):
                    return UnitResult(
                        number=number, digests=tuple(digests), error=_parsed_error(error, units[number])
                    )
        raise CheckpointError(f"a record of a unit says {printable(repr(document)[:80])}")


def _parsed_error(found: object, unit: Unit) -> TensorError | None:
    """Return the error in a document of :func:`dataclasses.asdict`; only weights have one."""
    weight, error = unit.output, error_in(found)
    if weight.to is None and found is None:
        return None
    if (
        error is not None
        and weight.to is not None
        and error.values == unit.count * weight.line_values
        and all(
            0 <= number <= error.values for number in (error.clipped, error.zero_blocks, error.lost_blocks)
        )
        and error.largest >= 0
        and _is_sum(error.squares)
        and _is_sum(error.errors)
    ):
        return error
    raise CheckpointError(f"a record of unit {unit.number} says of its error {printable(repr(found)[:80])}")


def _is_sum(parts: tuple[float, ...]) -> bool:
    """Return whether parts are what :func:`exact_sum` gives of squares."""
    if parts == (math.inf,):
        return True
    # Far from where sums of a few of them would overflow; squares of float32 stay below 1e78 each.
    small = all(abs(part) < _MOST for part in parts)
    return small and len(parts) <= _PARTS and math.fsum(parts) >= 0


class UnitResults(MutableMapping[int, UnitResult]):
    """Results of units by number, packed into few bytes each."""

    def __init__(self, count: int, found: Mapping[int, UnitResult] | None = None) -> None:
        self._packed = PackedBytes(count)
        self.update(found or {})

    def __getitem__(self, number: int) -> UnitResult:
        data = memoryview(self._packed[number])
        digests, rest = _split(data[2:], data[0], 32)
        checks, error = _split(rest, data[1], 16)
        found = TensorError.unpack(bytes(error)) if error else None
        return UnitResult(number=number, digests=digests, checks=checks, error=found)

    def __setitem__(self, number: int, done: UnitResult) -> None:
        hashes = b"".join(map(bytes.fromhex, (*done.digests, *done.checks)))
        error = b"" if done.error is None else done.error.pack()
        self._packed[number] = bytes([len(done.digests), len(done.checks)]) + hashes + error

    def __delitem__(self, number: int) -> None:
        del self._packed[number]

    def __contains__(self, number: object) -> bool:
        return number in self._packed

    def __iter__(self) -> Iterator[int]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def _split(data: memoryview, count: int, size: int) -> tuple[tuple[str, ...], memoryview]:
    """Return ``count`` hashes of ``size`` bytes, in hexadecimal, and the rest."""
    return tuple(data[n * size : (n + 1) * size].hex() for n in range(count)), data[count * size :]


class Hash(Protocol):
    """A hash of bytes, such as ``hashlib`` has."""

    def update(self, data: memoryview, /) -> None:
        """Hash some more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes, in hexadecimal."""


SHA256: Callable[[], Hash] = hashlib.sha256
XXH3: Callable[[], Hash] = xxhash.xxh3_128


class Hashes:
    """Hashes of one span: SHA-256 for later, XXH3 for read-back.

    SHA-256 goes into the journal and the manifest. XXH3 with 128 bits finds what memory or a disk garbles as
    surely, at ten times the speed, so a run reads back with it what it has just written; it is kept in the
    memory of that run alone, where nobody can forge it.
    """

    def __init__(self) -> None:
        self._both = SHA256(), XXH3()

    def update(self, data: memoryview) -> None:
        """Hash some more bytes."""
        for one in self._both:
            one.update(data)

    @property
    def digests(self) -> tuple[str, str]:
        """SHA-256 and XXH3 of all bytes, in hexadecimal."""
        sha256, xxh3 = (one.hexdigest() for one in self._both)
        return sha256, xxh3
