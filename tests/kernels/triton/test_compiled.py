"""The kernels compile to machine code of a GPU on any host: wide accesses, nothing flushed or spilled."""

from pathlib import Path

import pytest
from tests.kernels.triton.compiled import ptx_of

pytestmark = pytest.mark.rotating

QUICK = "nvfp4"
SLOW = (
    "uint4:g32:asym",
    "int4:g128",
    "mxfp4",
    "nf4:g64",
    "int8:channel",
    "int3:g32",
    "mxfp8_e4m3",
    "float8_e4m3fn:channel",
    "int2:g16",
    "int8:channel:round=stochastic(7)",
    "mxfp4:round=stochastic(7)",
    "float8_e4m3fn:channel:round=floor",
)
KERNELS = {
    "quantize_small_blocks": ("small_blocks", "small blocks", True),
    "quantize_blocks": ("segments", "segments", True),
    "quantize_pieces": ("pieces", "pieces", False),
    "dequantize_pieces": ("pieces", "pieces", False),
    "fake_quantize_pieces": ("pieces", "pieces", False),
    "quantize_tiles": ("matrix_tiles", "transposed", True),
    "fake_quantize_tiles": ("matrix_tiles", "parts", False),
    "tile_extremes": ("matrix_tiles", "parts", True),
}
"""Kernel to its module, how tensors are cut for it, and whether it chooses scales."""
TYPES = {
    "x": "*bf16", "out": "*bf16", "data": "*u8", "notes": "*i32", "tables": "*fp32", "coarse": "*fp32",
    "zeros": "*fp32", "values": "*fp32", "found": "*i32", "least": "*i32", "most": "*i32", "seed": "i32",
}  # fmt: skip


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=pytest.mark.slow) if "tile" in k else k for k in KERNELS]
)
@pytest.mark.parametrize("scheme", [QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)])
def test_kernels_compile_for_a_gpu_to_wide_accesses_without_spills(
    scheme: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, cut, chosen = KERNELS[kernel]
    if ":channel" in scheme and cut in ("small blocks", "transposed"):
        pytest.skip("rows of 8,192 elements are neither small blocks nor in one tile")
    if "stochastic" in scheme and module == "matrix_tiles":
        pytest.skip("noise of tiles takes more registers than there are")
    types = TYPES | {"scales": "*u8" if scheme.startswith(("nvfp4", "mx")) else "*fp32"}
    ptx = ptx_of(module, kernel, scheme, types, cut=cut, chosen=chosen, warps=0)
    assert ("ld.global.v4" if kernel != "dequantize_pieces" else "st.global.v4") in ptx
    assert not any(found in ptx for found in (".ftz", ".f64", ".local"))


RUNS = [1, 1, 1 << 29], [65536, 4096, 1], [1, 131072, 128]
"""A tensor that is one block, blocks that are columns, and small blocks."""
STATISTICS: dict[str, dict[str, int]] = {
    "line_extremes": {},
    "line_bins": {"mantissa_bits": 5},
    "line_sums": {"reach": 28, "each": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("kernel", STATISTICS)
def test_statistics_compile_to_wide_loads_without_spills(
    kernel: str, runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {
        "x": "*bf16",
        "ends": "*i32",
        "limbs": "*i64",
        "counts": "*i32" if kernel == "line_bins" else "*i64",
    }
    ptx = ptx_of("line_statistics", kernel, "int8:channel", types, runs=runs, **STATISTICS[kernel])
    assert "ld.global.v4" in ptx
    assert not any(found in ptx for found in (".ftz", ".f64", ".local"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8:channel", "nvfp4", "uint4:g32:asym", "int3:g32"])
def test_errors_compile_to_wide_loads_without_spills(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | {"out": "*fp64", "scales": "*u8" if scheme == "nvfp4" else "*fp32"}
    ptx = ptx_of("part_errors", "measure_pieces", scheme, types, cut="rows", warps=0)
    assert "ld.global.v4" in ptx
    assert not any(found in ptx for found in (".ftz", ".local"))


WORDS = {"rows": "i32", "columns": "i32", "groups": "i32", "width": "i32", "flip": "i32", "out": "*i32"}
LAYOUTS = {
    "turn_words": ({"words": "*i32", **WORDS}, {"size": 64}),
    "fields_to_words": ({"data": "*u8", **WORDS}, {"size": 32, "places": [0, 2, 4, 6, 1, 3, 5, 7]}),
    "words_to_fields": (
        {"words": "*i32", **WORDS, "out": "*u8"}, {"size": 32, "places": [0, 2, 4, 6, 1, 3, 5, 7]},
    ),
    "move_bits": (
        {"sources": ["*u8"] * 3, "out": "*u8", "moves": "*i32", "flips": "*i32", "count": "i32"},
        {"strides": [128, 12, 2], "size": 144, "terms": 8, "many": 1024},
    ),
}  # fmt: skip
"""Kernel to the types of its arguments, and its constants."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_layouts_compile_without_spills(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types, constants = LAYOUTS[kernel]
    ptx = ptx_of("layouts", kernel, "int8:channel", types, warps=4, **constants)
    assert "st.global.b32" in ptx or kernel == "words_to_fields"


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["tiles", "transposed"])
@pytest.mark.parametrize(
    "scheme", ["float8_e4m3fn:block128x128", "float8_e4m3fn:block16x32", "int8:block32x1"]
)
def test_blocks_that_span_rows_compile_to_wide_accesses_without_spills(
    scheme: str, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = ptx_of(
        "matrix_tiles", "quantize_tiles", scheme, TYPES | {"scales": "*fp32"}, cut=cut, chosen=True, warps=0
    )
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.slow
def test_a_transposed_tile_changes_places_through_shared_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each thread has whole parts of blocks; under another order of a tile's axes they would be shuffled.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | {"scales": "*u8"}
    ptx = ptx_of(
        "matrix_tiles", "quantize_tiles", "mxfp8_e4m3", types, cut="transposed", chosen=True, warps=0
    )
    assert "shfl.sync" not in ptx
