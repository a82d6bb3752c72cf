"""What the Triton kernels refuse, and the table of what they offer."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from ...formats import RoundingMode
from ...formats.torch_dtypes import dtype_of, format_of
from ...ops import linear
from ...ops.lowering_refusals import element_refusal, rule_refusal
from ...ops.registry import HeldKernel, Kernel, Op, Request
from ...params.arithmetic import multiplies, rounder
from ...params.tensors import Params
from ...schemes import Scheme
from . import layout_launch
from .chained_launch import ChainedLevels
from .launches import Launch
from .linear_launch import LinearCodes, LinearValues, codes_refusal, input_request
from .piece_cuts import pieces_of
from .search_launch import SearchedScales, search_refusal
from .value_launches import Backward, ErrorMeasure

INTERPRETER = "TRITON_INTERPRET"
"""The variable of the environment that has Triton's interpreter run kernels on tensors of the host.

Triton reads it when the kernels are loaded, so that it must be set before the first call.
"""
OLDEST = 3, 6
"""Version of Triton; before it, ``div_rn`` took subnormal float32 for zero on a GPU."""
_LAYERS = (Op.LINEAR, Op.LINEAR_VALUES)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_DECODING = (Op.DEQUANTIZE, Op.MEASURE)
_ROUNDING = (Op.QUANTIZE, Op.QUANTIZE_DYNAMIC, Op.FAKE_QUANTIZE, Op.FAKE_QUANTIZE_BACKWARD)


class TritonBackend:
    """Triton kernels for CUDA tensors, or host tensors under the interpreter."""

    name = "triton"
    rank = 5

    def refusal(self, request: Request) -> str | None:
        missing = device_refusal(request.device)
        if missing is not None:
            return missing
        if request.op not in _LAUNCHES:
            return f"{request.op.value} is left to the reference"
        if request.op in layout_launch.OPS:
            return layout_launch.refusal(request)
        if request.dtype not in _DTYPES or request.own_dtype not in _DTYPES:
            return f"{request.dtype} is computed in float64"
        reason = self._layer_refusal(request) if request.op in _LAYERS else None
        reason = reason or _scheme_refusal(request)
        found = pieces_of(request.scheme.granularity, request.shape, request.scheme.bits)
        return reason or (found if isinstance(found, str) else None)

    def _layer_refusal(self, request: Request) -> str | None:
        if request.shape[1] == 0:
            return "there is nothing to multiply"
        if request.op is Op.LINEAR_VALUES:
            return None
        reason = linear.refusal(request) or codes_refusal(request)
        return reason or self.refusal(input_request(request, 2))

    def prepare(self, request: Request) -> Kernel:
        return _Kernel(request)


def device_refusal(device: torch.device) -> str | None:
    """Return why no kernel runs where tensors are on ``device``, or None."""
    interpreted = os.environ.get(INTERPRETER) == "1" and device.type == "cpu"
    if device.type != "cuda" and not interpreted:
        return f"the data is on {device}"
    return _triton_refusal()


@functools.cache
def _triton_refusal() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    found = importlib.import_module("triton").__version__  # whatever package brought it
    numbers = tuple(int(part) for part in found.split(".")[:2])
    return None if numbers >= OLDEST else f"triton {found} takes subnormal quotients for zero; 3.6 does not"


def _scheme_refusal(request: Request) -> str | None:
    scheme, element, op = request.scheme, request.scheme.element, request.op
    if element.per_code > 1 or element.per_scale > 1:
        return (
            f"{element.kind} codes of several values, or tables of blocks, are known to the reference alone"
        )
    if multiplies(scheme) and rounder(scheme, request.own_dtype) is not None:
        return "reciprocals of 16 bits are known to the reference alone"
    if scheme.offsets and op in _LAYERS:
        return "offsets are known to the reference alone"
    chooses, dtype = op in (Op.CHOOSE_PARAMS, Op.QUANTIZE_DYNAMIC) and bool(scheme.scales), request.own_dtype
    searches = op is Op.SEARCH_PARAMS or (chooses and scheme.search is not None)
    chained = scheme.chained is not None and not searches
    given = chained or not (chooses or searches)
    reason = element_refusal(scheme, decoding=op in (*_DECODING, *_LAYERS), given=given, rounds=not searches)
    if reason is None and searches:
        reason = search_refusal(request)
    if reason is None and chooses and not chained:
        reason = rule_refusal(scheme.start, dtype) or _scale_refusal(scheme.start, dtype)
    return reason


def _scale_refusal(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Reason why no kernel chooses the finest scales.

    Of small floats it knows e4m3 under a coarse scale.
    """
    first = scheme.scales[0]
    held = (torch.float8_e4m3fn,) if len(scheme.scales) > 1 else _DTYPES
    known = first.rule.power_of_two or dtype_of(first.format_for(format_of(dtype))) in held
    return None if known else f"scales of level {first} are chosen by the reference"


def _choosing(request: Request) -> Launch | SearchedScales | ChainedLevels:
    if request.scheme.search is not None:
        return SearchedScales(request)
    return Launch(request) if request.scheme.chained is None else ChainedLevels(request)


_LAUNCHES: dict[Op, Callable[[Request], Any]] = {
    Op.CHOOSE_PARAMS: _choosing,
    Op.QUANTIZE: Launch,
    Op.QUANTIZE_DYNAMIC: _choosing,
    Op.DEQUANTIZE: Launch,
    Op.FAKE_QUANTIZE: Launch,
    Op.FAKE_QUANTIZE_BACKWARD: Backward,
    Op.SEARCH_PARAMS: SearchedScales,
    Op.MEASURE: ErrorMeasure,
    Op.LINEAR: LinearCodes,
    Op.LINEAR_VALUES: LinearValues,
    **dict.fromkeys(layout_launch.OPS, layout_launch.Layouts),
}
"""What starts the kernels of each operator, in a method of the operator's name."""


@functools.lru_cache(maxsize=1024)
def _launch_of(request: Request) -> Any:
    """Return the launch of a request, which serves all seeds."""
    return _LAUNCHES[request.op](request)


class _Kernel:
    """Kernels of one request and its seed."""

    def __init__(self, request: Request) -> None:
        self.launch, self._seeded = _launch_of(request.unseeded), {}
        if request.scheme.rounding.mode is RoundingMode.STOCHASTIC and request.op in _ROUNDING:
            self._seeded = {"seed": request.scheme.rounding.seed}
        run = getattr(self.launch, request.op.value)
        self.run = functools.partial(run, **self._seeded) if self._seeded else run

    def hold(self, params: Params | None) -> HeldKernel | str:
        held: HeldKernel | str = self.launch.hold(params, **self._seeded)
        return held


BACKEND = TritonBackend()
