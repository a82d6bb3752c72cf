"""Schemes whose levels follow from each other, rounded to nearest by kernels: the bytes of the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.host.chained import fused_call
from zeropoint.ops import reference
from zeropoint.schemes import Scheme

SCHEMES = (
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "uint4:g32:scale=float16:offset=float16",
    "int4:g32:asym:scale=uint6:scale2=float16@g256", "int8:channel:scale=signed/float32",
    "uint4:g16:scale=edge/float16:offset=float16", "int3:g16:scale=int6:scale2=float16@g64",
    "uint4_double", "int8:g16:asym:scale=uint8:scale2=bfloat16@g64:scale3=float32@token",
    "uint3:g8:scale=float8_e4m3fn:scale2=float16@g64:offset=float8_e4m3fn:offset2=signed/float32@g128",
    "nf4:g64:scale=linear_late/dynamic8:scale2=float32@g256",
    "float4_e2m1fn:g16:scale=signed/int8:scale2=float32@g32",
    "uint4:g32:scale=linear_up/float8_e4m3fn:scale2=float32@g256:offset=int8:offset2=float32@g256",
    "int4:g32:scale=int5:scale2=int3@g64:scale3=signed/float16@g256", "iq4_nl", "tq2_0",
)  # fmt: skip
APART = ("int4:g32:scale=int6:scale2=float16@tensor", "int4:block2x32:scale=signed/float16")
"""Those whose levels are chosen apart from codes: one kernel does both of all others."""


def hard(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers with equal magnitudes of both signs, blocks of zeros, or ends of the dtype."""
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(len(kind)))
    if kind == "ties":
        x = x.mul(2).round()
    elif kind == "zeros":
        x[:, ::3] = 0.0
        x[:2, :300] = -0.0
        x[3, :64] = -x[3, :64].abs()
        x[4, ::2], x[4, 1::2] = 0.0, -0.0  # the first one has the sign
    elif kind == "ends":
        top = torch.finfo(dtype).max
        x[0, 5], x[0, 7], x[1, 9] = top, -top, top
        x[2] *= 1e-9
        x[3] = x[3].abs()
    return x.to(dtype)


def outcome(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the sentence of its error."""
    try:
        return function()
    except zp.ZeropointError as error:
        return str(error)


def assert_same_bytes(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor | None:
    """Compare codes, levels and errors with the reference's; return what it is where there is no error."""
    wanted = outcome(lambda: reference.quantize_dynamic(x, Scheme.parse(scheme)))
    own = outcome(lambda: zp.quantize(x, scheme))
    if isinstance(wanted, str):
        assert own == wanted
        return None
    assert torch.equal(own.data, wanted[0])
    for mine, theirs in zip(own.params.stored, wanted[1], strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    assert isinstance(own, zp.QuantizedTensor)
    return own


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", [*SCHEMES, *APART])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "ends"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_reference(scheme: str, kind: str, dtype: torch.dtype) -> None:
    x = hard(kind, dtype)
    assert zp.explain(x, scheme).chosen == "cpu"
    assert_same_bytes(x, scheme)


def test_levels_and_codes_are_chosen_by_one_kernel() -> None:
    made = {
        scheme: fused_call(Scheme.parse(scheme), (5, 512), torch.bfloat16) for scheme in (*SCHEMES, *APART)
    }
    assert {scheme for scheme, call in made.items() if call is None} == set(APART)


@pytest.mark.parametrize("scheme", ["q4_k", "uint4_double", "int3:g16:scale=int6:scale2=float16@g64"])
def test_rows_longer_than_a_tile_and_last_blocks_that_are_not_whole(scheme: str) -> None:
    x = torch.randn(3, 4096 + 160, generator=torch.Generator().manual_seed(3))
    x[1, 2000:3000] *= 100
    found = Scheme.parse(scheme)
    assert fused_call(found, tuple(x.shape), x.dtype) is not None
    assert_same_bytes(x, scheme)


OFFSETS = "uint4:g32:scale=float32:offset=float32"
WIDE_LEVELS = "uint4:g32:scale=uint6:scale2=float32@g256:offset=uint6:offset2=signed/float32@g256"
"""Products of two levels may be smaller than any number with a finite reciprocal."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("scheme", "steps", "most"), [("q4_k", 15, 63), ("q5_k", 31, 63), ("q2_k", 3, 15)])
def test_middles_of_two_codes_are_rounded_as_quotients_are(
    scheme: str, steps: int, most: int, dtype: torch.dtype
) -> None:
    block = Scheme.parse(scheme).granularity.block_shape((1, 256))[1]
    scales = torch.tensor([most if n % 8 == 0 else 1 + n % most for n in range(16 * most)]).float()[:, None]
    codes = torch.arange(block) % steps + 0.5
    codes[0], codes[-1] = 0, steps
    x = (codes * scales).view(-1, 256).to(dtype)
    own = assert_same_bytes(x, scheme)
    assert own is not None
    assert own.params.effective_scale().reshape(-1, 1).equal(scales)
    numbers = x.float().view(-1, block)
    products, quotients = numbers * (1 / scales), numbers / scales
    if scheme != "q2_k":  # reciprocals of its few scales are right
        assert (products.round() != quotients.round()).any()


@pytest.mark.crossed
@pytest.mark.parametrize("scale", [1e-45, 3e-44, 1e-39, 1e-38, 3e-38, 3e37, 1e38, 3.4e38])
@pytest.mark.parametrize("scheme", [OFFSETS, WIDE_LEVELS, "uint2:g32:scale=float32:offset=float32", "q4_k"])
def test_scales_without_a_reciprocal_divide(scheme: str, scale: float) -> None:
    x = torch.rand(8, 1024, generator=torch.Generator().manual_seed(4)) * 2 - 1
    x[0], x[1] = x[0].abs(), -x[1].abs()
    x[:, ::32], x[::2, 1::32] = 1.0, -1.0
    assert_same_bytes(x.double().mul(scale).float(), scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", ["q4_k", "q6_k", "q3_k", OFFSETS, "uint5:g64:scale=float16:offset=float16"]
)
def test_extremes_count_wherever_they_lie_in_a_block(scheme: str, dtype: torch.dtype) -> None:
    x = torch.rand(32, 2048, generator=torch.Generator().manual_seed(6)) - 0.5
    block = Scheme.parse(scheme).granularity.block_shape((1, 256))[1]
    blocks, n = x.view(-1, block), torch.arange(x.numel() // block)
    blocks[n, n // 16 % block] = 1 + n / len(n)
    blocks[n, (n // 16 * 3 + 1) % block] = -1 - n.flip(0) / len(n)
    assert_same_bytes(x.to(dtype), scheme)


@pytest.mark.crossed
@pytest.mark.parametrize("columns", [256, 768, 2304, 96, 4096 + 32])
@pytest.mark.parametrize(
    "scheme", ["q4_k", OFFSETS, "uint4_double", "int3:g16:scale=int6:scale2=float16@token"]
)
def test_rows_that_follow_each_other_have_levels_of_their_own(scheme: str, columns: int) -> None:
    if columns % 256 and scheme == "q4_k":
        columns += 256 - columns % 256
    x = torch.randn(41, columns, generator=torch.Generator().manual_seed(7))
    assert_same_bytes(x * torch.arange(1, 42)[:, None], scheme)
