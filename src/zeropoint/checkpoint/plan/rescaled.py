"""Rescaled channels and corrected biases of a checkpoint, and their record file.

Its tensors differ from the source's. ``zeropoint_rescaled.json`` next to the weights says what each
was multiplied with and what was added, so that the result can be compared with the source:

    {"zeropoint_rescaled": 1, "tensors": {NAME: {"rows": STEPS, "columns": STEPS, "one": 0.0}, ...}}

STEPS are signed bytes in base64, one for each row or column: ``k`` means ``2^(k / 8)``. A corrected bias has
``"added"``, too: a float32 for each row, little-endian, in base64.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError, UnsupportedError, count, printable
from ...methods.channels import ChannelFold
from ..read.source import Source
from ..read.storage import exists, opened, read_bytes, shown
from .decoded import Decoded
from .float_view import Floats
from .folded import Folded, FoldedChannels
from .row_changes import Transposed
from .row_reader import RowReader
from .selection import WEIGHT
from .tensor_matrices import matrices

RESCALED = "zeropoint_rescaled.json"
_VERSION, _MOST_BYTES = 1, 1 << 30


def rescaled_floats(floats: Floats, folds: Mapping[str, ChannelFold]) -> Floats:
    """Return a checkpoint of floats with rescaled channels.

    folds: by the names of tensors, ``.weight`` after the module of a matrix of an expert.
    Raises UnsupportedError for tensors that are stored transposed, CheckpointError for names and sizes that
    are not in the checkpoint.
    """
    left, readers = dict(folds), dict(floats.readers)
    for entry in floats.source.entries.values():
        if entry.name in left:
            own: tuple[ChannelFold | None, ...] = (left.pop(entry.name),)
        elif entry.stack is not None:
            own = _of_experts(floats.reader(entry), left)
        else:
            continue
        if any(fold is not None for fold in own):
            readers[entry.name] = _rescaled(floats.reader(entry), own)
    if left:
        raise CheckpointError(
            f"channels of {printable(min(left))} are rescaled, which is not in the checkpoint"
        )
    return replace(floats, readers=readers)


def _of_experts(reader: RowReader, left: dict[str, ChannelFold]) -> tuple[ChannelFold | None, ...]:
    """Return the folds of all experts' matrices, and remove them from ``left``."""
    entry = reader.entry
    height = entry.shape[-2]
    found: list[ChannelFold | None] = [None] * math.prod(entry.shape[:-2])
    for matrix in matrices(entry):
        fold = left.pop(f"{matrix.module}{WEIGHT}", None)
        if fold is None:
            continue
        _require_rows(reader)
        number, first = divmod(matrix.first, height)
        rows = None
        if fold.rows is not None:
            rows = torch.zeros(height, dtype=torch.int64)
            rows[first : first + matrix.shape[0] * matrix.step : matrix.step] = fold.rows
        before = found[number]
        if before is not None and before.rows is not None:
            rows = before.rows if rows is None else rows + before.rows
        found[number] = replace(fold, rows=rows)
    return tuple(found)


def _require_rows(reader: RowReader) -> None:
    """Raise UnsupportedError for a tensor that is stored transposed."""
    if isinstance(reader, Transposed) or (isinstance(reader, Decoded) and reader.inputs_first):
        raise UnsupportedError(
            f"{printable(reader.entry.name)} is stored transposed, and its channels cannot be rescaled; "
            "leave the step out"
        )


def _rescaled(reader: RowReader, folds: tuple[ChannelFold | None, ...]) -> Folded:
    _require_rows(reader)
    entry = reader.entry
    height = math.prod(entry.shape[:-1]) // max(1, len(folds)) if len(entry.shape) > 1 else entry.shape[0]
    for fold in filter(None, folds):
        of_rows = [x for x in (fold.rows, fold.added) if x is not None]
        if any(len(x) != height for x in of_rows) or (
            fold.columns is not None and len(fold.columns) != entry.shape[-1]
        ):
            raise CheckpointError(
                f"the rescaling of {printable(entry.name)} has another size than the tensor"
            )
    if isinstance(reader, Folded) and isinstance(reader.fold, FoldedChannels):
        reader = reader.of
    return Folded(entry=entry, of=reader, fold=FoldedChannels(matrices=folds, height=height))


def folds_text(folds: Mapping[str, ChannelFold], notes: Iterable[str] = (), *, refused: str = "") -> str:
    """Return the text of the file."""
    tensors = {
        name: {"rows": _packed(fold.rows), "columns": _packed(fold.columns), "one": fold.one}
        | ({} if fold.added is None else {"added": packed_numbers(fold.added)})
        for name, fold in folds.items()
    }
    said = {"notes": list(notes), "refused": refused} if notes or refused else {}
    return json.dumps({"zeropoint_rescaled": _VERSION, **said, "tensors": tensors}, indent=1) + "\n"


def _packed(steps: torch.Tensor | None) -> str | None:
    if steps is None:
        return None
    return base64.b64encode(steps.to(torch.int8).numpy().tobytes()).decode()


def parsed_folds(text: str) -> tuple[dict[str, ChannelFold], tuple[str, ...], str]:
    """Return folds, notes and refusal in a text; raises ValueError otherwise."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("zeropoint_rescaled") != _VERSION:
        raise ValueError("it does not say how channels are rescaled")
    tensors, notes = document.get("tensors"), document.get("notes", [])
    if not isinstance(tensors, dict) or not isinstance(notes, list):
        raise ValueError("it names no tensors")
    folds = {str(name): _fold(found) for name, found in tensors.items()}
    return folds, tuple(map(str, notes)), str(document.get("refused", ""))


def _fold(found: Any) -> ChannelFold:
    one = found.get("one") if isinstance(found, dict) else None
    if one not in (0.0, 1.0):
        raise ValueError("a tensor has no number that its module adds")
    added = found.get("added")
    return ChannelFold(
        rows=_unpacked(found.get("rows")),
        columns=_unpacked(found.get("columns")),
        one=float(one),
        added=None if added is None else unpacked_numbers(added),
    )


def packed_numbers(x: torch.Tensor) -> str:
    """Return float32 numbers as text.

    >>> unpacked_numbers(packed_numbers(torch.tensor([0.5, -3.0])))
    tensor([ 0.5000, -3.0000])
    """
    return base64.b64encode(x.float().numpy().astype("<f4").tobytes()).decode()


def unpacked_numbers(text: Any) -> torch.Tensor:
    """Return the finite numbers of an encoded text; raises ValueError otherwise."""
    if not isinstance(text, str):
        raise ValueError("numbers are not a text")
    found = torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype("f4"))
    if not bool(torch.isfinite(found).all()):
        raise ValueError("what is added is not finite")
    return found


def _unpacked(text: Any) -> torch.Tensor | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError("steps are not a text")
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), "i1").astype("i8"))


def changed_by(folds: Mapping[str, ChannelFold]) -> str:
    """Return the kind of change to floats: rescaled, corrected, or both."""
    kinds = {
        "rescaled": any(fold.rows is not None or fold.columns is not None for fold in folds.values()),
        "corrected": any(fold.added is not None for fold in folds.values()),
    }
    return " or ".join(kind for kind, there in kinds.items() if there)


def corrected_note(folds: Mapping[str, ChannelFold]) -> str | None:
    """Return a sentence about corrected biases, or None without any."""
    found = {name: float(x.abs().max()) for name, fold in folds.items() if (x := fold.added) is not None}
    if not found:
        return None
    largest = max(found, key=lambda name: found[name])
    return (
        f"{count(len(found), 'bias', 'biases')} differ from the original by what {RESCALED} says, at most "
        f"{found[largest]:.3g} in {printable(largest)}: corrections for the mean error of outputs"
    )


def folds_of(source: Source) -> dict[str, ChannelFold]:
    """Return the channel folds recorded in the file next to the weights.

    Raises CheckpointError for a damaged file.
    """
    path = source.root / RESCALED
    if source.given != source.root or not exists(path):
        return {}
    with opened(path) as file:
        if file.stamp.size > _MOST_BYTES:
            raise CheckpointError(f"{shown(path)} is too large; it is damaged")
        buffer = read_bytes(file, 0, file.stamp.size)
    try:
        return parsed_folds(buffer.decode("utf-8"))[0]
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(path)} is damaged: {error}; quantize again") from error
