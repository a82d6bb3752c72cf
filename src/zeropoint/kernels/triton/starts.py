"""How programs are started: tensors as they take them, and a launch that is kept."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from .piece_cuts import BlockShape, Pieces, SmallBlocks
from .segmentation import Segments
from .specialization import Constants

AnyCut = Pieces | Segments | SmallBlocks
ONCE = SmallBlocks(cut=1, shape=BlockShape(1, 1, 1), programs=1, warps=1)
"""The cut of a kernel that has one number to write."""


def program(name: str) -> Any:
    """Return a program by its module among :mod:`.programs` and its own name, ``pieces.quantize_pieces``.

    Triton takes seconds to import, and is not needed where no tensor is on a GPU.
    """
    module, _, own = name.partition(".")
    return getattr(importlib.import_module(f".programs.{module}", __package__), own)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as kernels take it: see :mod:`.programs.element_codes`."""
    x = x.contiguous()
    return x.view(torch.int16) if x.dtype is torch.bfloat16 and x.device.type == "cpu" else x


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Have kernels started on ``device``, as those of torch are; the interpreter warns of each overflow."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


class Start:
    """A program with its cut and constants; after the first call, tensors of 16-byte places start it at once.

    name: as :func:`program` takes it.
    """

    def __init__(self, name: str, cut: AnyCut, constants: Constants) -> None:
        self.constants = constants
        self._cut, self._name = cut, name
        self._compiled: Callable[..., None] | None = None
        self._index, self._dtypes = -1, list[torch.dtype]()

    @property
    def programs(self) -> int:
        """How many run."""
        return self._cut.programs

    def __call__(self, *tensors: torch.Tensor, numbers: tuple[int, ...] = ()) -> None:
        """Start the kernel on the stream of the caller; numbers: int32 that it takes after tensors."""
        if self._compiled is not None and torch.cuda.current_device() == self._index:
            # Plain numbers, which the launcher takes as they are: it asks the driver about each tensor.
            places = [each.data_ptr() for each in tensors]
            aligned = not functools.reduce(operator.or_, places) & 15
            if aligned and [each.dtype for each in tensors] == self._dtypes:
                self._compiled(*places, *numbers, self._cut.cut, self.constants)
                return
        with on_device(tensors[0].device):
            grid = (self._cut.programs, 1, 1)
            options = {"num_warps": self._cut.warps, "enable_fp_fusion": False}
            made = program(self._name)[grid](*tensors, *numbers, self._cut.cut, self.constants, **options)
        if self.constants.native and all(each.data_ptr() % 16 == 0 for each in tensors):
            self._compiled, self._index = made[grid], tensors[0].device.index
            self._dtypes = [each.dtype for each in tensors]
