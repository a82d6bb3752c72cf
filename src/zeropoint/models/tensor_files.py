"""Files of bare tensors of this process, such as those that wait for their turn on disk."""

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
        """Return what a tensor is like."""
        return TensorLike(shape=x.shape, dtype=x.dtype, device=x.device)


def scratch_folder(inside: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder for such files, inside of another one, as a context.

    What the disk refuses to remove at the end stays for who removes the other folder.
    """
    return tempfile.TemporaryDirectory(prefix="zeropoint-", dir=inside, ignore_cleanup_errors=True)


def append_tensor(path: Path, x: torch.Tensor) -> None:
    """Write the numbers of a tensor behind those that a file holds, which may not be there yet.

    Raises CalibrationError where the disk refuses them.
    """
    try:
        with path.open("ab") as file:
            file.write(_bytes_of(x.detach().cpu().contiguous()))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written: {error.strerror}; make room") from error


def read_tensor(path: Path, like: TensorLike) -> torch.Tensor:
    """Return the tensor of a file; raises CalibrationError where the disk does not give it back."""
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
