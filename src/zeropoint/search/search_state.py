"""The state of a search: the errors of each layer, kept in a file as soon as they are known.

The file is a journal (checkpoint/run/journal.py): its first record says of which source, and each later one
what was found about a weight. A search that was killed resumes where it was; another budget, importance or
choice of candidates is decided from the file without reading weights again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.identity import require_same, shard_fields
from ..checkpoint.read.storage import shown
from ..checkpoint.run.journal import Journal
from ..checkpoint.run.tensor_error import TensorError
from ..errors import CheckpointError, printable

FORMAT = "1"
"""The format of state files that this version reads."""


def source_fields(plan: CheckpointPlan) -> dict[str, str]:
    """Return what the errors of weights follow from besides schemes: the source, by header, size and time.

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
    """What is known of weights, in a file or, without a path, in memory alone.

    Use it in a ``with`` statement. Raises CheckpointError for the state of another source, for a file that is
    none, and where another search has it open.
    """

    def __init__(self, path: Path | None, fields: Mapping[str, str]) -> None:
        self._errors: dict[str, dict[str, TensorError]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._journal: Journal | None = None
        self._held = -1
        self.path = path
        if path is not None:
            self._journal = _opened(path)
            try:
                self._lock()
                self._load(fields)
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
        """Close the file, for another search to open it; safe to call twice."""
        if self._journal is not None:
            self._journal.close()
        if self._held >= 0:
            os.close(self._held)
        self._journal, self._held = None, -1

    def errors(self, module: str) -> Mapping[str, TensorError]:
        """Return the errors of a weight that are known, by the key of the candidate."""
        return self._errors.get(module, {})

    def add_errors(self, found: Iterable[tuple[str, Mapping[str, TensorError]]]) -> None:
        """Keep errors of weights by module and key."""
        records = []
        for module, errors in found:
            self._errors.setdefault(module, {}).update(errors)
            records.append({
                "weight": module, "errors": {key: asdict(error) for key, error in errors.items()}
            })  # fmt: skip
        self._append(records)

    def fact(self, kind: str, name: str) -> Any:
        """Return a value that was kept, or None."""
        return self._facts.get(kind, {}).get(name)

    def add_facts(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keep values that JSON holds, by kind and name."""
        self._facts.setdefault(kind, {}).update(values)
        self._append([{"kind": kind, "values": dict(values)}])

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._journal is not None and records:
            self._journal.append(records)

    def _lock(self) -> None:
        """Keep other searches out of the file until this process closes it."""
        assert self.path is not None
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"state {shown(self.path)} is in use by another search; wait for it, or pass another --state"
            ) from error
        self._held = descriptor

    def _load(self, fields: Mapping[str, str]) -> None:
        assert self._journal is not None
        assert self.path is not None
        if not self._journal.records:
            self._journal.append([{"fields": dict(fields)}])
            return
        first, *records = self._journal.records
        then = first.get("fields")
        if not isinstance(then, dict) or then.get("search") != FORMAT:
            raise CheckpointError(f"{shown(self.path)} is no state of a search; pass another --state")
        require_same(
            fields, {key: str(value) for key, value in then.items()}, what=f"state {shown(self.path)}",
            remedy="pass another --state, or remove it",
        )  # fmt: skip
        for record in records:
            self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        match record:
            case {"weight": str(module), "errors": dict(errors)}:
                own = self._errors.setdefault(module, {})
                own |= {key: _parsed(module, error) for key, error in errors.items()}
            case {"kind": str(kind), "values": dict(values)}:
                self._facts.setdefault(kind, {}).update(values)
            case _:
                assert self.path is not None
                raise CheckpointError(
                    f"{shown(self.path)} holds {printable(repr(record)[:80])}, no record of a search; pass "
                    "another --state"
                )


def _opened(path: Path) -> Journal:
    try:
        fresh = not path.exists() or path.stat().st_size == 0
        if not fresh and not _is_journal(path):
            # The journal would cut off what is none.
            raise CheckpointError(f"{shown(path)} is no state of a search; pass another --state")
        return Journal(path)
    except OSError as error:
        raise CheckpointError(
            f"state {shown(path)} cannot be opened: {error.strerror}; pass --state"
        ) from error


def _is_journal(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(18)
    return len(head) < 18 or (head[8:9] == head[17:18] == b" " and set(head) <= set(b"0123456789abcdef "))


def _parsed(module: str, found: object) -> TensorError:
    match found:
        case {
            "values": int(values), "squares": [*squares], "errors": [*errors], "largest": float(largest),
            "clipped": int(clipped), "zero_blocks": int(zero), "lost_blocks": int(lost),
        } if all(isinstance(part, float) for part in (*squares, *errors)):  # fmt: skip
            return TensorError(
                values=values, squares=tuple(squares), errors=tuple(errors), largest=largest,
                clipped=clipped, zero_blocks=zero, lost_blocks=lost,
            )  # fmt: skip
    raise CheckpointError(
        f"the state of {printable(module)} says {printable(repr(found)[:80])}; pass another --state"
    )
