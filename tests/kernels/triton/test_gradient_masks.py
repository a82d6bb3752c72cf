"""Gradients of fake quantization on a GPU: those of the reference, bit for bit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.contract.test_backends import SCHEMES, sample_for
from tests.kernels.triton.compiled import ptx_of
from tests.kernels.triton.interpreter import DEVICE
from tests.kernels.triton.test_schemes import OTHERS, QUICK, SHAPES
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.kernels.triton import BACKEND
from zeropoint.ops.library import request
from zeropoint.ops.reference import float_bounds
from zeropoint.ops.registry import Op, kernel_of
from zeropoint.params.tensors import Params

pytestmark = pytest.mark.rotating

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(x: torch.Tensor, grad: torch.Tensor, scheme: zp.Scheme, params: Params) -> list[torch.Tensor]:
    """Return what the reference makes of ``grad`` on the host, and what the kernel makes of it."""
    asked = request(Op.FAKE_QUANTIZE_BACKWARD, x, scheme)
    expected = kernel_of(asked, "reference").run(grad, x, params)
    here = replace(asked, device=torch.empty(0, device=DEVICE).device)
    moved = grad.to(DEVICE), x.to(DEVICE), [level.to(DEVICE) for level in params]
    return [expected, kernel_of(here, "triton").run(*moved).cpu()]


def assert_same_gradients(x: torch.Tensor, scheme: str, params: Params | None = None) -> None:
    parsed = zp.Scheme.parse(scheme)
    if params is None:
        with zp.only_backend("reference"):
            params = list(zp.quantize(x, parsed).params.stored)
    wide = (x.float() * 1.5).to(x.dtype)
    wide.view(-1)[::7] = x.view(-1)[::7]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    grad.view(-1)[::5] *= -0.0
    expected, found = gradients(wide, grad, parsed, params)
    assert same_bytes(found, expected), (scheme, tuple(x.shape), x.dtype)


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_gradients_are_those_of_the_reference(scheme: str) -> None:
    taken = 0
    for number, shape in enumerate(SHAPES):
        x = sample_for(scheme, shape, DTYPES[number % 3])
        if len(zp.Scheme.parse(scheme).granularity.extents) <= len(shape):
            asked = request(Op.FAKE_QUANTIZE_BACKWARD, x.to(DEVICE), zp.Scheme.parse(scheme))
            if BACKEND.refusal(asked) is None:
                assert_same_gradients(x, scheme)
                taken += 1
    assert taken >= 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_of_every_scheme_are_those_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    parsed = zp.Scheme.parse(scheme)
    for shape in ((4, 256), (130, 33), (2, 2, 3, 48)):
        x = sample_for(scheme, shape, dtype)
        asked = request(Op.FAKE_QUANTIZE_BACKWARD, x.to(DEVICE), parsed)
        if len(parsed.granularity.extents) <= len(shape) and BACKEND.refusal(asked) is None:
            assert_same_gradients(x, scheme)


@pytest.mark.parametrize("scheme", [
    "int8:channel", "int3:channel", "uint8:channel:asym", "uint4:channel:asym=real", "float8_e4m3fn:channel",
    "float8_e5m2:channel", "float4_e2m1fn:channel", "e4m0:channel", "nf4:channel",
    "int4:channel:scale=input:dialect=compressed-tensors",
])  # fmt: skip
def test_values_next_to_the_ends_of_codes_are_clipped_as_by_the_reference(scheme: str) -> None:
    parsed = zp.Scheme.parse(scheme)
    scales = torch.tensor([1.0, 0.007, 3e-30, 2.0**-120, 1.7e20, 2.0**60])
    for dtype in DTYPES[:2]:
        start = zp.quantize(torch.ones(6, 4, dtype=dtype), parsed).params.stored
        params = [scales.to(start[0].dtype)[:, None], *(level.clone() for level in start[1:])]
        used = params[0].double()
        zero = float(params[1].double()[0, 0]) if len(params) > 1 else 0.0
        near = [end + off - zero for end in float_bounds(parsed)[:2] for off in (-1, -0.5, 0, 0.5, 1)]
        near += [float(parsed.element.max), float(parsed.element.min), 0.0]
        middle = (used * torch.tensor(near, dtype=torch.float64)).float()
        around = [(middle.view(torch.int32) + step).view(torch.float32) for step in range(-2, 3)]
        x = torch.cat(around, 1)
        x = torch.where(torch.isfinite(x), x, 1.0).to(dtype)
        grad = torch.full_like(x, -1.0)
        expected, found = gradients(x, grad, parsed, params)
        assert same_bytes(found, expected)
        if dtype is torch.float32:
            assert (expected == 0).any()
            assert (expected != 0).any()


def test_what_is_not_finite_has_no_gradient_and_nan_gradients_keep_their_bits() -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, -1.0, 0.0]] * 3)
    grad = torch.tensor([[1.0, -1.0, -math.nan, math.nan, -2.0, 3.0]] * 3)
    for dtype in DTYPES:
        scales = torch.tensor([[1.0], [0.0], [math.inf]])
        for scheme in ("int8:channel", "float8_e4m3fn:channel"):
            given = grad.to(dtype)
            given.view(-1)[3:4].view(torch.int16)[:1] += 5  # another NaN than that of arithmetic
            expected, found = gradients(x.to(dtype), given, zp.Scheme.parse(scheme), [scales])
            assert same_bytes(found, expected)
            assert found[0, :3].tolist()[:2] == [0.0, -0.0]


def test_a_range_of_codes_ends_gradients() -> None:
    x, scheme = torch.linspace(-20, 20, 81).reshape(1, 81), zp.Scheme.parse("int8:channel")
    asked = replace(request(Op.FAKE_QUANTIZE_BACKWARD, x.to(DEVICE), scheme), code_range=(-5, 7))
    ones = torch.ones_like(x).to(DEVICE)
    found = kernel_of(asked, "triton").run(ones, x.to(DEVICE), [torch.ones(1, 1, device=DEVICE)]).cpu()
    assert x[found != 0].tolist() == [step / 2 for step in range(-10, 15)]


@pytest.mark.parametrize("scheme", [
    "nvfp4", "mxfp8_e4m3",
    *(pytest.param(s, marks=pytest.mark.slow) for s in ("int4:g128", "uint4:g32:asym")),
])  # fmt: skip
def test_the_kernel_compiles_to_wide_accesses(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scales = "*u8" if scheme.startswith(("nvfp4", "mx")) else "*fp32"
    floats = dict.fromkeys(("tables", "coarse", "zeros", "ends"), "*fp32")
    arguments = {"x": "*bf16", "grad": "*i16", "out": "*i16", "scales": scales, "seed": "i32"} | floats
    ptx = ptx_of("gradient_masks", "pass_within", scheme, arguments, cut="pieces", warps=0)
    assert ptx.count("ld.global.v4") >= 2
    assert "st.global.v4" in ptx
    assert not any(found in ptx for found in (".ftz", ".f64", ".local"))
