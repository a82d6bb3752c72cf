"""Files of bare tensors of this process, such as those that wait for their turn on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


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


def append_tensor(path: Path, x: torch.Tensor) -> None:
    """Write the numbers of a tensor behind those that a file holds, which may not be there yet."""
    with path.open("ab") as file:
        file.write(_bytes_of(x.detach().cpu().contiguous()))


def read_tensor(path: Path, like: TensorLike) -> torch.Tensor:
    """Return the tensor of a file; raises EOFError where the file is shorter."""
    x = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    with path.open("rb") as file:
        if file.readinto(_bytes_of(x)) != x.nbytes:
            raise EOFError(f"{path} is shorter than what was written to it")
    return x.to(like.device)


def _bytes_of(x: torch.Tensor) -> Any:
    return x.reshape(-1).view(torch.uint8).numpy().data
