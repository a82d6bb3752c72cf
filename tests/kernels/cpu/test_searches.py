"""The compiled searches of llama.cpp against the reference, byte for byte, and with their threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.oracles import ggml_golden

import zeropoint as zp
from zeropoint.kernels.cpu.least_error import table_scales
from zeropoint.ops import library
from zeropoint.ops.ggml import block_types, table_blocks
from zeropoint.ops.registry import Op, explain
from zeropoint.ops.threads import thread_limit

SCHEMES = (
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0",
    "mxfp4_e2m1", block_types.NVFP4, "iq4_nl", "iq4_xs",
)  # fmt: skip
IMPORTANCES = ggml_golden.importances()


def searched(x: torch.Tensor, scheme: str, importance: torch.Tensor | None, only: str) -> list[torch.Tensor]:
    with zp.only_backend(only):
        data, params = library.kernel_for(Op.SEARCH, x, zp.Scheme.parse(scheme)).run(x, importance)
    return [data, *(level.view(torch.uint8) for level in params)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.crossed
@pytest.mark.parametrize("given", IMPORTANCES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_give_the_bytes_of_the_reference(scheme: str, given: str) -> None:
    x, values = torch.from_numpy(ggml_golden.weight()), IMPORTANCES[given]
    importance = None if values is None else torch.from_numpy(values)
    assert same(searched(x, scheme, importance, "cpu"), searched(x, scheme, importance, "reference"))


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(256,), (0, 256), (3, 256), (2, 3, 768), (5, 1280)], ids=str)
def test_shapes_and_dtypes_make_no_difference_to_a_block(scheme: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(shape, generator=generator).to(dtype)
        importance = torch.rand(shape[-1], generator=generator)
        for given in (None, importance):
            assert same(searched(x, scheme, given, "cpu"), searched(x, scheme, given, "reference"))


def test_the_table_of_kernels_is_that_of_the_format() -> None:
    values = [zp.get_format("iq4").number(code) for code in range(16)]
    assert list(table_scales.LEVELS) == values == list(table_blocks.LEVELS)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 23])
def test_blocks_past_the_last_sixteen_are_written_and_no_more(rows: int) -> None:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    assert same(searched(x, "iq4_nl", None, "cpu"), searched(x, "iq4_nl", None, "reference"))


def test_the_number_of_threads_changes_no_byte() -> None:
    x = torch.randn(1024, 1280, generator=torch.Generator().manual_seed(1))
    found = []
    for count in (1, 2, 3):
        with thread_limit(count):
            found.append(searched(x, "q4_k", None, "cpu"))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_scales_past_float16_are_an_error_here_too() -> None:
    x = torch.full((1, 256), 1e30) * torch.linspace(-1, 1, 256)
    for only in ("cpu", "reference"):
        with pytest.raises(zp.errors.RangeError, match=r"where llama.cpp writes one that is not finite"):
            searched(x, "q4_k", None, only)


@pytest.mark.parametrize("scheme", ["q4_k", "q6_k", "q3_k", "q8_0", "q4_1", "iq4_nl", "iq4_xs"])
def test_a_number_that_is_not_finite_is_named(scheme: str) -> None:
    for bad in (torch.nan, -torch.inf):
        x = torch.ones(3, 512)
        x[2, 300] = bad
        with pytest.raises(zp.errors.NonFiniteError, match=r"\(2, 300\)"):
            searched(x, scheme, None, "cpu")


def test_what_is_no_block_of_a_type_has_a_reason() -> None:
    x = torch.zeros(2, 96)
    request = library.request(
        Op.SEARCH, torch.from_numpy(np.zeros((2, 256), np.float32)), zp.Scheme.parse("q4_k")
    )
    assert explain(request).chosen == "cpu"
    with pytest.raises(
        zp.errors.UnsupportedError, match="last axis 96 is not a multiple of the block of q4_k"
    ):
        explain(library.request(Op.SEARCH, x, zp.Scheme.parse("q4_k")))


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0"])
def test_extremes_that_several_numbers_have_are_those_of_the_first(scheme: str) -> None:
    generator = torch.Generator().manual_seed(2)
    signs = torch.randint(0, 2, (40, 512), generator=generator) * 2.0 - 1
    ties = signs * torch.randint(0, 3, signs.shape, generator=generator)  # zeros of both signs, too
    for x in (ties, ties.abs() * signs.sign(), signs * 0.0, ties.clamp(min=0) * 1e-40, signs * 1e-44, signs):
        assert same(searched(x, scheme, None, "cpu"), searched(x, scheme, None, "reference"))


@pytest.mark.parametrize("kind", ["ties", "sparse", "disparate", "positive", "tiny"])
def test_three_bits_of_hard_blocks(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn((9, 1280), generator=generator)
    if kind == "ties":
        x = x.mul(2).round()
    elif kind == "sparse":  # blocks of zeros, whose scales are zero under others
        x = x * (torch.rand(x.shape, generator=generator) < 0.05)
    elif (
        kind == "disparate"
    ):  # scales of small blocks are rounded to zero; their codes stay those of the moves
        powers = torch.randint(-40, 0, (9, 80), generator=generator).double()
        x = x * torch.exp2(powers).float().repeat_interleave(16, 1)
    elif kind == "positive":  # no code of these blocks moves
        x = x.abs()
    else:
        x = x * 2.0**-45
    assert same(searched(x, "q3_k", None, "cpu"), searched(x, "q3_k", None, "reference"))
