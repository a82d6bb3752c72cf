"""Data files for calibration: UTF-8 text, and token ids in safetensors.

They are regular files, read up to a bound and never mapped: a FIFO would be waited for without end, and a
device has none.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

import torch

from ...errors import CalibrationError, CheckpointError, size_of
from ...own_files import reason_of
from ..read.safetensors_file import parse_header
from ..read.storage import OpenFiles, open_regular, shown
from .loading import read_tensor

TEXT_OF_IDS = ".safetensors"
TEXT_BYTES = 4 << 20
"""Bytes of text that are read: 65,536 tokens, as many as are used of calibration data, have 64 each then."""
_IDS_BYTES = 1 << 28


def read_text(path: Path | str, *, what: str = "text", remedy: str, most: int = TEXT_BYTES) -> str:
    """Return the begin of a file of text in UTF-8.

    what: of the file, in messages. remedy: what to give instead. most: bytes that are read; what follows is
    left out. Raises CalibrationError where the file cannot be read.
    """
    try:
        descriptor = open_regular(Path(path))
        with open(descriptor, "rb") as file:
            raw = file.read(min(most, os.fstat(descriptor).st_size))
            return codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < most)
    except (OSError, CheckpointError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{what} {shown(path)} cannot be read: {reason_of(error.__cause__ or error)}; {remedy}"
        ) from error


def read_ids(path: Path | str, *, what: str = "token ids", remedy: str) -> torch.Tensor:
    """Return the only tensor of token ids in a safetensors file, int64.

    The arguments are as for read_text. Raises CalibrationError for what is no such file.
    """
    found = read_tensors(path, what=what, most=_IDS_BYTES, remedy=remedy)
    if len(found) != 1:
        raise CalibrationError(f"{shown(path)} holds {len(found)} tensors; store the token ids alone")
    (ids,) = found.values()
    return as_ids(ids, shown(path))


def read_tensors(path: Path | str, *, what: str, most: int, remedy: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name.

    most: bytes of all tensors. The other arguments are as for read_text. Raises CalibrationError for what is
    no such file.
    """
    try:
        table = parse_header(Path(path)).table
        nbytes = sum(entry.nbytes for entry in table.values())
        if nbytes > most:
            raise CalibrationError(
                f"{shown(path)} holds {size_of(nbytes)} of {what}, above the limit of {size_of(most)}; "
                "store fewer"
            )
        with OpenFiles() as files:
            return {name: read_tensor(entry, files) for name, entry in table.items()}
    except CheckpointError as error:
        raise CalibrationError(f"{what} {shown(path)} cannot be read: {error}; {remedy}") from error


def as_ids(given: torch.Tensor, name: str) -> torch.Tensor:
    """Return token ids as int64; raises CalibrationError for any other tensor."""
    floats = given.is_floating_point() or given.is_complex()
    if floats or given.dtype is torch.bool or given.ndim not in (1, 2):
        raise CalibrationError(
            f"{name} ({given.dtype}, shape {tuple(given.shape)}) must be token ids: integers of shape "
            "(windows, length) or (tokens,)"
        )
    return given.to(torch.int64)
