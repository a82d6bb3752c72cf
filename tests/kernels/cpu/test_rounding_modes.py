"""Rounding otherwise than half to even: the kernels give what the reference gives, ties included."""

import random

import pytest
import torch
from tests.contract.test_random_schemes import agree, checks
from tests.tables import each

import zeropoint as zp
from zeropoint.formats import RoundingMode
from zeropoint.ops import library
from zeropoint.ops.registry import Op, Request, explain
from zeropoint.ops.threads import gradual_underflow
from zeropoint.schemes import Scheme

MODES = [mode for mode in RoundingMode if mode not in (RoundingMode.HALF_EVEN, RoundingMode.STOCHASTIC)]
SCHEMES = (
    "int8:channel",
    "int4:g32:narrow",
    "uint4:g16:asym",
    "uint8:g32:asym:dialect=burn",
    "int8:tensor:dialect=torch",
    "float8_e4m3fn:channel",
    "float8_e5m2:g32",
    "float4_e2m1fn:g32:scale=float8_e8m0fnu",
    "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor:dialect=compressed-tensors",
)
SUMS = "int8:g32:dialect=ggml"
"""Rounds half up by a sum of float32; scales of zero leave other operators to the reference."""
OPERATORS = (
    Op.QUANTIZE_DYNAMIC,
    Op.CHOOSE_PARAMS,
    Op.QUANTIZE,
    Op.FAKE_QUANTIZE,
    Op.FAKE_QUANTIZE_BACKWARD,
    Op.DEQUANTIZE,
)


def _ties(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of which many lie in the middle of two codes: of integers up to 127, and of floats."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-254, 255, (1040, 512), generator=generator).float() / 2
    x[:, ::32] = 127.0
    x[5], x[6, ::3], x[7] = 0.0, -0.0, x[7] * 2.0**-130
    return x.to(dtype)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("scheme", [*SCHEMES, SUMS])
def test_bytes_values_and_gradients_are_those_of_the_reference(
    scheme: str, mode: RoundingMode, dtype: torch.dtype
) -> None:
    x, rounded = _ties(dtype), Scheme.parse(f"{scheme}:round={mode.value}")
    for what, expected, found in checks(random.Random(0), rounded, x):
        assert agree(expected, found), what


@each("scheme, mode", [(scheme, mode) for scheme in SCHEMES for mode in MODES])
def test_kernels_run_every_mode_but_the_stochastic_one(scheme: str, mode: RoundingMode) -> None:
    for operator in OPERATORS:
        request = Request(
            op=operator, scheme=Scheme.parse(f"{scheme}:round={mode.value}"), shape=(64, 512),
            dtype=torch.bfloat16, own_dtype=torch.bfloat16, device=torch.device("cpu"),
        )  # fmt: skip
        assert explain(request).chosen == "cpu", operator


SEARCHED = (
    "int4:g128:scale=search", "int8:channel:scale=search", "uint4:g32:scale=search",
    "float8_e4m3fn:g64:scale=search", "mxfp4:scale=search", "nvfp4:scale=search", "e3m0:g32:scale=search",
    "int4:g32:scale=search2.4", "nvfp4:scale=search2.4",
)  # fmt: skip
FITTED = ("int4:g128:asym", "uint4:g64:asym=real", "int8:channel:asym", "uint4:g32:asym:dialect=burn")
NEAREST = [mode for mode in MODES if mode.to_nearest]


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", NEAREST, ids=[mode.value for mode in NEAREST])
@pytest.mark.parametrize("scheme", SEARCHED)
def test_searched_scales_are_those_of_the_reference(
    scheme: str, mode: RoundingMode, dtype: torch.dtype
) -> None:
    x = _ties(dtype)[:8]
    x = x.abs() if scheme.startswith("uint") else x
    found = []
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend):
            q = zp.quantize(x, f"{scheme}:round={mode.value}")
        found.append([q.data, *(level.view(torch.uint8) for level in q.params.stored)])
    assert all(map(torch.equal, *found))


@pytest.mark.rotating
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("scheme", [*FITTED, "float8_e4m3fn:g64", "int4:g128", "nvfp4a16"])
def test_searched_parameters_are_those_of_the_reference(
    scheme: str, mode: RoundingMode, weighted: bool
) -> None:
    x, rounded = _ties(torch.bfloat16)[:8], Scheme.parse(f"{scheme}:round={mode.value}")
    weights = torch.rand(512, generator=torch.Generator().manual_seed(1)).double() if weighted else None
    start, found = zp.quantize(x, rounded).params.stored, []
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend), gradual_underflow():
            found.append(library.kernel_for(Op.SEARCH_PARAMS, x, rounded).run(x, start, weights))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))
