"""Backend registry: offers, dispatch by rank, and refusals.

A backend states what it refuses; of those that can run a request, the one with the highest rank prepares a
kernel for it, which is kept for the next call. A plan is a kernel that its user holds. Backends are modules
in one table, loaded when an operator is first called, so that importing zeropoint stays cheap and a missing
optional dependency is a reason, not an error.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import UnsupportedError
from ..layout.runs import Runs
from ..params.tensors import Params
from ..schemes import Scheme
from .feedback_grid import Grid, TriangularFactors
from .threads import gradual_underflow


class Op(enum.Enum):
    """The operators that a backend may offer, with the arguments of :meth:`Kernel.run`."""

    CHOOSE_PARAMS = "choose_params"
    """``run(x, extremes=None) -> Params``."""
    QUANTIZE_DYNAMIC = "quantize_dynamic"
    """Parameters and codes from one read: ``run(x, out=None, extremes=None) -> (data, Params)``."""
    QUANTIZE = "quantize"
    """``run(x, params, out=None) -> data``."""
    DEQUANTIZE = "dequantize"
    """``run(data, params, out=None) -> values``."""
    FAKE_QUANTIZE = "fake_quantize"
    """``run(x, params, out=None) -> values``."""
    FAKE_QUANTIZE_BACKWARD = "fake_quantize_backward"
    """``run(grad, x, params, out=None) -> dx``: where ``x`` is clipped, zero with the sign of ``grad``."""
    QUANTIZE_BACKWARD = "quantize_backward"
    """The gradient of codes to values, alone: a kernel's mask, and a division in plain torch."""
    DEQUANTIZE_BACKWARD = "dequantize_backward"
    """The gradient of values to codes, alone: a product in plain torch."""
    SEARCH_PARAMS = "search_params"
    """Parameters of least squared error, found from a start.

    ``run(x, params, importance=None) -> Params``; importance: weights of the errors, float64, broadcast
    against ``x``. Values are finite.
    """
    SEARCH = "search"
    """Codes and parameters as llama.cpp searches them: ``run(x, importance=None) -> (data, Params)``."""
    JOIN_BLOCKS = "join_blocks"
    """Codes and parameters as rows of blocks: ``run(struct, data, params) -> lines``, uint8 (..., bytes)."""
    SPLIT_BLOCKS = "split_blocks"
    """The inverse: ``run(struct, lines) -> (data, Params)``; see :mod:`zeropoint.layout.bit_places`."""
    TO_LINES = "to_lines"
    """Rows as lines of words: ``run(order, data) -> lines``; see :mod:`zeropoint.layout.word_lines`."""
    FROM_LINES = "from_lines"
    """The inverse: ``run(order, lines) -> data``."""
    MEASURE = "measure"
    """``run(x, data, params) -> RowErrors``."""
    LINEAR = "linear"
    """A layer on integer codes: ``run(weight, params, bias) -> layer``; see :mod:`.linear`."""
    LINEAR_VALUES = "linear_values"
    """A layer on values of its weight: ``run(weight, params, bias) -> layer``; see :mod:`.linear`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One operator call, without its data.

    dtype: dtype of the values, in or out. own_dtype: dtype of the tensor that the parameters belong to.
    For a linear layer ``scheme``, ``shape`` (out_features, in_features) and ``own_dtype`` belong to the
    weight, and ``dtype`` to input and output. source: scheme of the input of LINEAR, None where it is not
    quantized.
    given: whether the input's parameters are given, or chosen by each input. code_range: smallest and largest
    integer code in use, within the scheme's; None means all. strides: of the values that a held kernel reads;
    None where they are contiguous.
    """

    op: Op
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    own_dtype: torch.dtype
    device: torch.device
    source: Scheme | None = None
    given: bool = False
    code_range: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None

    @property
    def unseeded(self) -> Request:
        """The request with seed 0."""
        return replace(self, scheme=self.scheme.unseeded) if self.scheme.rounding.seed else self


@dataclass(frozen=True, kw_only=True)
class HeldKernel:
    """A kernel with preallocated memory; its inputs are trusted.

    Tensors fit the request and are contiguous, but for the input of a ``strided`` kernel. Under parameters of
    each run, it runs inside of :func:`.threads.gradual_underflow`.

    run: as :meth:`Kernel.run`, always with ``out=``, and with ``params=`` unless they were given before.
    workspace_bytes: memory that the kernel holds between calls, and writes to in each.
    parameter_bytes: memory of its copies of given parameters, which no call writes to.
    allocates: why a call takes further memory that grows with the data, or None when it takes none.
    settle: waits for the device and raises the errors of runs since its last call; None where runs raise
        them.
    strided: whether the input has the strides of the request.
    """

    run: Callable[..., object]
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    allocates: str | None = None
    settle: Callable[[], None] | None = None
    strided: bool = False


class Kernel(Protocol):
    """One operator for one request, safe in many threads.

    Tensors may have any stride; packed data is uint8 with rows padded to bytes. ``out``, where given, is
    contiguous, has the right shapes and dtypes, takes the result, and is returned. ``extremes`` belong to the
    tensor that ``x`` is a part of; scales of a whole tensor come from them. Kernels that read data raise
    NonFiniteError for NaN and Inf, as the reference does.
    """

    def run(self, *tensors: Any, **named: Any) -> Any:
        """Return the result; the arguments are those that :class:`Op` names."""


@runtime_checkable
class PlanKernel(Kernel, Protocol):
    """A kernel that plans hold, with memory of its own where possible."""

    def hold(self, params: Params | None) -> HeldKernel | str:
        """Return the kernel with preallocated memory, or why each run allocates.

        params: given parameters, of which the kernel keeps its own copy; None when they come with the data.
        """


class Backend(Protocol):
    """What prepares kernels."""

    name: str
    rank: int

    def refusal(self, request: Request) -> str | None:
        """Return the reason why a request is unsupported, or None; never changes."""

    def prepare(self, request: Request) -> Kernel:
        """Return the kernel for ``request``, which the backend does not refuse."""


Extremes = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest number of each block, float64; not finite where the block is not."""


class Counter(Protocol):
    """Exact statistics from one read, independent of the thread count.

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


class Dense(Protocol):
    """Dense products of error feedback, byte-equal to :mod:`.feedback_reference`.

    For any thread count. Tensors are on one device. Columns are in processing order, in ``grid`` too.
    """

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether it computes where ``x`` lies."""

    def squares(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Return ``into`` plus squares of rows (at most 32 bits), in order."""

    def gram(self, x: torch.Tensor, y: torch.Tensor | None, into: torch.Tensor) -> torch.Tensor:
        """Return ``into + x^T y``; see :func:`.feedback.gram`."""

    def factor(self, h: torch.Tensor) -> TriangularFactors:
        """Return the factors of a float64 matrix."""

    def feed_back(
        self, weight: torch.Tensor, m: torch.Tensor, d: torch.Tensor, grid: Grid
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and losses, float64."""

    def substitute(self, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """Return float64 ``x`` of ``x m = y``, for unit triangular ``m``."""

    def descend(
        self, weight: torch.Tensor, values: torch.Tensor, h: torch.Tensor, grid: Grid, sweeps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, float64, and how many moved in each sweep."""


MODULES = {
    "reference": "zeropoint.ops.reference_backend",
    "cpu": "zeropoint.kernels.cpu",
    "triton": "zeropoint.kernels.triton",
}
"""Name of each backend to its module, which has a ``BACKEND`` and may have a ``COUNTER`` and a ``DENSE``.

The one place that names kernels, which nothing imports: a layer below them must not know what they are.
"""
REFERENCE = "reference"
_BACKENDS: dict[str, Backend] = {}
_LOADED: dict[str, ModuleType] = {}
_ABSENT: dict[str, str] = {}


def register(backend: Backend) -> None:
    """Register a backend by name, replacing an earlier one."""
    _BACKENDS[backend.name] = backend
    choose.cache_clear()
    kernel_of.cache_clear()
    has_kernel.cache_clear()


def _load() -> None:
    """Import the backends of the table that are not there yet."""
    for name, place in MODULES.items():
        if name not in _BACKENDS and name not in _ABSENT:
            try:
                module = importlib.import_module(place)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("zeropoint"):
                    raise
                _ABSENT[name] = f"needs the package {error.name}, which is not installed"
            except UnsupportedError as error:
                _ABSENT[name] = str(error)
            else:
                register(module.BACKEND)
                _LOADED[name] = module


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
    """Return the dispatch of a request; ``only`` restricts it to one backend.

    Raises UnsupportedError when ``only`` is unknown or cannot run the request, or when nothing can.
    """
    _load()
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
    if not able:
        raise UnsupportedError(f"{request.op.value} of {request.scheme} cannot run: {reasons[REFERENCE]}")
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


@functools.lru_cache(maxsize=4096)
def kernel_of(request: Request, only: str | None = None) -> Kernel:
    """Return the kernel that runs ``request``, prepared once."""
    return choose(request, only).prepare(request)


def kernel_now(request: Request, only: str | None = None) -> Kernel:
    """Return the kernel of a request; seeded kernels are not cached."""
    if not request.scheme.rounding.seed:
        return kernel_of(request, only)
    return choose(request.unseeded, only).prepare(request)


def held_kernel(request: Request, only: str | None, params: Params | None) -> HeldKernel:
    """Return the kernel that runs ``request``, for a plan.

    One that allocates in each run keeps copies of ``params``.
    """
    kernel = kernel_now(request, only)
    backend = choose(request.unseeded, only).name
    held = kernel.hold(params) if isinstance(kernel, PlanKernel) else temporaries_of(backend)
    if isinstance(held, HeldKernel):
        return held
    # Copies: later changes to the caller's tensors must not reach some plans and miss others.
    given = {} if params is None else {"params": [each.detach().clone() for each in params]}

    def run(*inputs: torch.Tensor, **named: Any) -> None:
        with gradual_underflow():
            kernel.run(*inputs, **given, **named)

    nbytes = sum(each.nbytes for each in given.get("params", ()))
    return HeldKernel(run=run, parameter_bytes=nbytes, allocates=held)


def temporaries_of(backend: str) -> str:
    """Reason why the runs of a backend allocate."""
    return f"backend {backend} computes in temporary tensors"


@functools.lru_cache(maxsize=4096)
def has_kernel(request: Request) -> bool:
    """Return whether a backend faster than the reference can run ``request``."""
    return explain(request).chosen != REFERENCE


def counter(x: torch.Tensor, only: str | None = None) -> Counter | None:
    """Return the statistics kernels for ``x``, or None for plain torch."""
    found: Counter | None = _taking("COUNTER", x, only)
    return found


def dense(x: torch.Tensor, only: str | None = None) -> Dense | None:
    """Return the dense-product kernels for ``x``, or None for plain torch."""
    found: Dense | None = _taking("DENSE", x, only)
    return found


def _taking(kernels: str, x: torch.Tensor, only: str | None) -> Any:
    _load()
    asked = [module for name, module in _LOADED.items() if only in (None, name)]
    offers = (getattr(module, kernels, None) for module in asked)
    return next((found for found in offers if found is not None and found.takes(x)), None)
