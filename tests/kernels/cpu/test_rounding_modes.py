"""Rounding otherwise than half to even: the kernels give what the reference gives, ties included."""

import random

import pytest
import torch
from tests.contract.test_random_schemes import agree, checks
from tests.tables import each

import zeropoint as zp
from zeropoint.formats import RoundingMode
from zeropoint.ops.registry import Op, Request, explain
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


@pytest.mark.crossed
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


def test_searches_under_other_modes_are_left_to_the_reference() -> None:
    found = zp.explain(torch.ones(4, 32), "int4:g32:scale=search:round=half_away")
    assert found.chosen == "reference"
    assert found.reasons["cpu"] == "rounding half_away is not to nearest even"
