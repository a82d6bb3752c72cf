"""Searches of scales on a GPU: the bytes of the reference."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.cpu.test_parameter_searches import importances, numbers, whole_numbers
from tests.kernels.triton.compiled import ptx_of
from tests.kernels.triton.interpreter import DEVICE
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.kernels.triton import BACKEND
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, kernel_of
from zeropoint.params.tensors import Params

pytestmark = pytest.mark.rotating

SCHEMES = ("nvfp4", "mxfp4", "mxfp8", "int4:g32:scale=ue4m3", "mxint8", "nf4:g64:scale=e8m0", "nvfp4a16")
MORE = (
    "int8_mx:g32:scale=e8m0", "e2m3:g32:scale=ue5m3", "e3m0:g32:scale=e8m0", "int4:g16:scale=ue4m3",
    "mxfp6_e2m3",
    "nvfp4:dialect=modelopt", "nvfp4:dialect=compressed-tensors", "float8_e4m3fn:g128:scale=e8m0",
    "int4:g256:scale=e8m0", "fp4_bnb:g8:scale=e8m0",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def start_of(x: torch.Tensor, scheme: zp.Scheme) -> Params:
    with zp.only_backend("reference"):
        return list(zp.quantize(x, scheme).params.stored)


def assert_same_scales(
    x: torch.Tensor, scheme: str, importance: torch.Tensor | None = None, start: Params | None = None
) -> Params:
    """Compare with the reference, and return the scales."""
    parsed = zp.Scheme.parse(scheme)
    start = start_of(x, parsed) if start is None else start
    asked = request(Op.SEARCH_PARAMS, x, parsed)
    expected = kernel_of(asked, "reference").run(x, start, importance)
    here = replace(asked, device=torch.empty(0, device=DEVICE).device)
    assert BACKEND.refusal(here) is None, BACKEND.refusal(here)
    weights = None if importance is None else importance.to(DEVICE)
    found = kernel_of(here, "triton").run(x.to(DEVICE), [level.to(DEVICE) for level in start], weights)
    for mine, theirs in zip(found, expected, strict=True):
        assert same_bytes(mine.cpu().view(torch.uint8), theirs.view(torch.uint8)), (scheme, x.dtype)
    return list(expected)


@pytest.mark.parametrize("scheme", [*SCHEMES, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
def test_scales_of_least_error_are_those_of_the_reference(scheme: str) -> None:
    for x in (numbers(torch.bfloat16, scheme, 512), whole_numbers(torch.float32)[:, :256].contiguous()):
        assert_same_scales(x, scheme)


@pytest.mark.parametrize("scheme", [
    "mxfp4", *(pytest.param(s, marks=pytest.mark.slow) for s in ("nvfp4", *SCHEMES[2:4], *MORE)),
])  # fmt: skip
def test_weighted_errors_are_least_as_in_the_reference(scheme: str) -> None:
    x = numbers(torch.float32, scheme, 256)
    for importance in importances(256).values():
        if importance is not None:
            assert_same_scales(x, scheme, importance)


@pytest.mark.slow
@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_dtypes_have_the_scales_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    assert_same_scales(numbers(dtype, scheme, 256), scheme)


def test_any_start_is_kept_or_replaced_as_by_the_reference() -> None:
    x = whole_numbers(torch.float32)[:, :128].contiguous()
    scheme = zp.Scheme.parse("nvfp4")
    fine, coarse = start_of(x, scheme)
    every = torch.arange(fine.numel()).reshape(fine.shape)
    # All codes that are not negative, such as those of zero and NaN.
    for first in (0, 64):
        codes = ((every + first) % 128).to(torch.uint8)
        assert_same_scales(x, "nvfp4", start=[codes.view(fine.dtype), coarse])


@pytest.mark.slow
def test_scales_of_the_tensor_that_lose_blocks_or_reach_the_ends_of_float32_change_no_byte() -> None:
    x = numbers(torch.float32, "nvfp4", 64)
    fine, _ = start_of(x, zp.Scheme.parse("nvfp4"))
    for coarse in (0.0, 2.0**-149, 2.0**-100, 3e-5, 1.0, 1e30):
        assert_same_scales(x, "nvfp4a16", start=[fine, torch.full((1, 1), coarse)])


@pytest.mark.parametrize("shape", [(17, 32), (3, 5, 64), (64,), (0, 32), (1, 16)], ids=str)
def test_tensors_of_any_shape_are_searched(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    parsed = zp.Scheme.parse("nvfp4")
    start = start_of(x, parsed)
    asked = replace(request(Op.SEARCH_PARAMS, x, parsed), device=torch.empty(0, device=DEVICE).device)
    found = kernel_of(asked, "triton").run(x.to(DEVICE), [level.to(DEVICE) for level in start])
    expected = kernel_of(request(Op.SEARCH_PARAMS, x, parsed), "reference").run(x, start)
    assert same_bytes(found[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("scheme", ["nvfp4:scale=search", "mxfp4:scale=search", "int4:g128:scale=search"])
def test_the_rule_that_searches_gives_the_bytes_of_the_reference(scheme: str) -> None:
    x = numbers(torch.bfloat16, scheme, 128)
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
    with zp.only_backend("triton"):
        found = zp.quantize(x.to(DEVICE), scheme).to("cpu")
        chosen = zp.choose_params(x.to(DEVICE), scheme).to("cpu")
    assert same_bytes(found.data, expected.data)
    for levels in (found.scales, chosen.scales):
        assert all(
            same_bytes(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(levels, expected.scales, strict=True)
        )


def test_the_rule_that_searches_refuses_what_is_not_finite_with_its_place() -> None:
    x = torch.ones(4, 64)
    x[2, 33] = float("nan")
    with zp.only_backend("triton"), pytest.raises(zp.NonFiniteError, match=r"at \(2, 33\)"):
        zp.quantize(x.to(DEVICE), "nvfp4:scale=search")


@pytest.mark.parametrize(("scheme", "reason"), [
    ("int4:g256", "scales of level float32@g256 of blocks of 256 values are searched by the reference"),
    ("float8_e4m3fn:g32", "scales of level float32@g32 of blocks of 32 values are searched"),
    ("uint4:g32:asym", "level after level and with zero points"),
    ("mxfp4:scale=search2.4", "scales of rule search2.4 are searched by the reference"),
    ("nvfp4:scale=four_over_six", "scales of rule four_over_six are searched by the reference"),
    ("int4:g48:scale=ue4m3", "blocks of 48 values"), ("mxfp4:block4x32", "blocks of 128 values"),
])  # fmt: skip
def test_what_no_kernel_searches_has_a_reason(scheme: str, reason: str) -> None:
    x = torch.ones(4, 768, device=DEVICE)
    refused = BACKEND.refusal(request(Op.SEARCH_PARAMS, x, zp.Scheme.parse(scheme)))
    assert refused is not None
    assert reason in refused


NEARLY = {"x": "*bf16", "scales": "*u8", "coarse": "*fp32", "unsure": "*i32", "count": "*i32"}
EXACTLY = NEARLY | {"weights": "*fp64", "table": "*fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_compile_without_spills_and_add_float64_without_contraction(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = zp.Scheme.parse(scheme).granularity.block_shape((64, 1024))[-1]
    for weighted in (False, True):
        sweep = {"listed": not weighted, "weighted": weighted, "many": 256 // size}
        ptx = ptx_of("scale_sweeps", "sweep_exactly", scheme, EXACTLY, sweep=sweep)
        assert not any(found in ptx for found in (".ftz", "fma.rn.f64", ".local"))
    if not scheme.startswith("nf4"):
        ptx = ptx_of("scale_sweeps", "sweep_nearly", scheme, NEARLY, sweep={}, fused=True)
        assert "ld.global.v4" in ptx
        assert not any(found in ptx.replace("rcp.approx.ftz", "") for found in (".ftz", ".f64", ".local"))
