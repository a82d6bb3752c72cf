"""Temporary files of bare tensors of this process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CalibrationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLike:
    """A tensor without its numbers: shape, dtype and device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> TensorLike:
        """Return a tensor's shape, dtype and device."""
        return TensorLike(shape=x.shape, dtype=x.dtype, device=x.device)


def scratch_folder(inside: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a context with a temporary folder inside of another.

    Files that the disk refuses to remove remain until the other folder is removed.
    """
    return tempfile.TemporaryDirectory(prefix="zeropoint-", dir=inside, ignore_cleanup_errors=True)


def append_tensor(path: Path, x: torch.Tensor) -> None:
    """Append a tensor's numbers to a file, or create it.

    Raises CalibrationError where the disk refuses them.
    """
    try:
        with path.open("ab") as file:
            file.write(_bytes_of(x.detach().cpu().contiguous()))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written: {error.strerror}; make room") from error


def read_tensor(path: Path, like: TensorLike) -> torch.Tensor:
    """Return the tensor of a file, or raise CalibrationError."""
    x = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    try:
        with path.open("rb") as file:
            found = file.readinto(_bytes_of(x))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}; run again") from error
    if found != x.nbytes:
        raise CalibrationError(f"{path} is shorter than what was written to it; run again")
    return x.to(like.device)


def _bytes_of(x: torch.Tensor) -> Any:
    return x.reshape(-1).view(torch.uint8).numpy().data
