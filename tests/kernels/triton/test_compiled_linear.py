"""Kernels of linear layers compile to products of tensor cores, without spills, and flush nothing."""

from pathlib import Path

import pytest
from tests.kernels.triton.compiled import ptx_of

pytestmark = pytest.mark.rotating

TYPES = {
    "out": "*bf16", "data": "*u8", "tables": "*fp32", "coarse": "*fp32", "zeros": "*fp32", "values": "*fp32",
    "bias": "*bf16", "x_scales": "*fp32", "x_zeros": "*i32",
}  # fmt: skip
SLOW = [
    pytest.param(scheme, tokens, marks=pytest.mark.slow)
    for scheme in (
        "int4:g128",
        "mxfp4",
        "nf4:g64",
        "uint4:g32:asym",
        "int8:channel",
        "int3:g32",
        "float8_e4m3fn:channel",
    )
    for tokens in (16, 64, 128)
]
CODES = [("int8:channel", 300)] + [
    pytest.param(scheme, tokens, marks=pytest.mark.slow)
    for scheme in ("int8:channel", "int4:g128", "int4:channel", "int8:g32")
    for tokens in (1, 40, 300)
]


def assert_sound(ptx: str, instruction: str) -> None:
    assert instruction in ptx
    assert "cp.async" in ptx, "tiles are not read ahead of their use"
    assert not any(found in ptx for found in (".ftz", ".f64", ".local"))


@pytest.mark.parametrize(
    ("scheme", "tokens"), [("nvfp4", 128), pytest.param("nvfp4", 1, marks=pytest.mark.slow), *SLOW]
)
def test_values_are_multiplied_on_tensor_cores(
    scheme: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    paired = tokens <= 16 and "4" in scheme.partition(":")[0].replace("float8_e4m3fn", "")
    types = TYPES | {"x": "*i32" if paired else "*bf16"}
    types["scales"] = "*u8" if scheme.startswith(("nvfp4", "mx")) else "*fp32"
    ptx = ptx_of("value_products", "multiply_values", scheme, types, cut="values", tokens=tokens, warps=0)
    assert_sound(ptx, "mma.sync" if tokens <= 16 else "wgmma.mma_async")


@pytest.mark.parametrize(("scheme", "tokens"), CODES)
def test_codes_are_multiplied_on_tensor_cores(
    scheme: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | {"x": "*i8", "scales": "*fp32"}
    if scheme.startswith("int8"):
        types["data"] = "*i8"
    ptx = ptx_of("code_products", "multiply_codes", scheme, types, cut="codes", tokens=tokens, warps=0)
    assert_sound(ptx, "mma.sync" if tokens <= 16 else "wgmma.mma_async")
