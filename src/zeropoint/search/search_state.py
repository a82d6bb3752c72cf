"""State of a search: errors of layers, stored as soon as known.

The file is a journal (checkpoint/run/journal.py) behind a line that names it: its first record says of which
source, and each later one what was found about a weight. Both are there from the first moment on, so that a
file without them is somebody else's, and is left as it is. A search that was killed resumes where it was;
another budget, importance or choice of candidates is decided from the file without reading weights again.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

from ..checkpoint.measure.tensor_error import TensorError, error_in
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.identity import require_same, shard_fields
from ..checkpoint.read.storage import shown
from ..checkpoint.run.journal import Journal, first_record, journal_bytes
from ..errors import CheckpointError, option, printable
from ..own_files import FileKind, OwnFile, reason_of

FORMAT = "2"
"""The format of state files that this version reads."""
_HEAD = b"zeropoint search state\n"
STATE = FileKind("state", _HEAD)
_LARGE = 1e300
"""Above each sum of squares of floats with 8 bits of exponent."""
Fact = TypeVar("Fact")


def source_fields(plan: CheckpointPlan) -> dict[str, str]:
    """Return the source's fingerprint for errors: header, size and time.

    plan: of any candidate. Its files are not read but for their headers; one that was written since has
    another time of modification.
    """
    source = plan.source
    text = source.config_text or ""
    fields = {
        "search": FORMAT,
        "config.json": hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest(),
        "dequantize": f"{plan.selection.dequantize.value} {plan.selection.floats or ''}".strip(),
    }
    fields |= shard_fields(source)
    for path, state in source.stamps.items():
        if path.name in source.shards:
            fields[f"written {path.name}"] = f"{state.mtime_ns} {state.identity}".strip()
    return fields


class SearchState:
    """Known errors of weights, in a file or in memory.

    Use it in a ``with`` statement. Raises CheckpointError for the state of another source, for a file that is
    none, and where another search has it open.
    """

    def __init__(self, file: OwnFile | None, fields: Mapping[str, str]) -> None:
        self._errors: dict[str, dict[str, TensorError]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._journal: Journal | None = None
        self._held = -1
        if file is not None:
            self.path = file.path
            try:
                _begin(file, fields)
                self._lock()
                self._journal = Journal(self.path, _HEAD)
                self._load(fields)
            except OSError as error:
                self.close()
                raise CheckpointError(
                    f"state {shown(self.path)} cannot be opened: {reason_of(error)}; pass {option('state')}"
                ) from error
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> SearchState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file for other searches; safe to call twice."""
        if self._journal is not None:
            self._journal.close()
        if self._held >= 0:
            os.close(self._held)
        self._journal, self._held = None, -1

    def errors(self, module: str) -> Mapping[str, TensorError]:
        """Return a weight's known errors, by candidate key."""
        return self._errors.get(module, {})

    def add_errors(self, found: Iterable[tuple[str, Mapping[str, TensorError]]]) -> None:
        """Keep errors of weights by module and key."""
        records = []
        for module, errors in found:
            self._errors.setdefault(module, {}).update(errors)
            records.append(
                {"weight": module, "errors": {key: asdict(error) for key, error in errors.items()}}
            )
        self._append(records)

    def fact(self, kind: str, name: str, parse: Callable[[Any], Fact | None]) -> Fact | None:
        """Return a value that was kept, or None.

        parse: gives None for what is no such value. Raises CheckpointError then.
        """
        found = self._facts.get(kind, {}).get(name)
        parsed = None if found is None else parse(found)
        if found is not None and parsed is None:
            raise _strange(name, found)
        return parsed

    def add_facts(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keep values that JSON holds, by kind and name."""
        self._facts.setdefault(kind, {}).update(values)
        self._append([{"kind": kind, "values": dict(values)}])

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._journal is not None and records:
            try:
                self._journal.append(records)
            except OSError as error:
                raise CheckpointError(
                    f"state {shown(self.path)} cannot be written: {reason_of(error)}; make room and run the "
                    "same command again, which knows what was measured before"
                ) from error

    def _lock(self) -> None:
        """Keep other searches out of the file until this process closes it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"state {shown(self.path)} is in use by another search; wait for it, or pass another "
                f"{option('state')}"
            ) from error
        self._held = descriptor

    def _load(self, fields: Mapping[str, str]) -> None:
        assert self._journal is not None
        first, *records = self._journal.records
        then = first.get("fields")
        if not isinstance(then, dict) or then.get("search") != FORMAT:
            raise CheckpointError(
                f"{shown(self.path)} is no state of a search; pass another {option('state')}"
            )
        require_same(
            fields,
            {key: str(value) for key, value in then.items()},
            what=f"state {shown(self.path)}",
            remedy=f"pass another {option('state')}, or remove it",
        )
        for record in records:
            self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        match record:
            case {"weight": str(module), "errors": dict(errors)}:
                own = self._errors.setdefault(module, {})
                own |= {key: _parsed(module, error) for key, error in errors.items()}
            case {"kind": str(kind), "values": dict(values)} if _is_finite(values):
                self._facts.setdefault(kind, {}).update(values)
            case _:
                raise CheckpointError(
                    f"{shown(self.path)} holds {printable(repr(record)[:80])}, no record of a search; pass "
                    f"another {option('state')}"
                )


def _begin(file: OwnFile, fields: Mapping[str, str]) -> None:
    """Write an empty state where none is, and refuse other files."""
    path = file.path
    if not os.path.lexists(path) or (not path.is_symlink() and os.stat(path).st_size == 0):
        file.write([journal_bytes(_HEAD, {"fields": dict(fields)})], overwrite=os.path.lexists(path))
        return
    file.require_free(overwrite=True)
    if first_record(path, _HEAD) is None:
        # The journal would cut off what is none.
        raise CheckpointError(f"{shown(path)} holds no record of a search; pass another {option('state')}")


def _is_finite(found: object) -> bool:
    """Return whether all numbers of a value from JSON are finite."""
    if isinstance(found, dict | list):
        return all(map(_is_finite, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, float) or math.isfinite(found)


def _parsed(module: str, found: object) -> TensorError:
    error = error_in(found)
    if error is None or not _is_measured(error):
        raise _strange(module, found)
    return error


def _strange(name: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"the state of {printable(name)} says {printable(repr(found)[:80])}; pass another {option('state')}"
    )


def number_in(found: object) -> float | None:
    """Return a number that was kept, or None for anything else."""
    return float(found) if isinstance(found, int | float) else None


def numbers_in(found: object) -> dict[str, float] | None:
    """Return numbers by name that were kept, or None for anything else."""
    if not isinstance(found, dict) or not all(isinstance(number, int | float) for number in found.values()):
        return None
    return found


def _is_measured(error: TensorError) -> bool:
    """Return whether sums of squares and counts can form an error."""
    for parts in (error.squares, error.errors):
        if not all(abs(part) < _LARGE for part in parts) or math.fsum(parts) < 0:
            return False
    counts = error.values, error.largest, error.clipped, error.zero_blocks, error.lost_blocks
    return all(0 <= number < math.inf for number in counts)
