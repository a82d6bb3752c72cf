"""Scales that fit integer codes, found on a GPU: the bytes of the reference."""

from pathlib import Path

import pytest
import torch
from tests.kernels.cpu.test_parameter_searches import importances, numbers, whole_numbers
from tests.kernels.triton.compiled import ptx_of
from tests.kernels.triton.test_scale_sweeps import DTYPES, assert_same_scales, start_of
from tests.tensors import same_bytes

import zeropoint as zp

pytestmark = pytest.mark.rotating

SCHEMES = ("int4:g128", "int8:g32", "int3:g16:scale=float16", "int4:g64:scale=bfloat16")
MORE = ("int4:g32:scale=input", "int2:g8", "int5:g64", "int8:g128", "int4:g32:narrow")


@pytest.mark.parametrize("scheme", [*SCHEMES, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
def test_scales_that_fit_codes_are_those_of_the_reference(scheme: str) -> None:
    for x in (numbers(torch.bfloat16, scheme, 256), whole_numbers(torch.float32)[:, :128].contiguous()):
        found, start = assert_same_scales(x, scheme), start_of(x, zp.Scheme.parse(scheme))
        assert not same_bytes(found[0], start[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, *MORE])
def test_all_dtypes_have_fitted_scales_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    for x in (numbers(dtype, scheme, 256), torch.randn(40, 256).to(dtype)):
        assert_same_scales(x, scheme)


def test_numbers_at_the_ends_of_float32_are_fitted_as_by_the_reference() -> None:
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(3))
    x *= torch.tensor([1e-45, 1e-42, 1e-38, 1e-30, 0.0, 1.0, 1e30, 1e37, 6e37])[:, None]
    for start in (1.0, 1e-38, 1e36, 0.0):
        assert_same_scales(x, "int4:g128", start=[torch.full((9, 1), start)])


def test_weighted_fits_are_left_to_plain_torch_with_the_same_bytes() -> None:
    assert_same_scales(numbers(torch.float32, "int4:g128", 128), "int4:g128", importances(128)["columns"])


ARGUMENTS = {
    "x": "*bf16", "ratios": "*fp32", "scales": "*fp64", "largest": "*fp32", "first": "*fp32",
    "second": "*fp32", "table": "*fp32", "better": "*u8", "blocks": "i32",
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "blocks"), [("fit_scales", 8), ("compare_scales", 2)])
def test_kernels_of_fits_compile_without_spills_or_contraction(
    kernel: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = ptx_of("scale_fits", kernel, "int4:g128", ARGUMENTS, fit={"many": blocks})
    assert "ld.global.v" in ptx
    assert not any(found in ptx for found in (".ftz", "fma.rn.f64", ".local"))
