"""Triton's kernels have the bytes of the reference under all schemes and shapes that they take."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.test_backends import SCHEMES, sample_for
from tests.kernels.triton.interpreter import DEVICE
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.kernels.triton import BACKEND
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of

pytestmark = pytest.mark.rotating

SHAPES = ((4, 256), (3, 5, 70), (1, 2061), (17,), ())
QUICK = (
    "int8:channel", "int4:g128", "int3:g32", "uint4:g32:asym", "uint8:token:asym=real", "mxfp4", "nvfp4",
    "nf4:g64", "float8_e4m3fn:block16x32", "int4:g128:scale=input:dialect=compressed-tensors", "mxint8",
    "fp4_bnb:g64", "float8_e5m2fnuz:token", "e4m0:token", "nvfp4:dialect=modelopt", "int8:tensor:asym",
)  # fmt: skip
OTHERS = (
    "int8:g64", "int8:tensor", "int2:g16", "int5:g40", "int6:token", "int7:g24",
    "uint4:g32:asym:scale=float16", "mxfp8_e4m3", "mxfp6_e2m3", "float8_e4m3fn:channel",
    "binary:g32", "mxfp4:scale=even",
)  # fmt: skip


def run(backend: str, op: Op, x: torch.Tensor, scheme: zp.Scheme, *arguments: Any) -> list[torch.Tensor]:
    """Return all that an operator returns, on the host."""
    device = DEVICE if backend == "triton" else "cpu"
    moved = [[t.to(device) for t in a] if isinstance(a, list) else a.to(device) for a in arguments]
    found = kernel_of(request(op, x.to(device), scheme), backend).run(*moved)
    data, params = found if op is Op.QUANTIZE_DYNAMIC else (found, [])
    return [t.cpu() for t in (*(data if isinstance(data, (list, tuple)) else [data]), *params)]


def calls(x: torch.Tensor, scheme: zp.Scheme) -> Iterator[tuple[Op, tuple[Any, ...]]]:
    """Yield the operators with their arguments; values given to the last two are clipped in part."""
    data, *params = run("reference", Op.QUANTIZE_DYNAMIC, x, scheme, x)
    yield Op.CHOOSE_PARAMS, (x,)
    yield Op.QUANTIZE_DYNAMIC, (x,)
    yield Op.DEQUANTIZE, (data, params)
    yield Op.QUANTIZE, (x * 1.5, params)
    yield Op.FAKE_QUANTIZE, (x * 1.5, params)


def assert_same_bytes(x: torch.Tensor, scheme: zp.Scheme) -> int:
    """Compare all operators that the backend takes, and return their number."""
    taken = 0
    for op, arguments in calls(x, scheme):
        on_device = request(op, torch.empty_like(x, device=DEVICE), scheme)
        if BACKEND.refusal(on_device) is not None:
            continue
        taken += 1
        expected, found = (run(name, op, x, scheme, *arguments) for name in ("reference", "triton"))
        assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True)), (
            op,
            tuple(x.shape),
            x.dtype,
        )
    return taken


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_schemes_that_are_taken_have_the_bytes_of_the_reference(scheme: str) -> None:
    parsed, taken = zp.Scheme.parse(scheme), 0
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    for shape, dtype in zip(SHAPES, dtypes, strict=False):
        if len(parsed.granularity.extents) <= len(shape):
            taken += assert_same_bytes(sample_for(scheme, shape, dtype), parsed)
    assert taken >= 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_bytes_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    parsed = zp.Scheme.parse(scheme)
    for shape in (*SHAPES, (130, 33), (2, 2, 3, 48), (8, 256)):
        if len(parsed.granularity.extents) <= len(shape):
            assert_same_bytes(sample_for(scheme, shape, dtype), parsed)


def test_long_rows_are_cut_into_segments() -> None:
    for scheme, shape in (
        ("int8:channel", (2, 20000)),
        ("int4:g16384", (2, 32768)),
        ("int8:tensor", (3, 9001)),
    ):
        parsed = zp.Scheme.parse(scheme)
        assert assert_same_bytes(sample_for(scheme, shape, torch.bfloat16), parsed) == 5


def test_a_range_of_codes_is_kept() -> None:
    x, scheme = torch.linspace(-20, 20, 64).reshape(1, 64), zp.Scheme.parse("int8:channel")
    asked = request(Op.QUANTIZE, x.to(DEVICE), scheme)
    narrow = replace(asked, code_range=(-5, 7))
    data = kernel_of(narrow, "triton").run(x.to(DEVICE), [torch.ones(1, 1, device=DEVICE)])
    codes = data.cpu().view(torch.int8)
    assert (int(codes.min()), int(codes.max())) == (-5, 7)


@pytest.mark.crossed
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["int4:g32", "mxfp4", "nvfp4", "int8:tensor", "uint4:g32:asym", "nf4:g64"])
def test_numbers_that_are_not_finite_are_refused_with_their_place(scheme: str, bad: float) -> None:
    x = torch.ones(4, 64)
    x[2, 33] = bad
    with zp.only_backend("triton"):
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 33\)"):
            zp.quantize(x.to(DEVICE), scheme)
        params = zp.quantize(torch.ones(4, 64).to(DEVICE), scheme).params
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 33\)"):
            zp.quantize(x.to(DEVICE), params)


def test_scales_that_do_not_fit_are_refused_as_by_the_reference() -> None:
    x = torch.full((2, 64), 1e30)
    for scheme, message in (("int4:g32:scale=float16", "does not fit"), ("uint4:g32", "no negative numbers")):
        with zp.only_backend("triton"), pytest.raises(zp.RangeError, match=message):
            zp.quantize((-x if scheme == "uint4:g32" else x).to(DEVICE), scheme)
