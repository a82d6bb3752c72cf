"""Which backend runs an operator: registration, choice, and the reasons.

A backend states what it cannot do; of those that can, the one with the highest rank runs. Backends live in
``zeropoint.kernels`` and are loaded by name the first time an operator is called, so that importing zeropoint
stays cheap and a missing optional dependency is a reason, not an error.
"""

from __future__ import annotations

import enum
import functools
import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import UnsupportedError
from ..layout.runs import Runs
from ..schemes import Scheme
from . import reference
from .row_errors import RowErrors, row_errors


class Op(enum.Enum):
    """The operators that a backend may offer."""

    QUANTIZE_DYNAMIC = "quantize_dynamic"
    """Parameters and codes from one read of the data."""
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    FAKE_QUANTIZE = "fake_quantize"
    FAKE_QUANTIZE_BACKWARD = "fake_quantize_backward"
    QUANTIZE_BACKWARD = "quantize_backward"
    """The gradient of codes to values, alone: a kernel's mask, and a division in plain torch."""
    DEQUANTIZE_BACKWARD = "dequantize_backward"
    """The gradient of values to codes, alone: a product in plain torch."""
    MEASURE = "measure"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call, without its data.

    dtype: dtype of the values, in or out. own_dtype: dtype of the tensor that the parameters belong to.
    """

    op: Op
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    own_dtype: torch.dtype
    device: torch.device


Params = tuple[tuple[torch.Tensor, ...], torch.Tensor | None]


class Backend(Protocol):
    """What a backend offers. Tensors may have any stride; packed data is uint8 with rows padded to bytes.

    ``out``, where given, is contiguous, has the right shapes and dtypes, takes the result, and is returned.
    """

    name: str
    rank: int

    def refusal(self, request: Request) -> str | None:
        """Return why the backend cannot run ``request``, or None when it can."""

    def quantize_dynamic(
        self, x: torch.Tensor, scheme: Scheme, out: tuple[torch.Tensor, Params] | None = None,
        *, extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:  # fmt: skip
        """Return packed codes and the parameters that ``x`` gives; raise NonFiniteError for NaN and Inf.

        extremes: of the tensor that ``x`` is a part of; scales of a whole tensor come from them.
        """

    def quantize(
        self, x: torch.Tensor, scheme: Scheme, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return packed codes of ``x`` under ``params``."""

    def dequantize(
        self, data: torch.Tensor, params: Params, request: Request, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values in ``request.dtype``."""

    def fake_quantize(self, x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
        """Return quantized and dequantized ``x``."""

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, scheme: Scheme, params: Params
    ) -> torch.Tensor:
        """Return ``grad`` where ``x`` was not clipped, else a zero of its sign, as a product with a mask."""

    def measure(self, x: torch.Tensor, data: torch.Tensor, scheme: Scheme, params: Params) -> RowErrors:
        """Return how far the packed codes ``data`` are from ``x``, a row at a time."""


Extremes = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest number of each block, float64; not finite where the block is not."""


class Counter(Protocol):
    """What a backend offers to statistics: exact results from one read, the same for any thread count.

    Tensors of results are flat over the blocks of ``runs``. Numbers that are not finite show in the extremes
    and are not counted.
    """

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether it knows the dtype of ``x`` and where it lies."""

    def extremes(self, x: torch.Tensor, runs: Runs) -> Extremes:
        """Return the extremes of each block."""

    def bins(self, x: torch.Tensor, runs: Runs, mantissa_bits: int) -> tuple[Extremes, torch.Tensor]:
        """Return the extremes, and counts by the bits of float32.

        Counts are int64 of shape (blocks, 2 * (255 << mantissa_bits)): positive numbers by exponent and first
        mantissa bits, then negative ones.
        """

    def sums(self, x: torch.Tensor, runs: Runs) -> tuple[Extremes, torch.Tensor, torch.Tensor]:
        """Return the extremes, exact sums of the magnitudes as float32, and counts.

        Sums are int64 (blocks, 10): limbs of 32 bits, the lowest first, in units of 2**-149; a limb may be
        larger. Counts are int64 (blocks, 1).
        """


def filled(
    out: tuple[torch.Tensor, Params], data: torch.Tensor, params: Params
) -> tuple[torch.Tensor, Params]:
    """Copy codes and parameters into ``out`` and return it."""
    target, (scales, zero_point) = out
    target.copy_(data)
    for mine, theirs in zip(scales, params[0], strict=True):
        mine.view(torch.uint8).copy_(theirs.view(torch.uint8))
    if zero_point is not None and params[1] is not None:
        zero_point.copy_(params[1])
    return out


class Reference:
    """Plain torch; runs everything everywhere."""

    name = "reference"
    rank = 0

    def refusal(self, request: Request) -> str | None:
        """Return None: the reference refuses nothing."""
        return None

    def quantize_dynamic(
        self, x: torch.Tensor, scheme: Scheme, out: tuple[torch.Tensor, Params] | None = None,
        *, extremes: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor, Params]:  # fmt: skip
        """See :class:`Backend`."""
        params = reference.choose_params(x, scheme, extremes)
        data = reference.quantize(x, scheme, *params)
        return (data, params) if out is None else filled(out, data, params)

    def quantize(
        self, x: torch.Tensor, scheme: Scheme, params: Params, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`Backend`."""
        data = reference.quantize(x, scheme, *params)
        return data if out is None else out.copy_(data)

    def dequantize(
        self, data: torch.Tensor, params: Params, request: Request, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`Backend`."""
        values = reference.dequantize(
            data,
            request.scheme,
            *params,
            shape=request.shape,
            dtype=request.dtype,
            own_dtype=request.own_dtype,
        )
        return values if out is None else out.copy_(values)

    def fake_quantize(self, x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
        """See :class:`Backend`."""
        return reference.fake_quantize(x, scheme, *params)

    def fake_quantize_backward(
        self, grad: torch.Tensor, x: torch.Tensor, scheme: Scheme, params: Params
    ) -> torch.Tensor:
        """See :class:`Backend`."""
        inside = reference.inside(x, scheme, *params)
        return torch.where(inside, grad, torch.copysign(torch.zeros_like(grad), grad))

    def measure(self, x: torch.Tensor, data: torch.Tensor, scheme: Scheme, params: Params) -> RowErrors:
        """See :class:`Backend`."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        decoded = reference.dequantize(
            data, scheme, *params, shape=tuple(x.shape), dtype=wide, own_dtype=x.dtype
        )
        return row_errors(x, decoded, scheme, *params)


_BACKENDS: dict[str, Backend] = {"reference": Reference()}
_COUNTERS: dict[str, Counter] = {}
_ABSENT: dict[str, str] = {}
_KERNELS = ("cpu",)


def register(backend: Backend) -> None:
    """Offer a backend under its name; a later one of the same name replaces the earlier."""
    _BACKENDS[backend.name] = backend
    choose.cache_clear()


def _load_kernels() -> None:
    for name in _KERNELS:
        if name not in _BACKENDS and name not in _ABSENT:
            try:
                module = importlib.import_module(f"zeropoint.kernels.{name}")
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("zeropoint"):
                    raise
                _ABSENT[name] = f"needs the package {error.name}, which is not installed"
            else:
                register(module.BACKEND)
                _COUNTERS[name] = module.COUNTER


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which backend would run a request, and why the others would not.

    chosen: its name, or None where the request itself is impossible. reasons: name of each other backend to
        the reason, or ``request`` to what is wrong with the request.

    It is true where a backend would run.
    """

    chosen: str | None
    reasons: dict[str, str]

    def __bool__(self) -> bool:
        return self.chosen is not None

    def __str__(self) -> str:
        rest = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.chosen or 'nothing'} runs" + (f" ({rest})" if rest else "")


def explain(request: Request, only: str | None = None) -> Explanation:
    """Return the choice for ``request``; ``only`` names the one backend that may run.

    Raises UnsupportedError when ``only`` is unknown or cannot run the request.
    """
    _load_kernels()
    reasons = dict(_ABSENT)
    able: list[Backend] = []
    for backend in _BACKENDS.values():
        reason = backend.refusal(request)
        if reason is not None:
            reasons[backend.name] = reason
        else:
            able.append(backend)
    if only is not None:
        if only not in {backend.name for backend in able}:
            known = ", ".join({*_BACKENDS, *_ABSENT})
            raise UnsupportedError(
                f"backend {only!r} cannot run {request.op.value}: {reasons.get(only, f'known are {known}')}"
            )
        able = [backend for backend in able if backend.name == only]
    best = max(able, key=lambda backend: backend.rank)
    for backend in able:
        if backend is not best:
            reasons[backend.name] = f"slower than {best.name}"
    return Explanation(chosen=best.name, reasons=reasons)


@functools.lru_cache(maxsize=4096)
def choose(request: Request, only: str | None = None) -> Backend:
    """Return the backend that runs ``request``; what a backend refuses never changes."""
    chosen = explain(request, only).chosen
    assert chosen is not None
    return _BACKENDS[chosen]


def counter(x: torch.Tensor, only: str | None = None) -> Counter | None:
    """Return the kernels that sum up data such as ``x``, or None where plain torch does."""
    _load_kernels()
    for name, found in _COUNTERS.items():
        if only in (None, name) and found.takes(x):
            return found
    return None
