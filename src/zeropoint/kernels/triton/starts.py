"""Program launches: tensor arguments, and launches kept for reuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from .piece_cuts import BlockShape, SmallBlocks
from .specialization import Constants


class Cut(Protocol):
    """A tensor in parts, for the programs that take them."""

    @property
    def cut(self) -> Any:
        """What programs take at run time."""

    @property
    def programs(self) -> int:
        """How many take all parts."""

    @property
    def warps(self) -> int:
        """Warps of a program."""


ONCE = SmallBlocks(cut=1, shape=BlockShape(1, 1, 1), programs=1, warps=1)
"""The cut of a kernel that has one number to write."""


def program(name: str) -> Any:
    """Look up a program of :mod:`.programs`, such as ``pieces.quantize_pieces``.

    Triton takes seconds to import, and is not needed where no tensor is on a GPU.
    """
    module, _, own = name.partition(".")
    return getattr(importlib.import_module(f".programs.{module}", __package__), own)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as kernels take it: see :mod:`.programs.element_codes`."""
    return words(x.contiguous())


def words(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any strides as kernels take it."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 and x.device.type == "cpu" else x


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on ``device`` like torch; the interpreter warns of overflows."""
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


class Start:
    """A program with cut and constants; later calls start at once.

    After the first call, on tensors of 16-byte places. name: as :func:`program` takes it. fused: whether
    products and sums may be contracted.
    """

    def __init__(self, name: str, cut: Cut, constants: Constants, *, fused: bool = False) -> None:
        self.constants = constants
        self._cut, self._name = cut, name
        self._options = {"num_warps": cut.warps, "enable_fp_fusion": fused}
        self._compiled: Callable[..., None] | None = None
        self._index, self._dtypes = -1, list[torch.dtype]()

    @property
    def programs(self) -> int:
        """How many run."""
        return self._cut.programs

    def __call__(self, *tensors: torch.Tensor, numbers: tuple[int, ...] = ()) -> None:
        """Launch on the caller's stream; numbers: int32 arguments after tensors."""
        places = [each.data_ptr() for each in tensors]
        if [each.dtype for each in tensors] == self._dtypes and self.start_at(places, numbers):
            return
        with on_device(tensors[0].device):
            grid = (self._cut.programs, 1, 1)
            arguments = *tensors, *numbers, self._cut.cut, self.constants
            made = program(self._name)[grid](*arguments, **self._options)
        if self.constants.native and not any(place & 15 for place in places):
            self._compiled, self._index = made[grid], tensors[0].device.index
            self._dtypes = [each.dtype for each in tensors]

    def start_at(self, places: list[int], numbers: tuple[int, ...] = ()) -> bool:
        """Launch on addresses of tensors like the first call's, if possible."""
        if self._compiled is None or torch.cuda.current_device() != self._index:
            return False
        for place in places:
            if place & 15:
                return False
        # Plain numbers, which the launcher takes as they are: it asks the driver about each tensor.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._compiled(*places, *numbers, self._cut.cut, self.constants, stream=stream)
        return True


class HeldStart:
    """A launch with fixed tensors, except for each call's own.

    tensors: those that stay, and None in the places of the others, inputs and then the result, whose dtypes
    never change. numbers: what the kernel takes after tensors.
    """

    def __init__(self, start: Start, *tensors: torch.Tensor | None, numbers: tuple[int, ...] = ()) -> None:
        self._start, self._tensors, self._numbers = start, tensors, numbers
        self._places = [0 if each is None else each.data_ptr() for each in tensors]
        self._open = [at for at, each in enumerate(tensors) if each is None]

    def __call__(self, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Start the kernel on the stream of the caller."""
        places, given = self._places.copy(), (*inputs, out)
        for at, each in zip(self._open, given, strict=True):
            places[at] = each.data_ptr()
        if not self._start.start_at(places, self._numbers):
            rest = iter(given)
            tensors = (words(next(rest)) if each is None else each for each in self._tensors)
            self._start(*tensors, numbers=self._numbers)
