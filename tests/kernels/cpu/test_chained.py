"""Schemes whose levels follow from each other, rounded to nearest by kernels: the bytes of the reference."""

from __future__ import annotations

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


@pytest.mark.parametrize("scheme", [*SCHEMES, *APART])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "ends"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_the_reference(scheme: str, kind: str, dtype: torch.dtype) -> None:
    x, found = hard(kind, dtype), Scheme.parse(scheme)
    assert zp.explain(x, scheme).chosen == "cpu"
    wanted = outcome(lambda: reference.quantize_dynamic(x, found))
    own = outcome(lambda: zp.quantize(x, scheme))
    if isinstance(wanted, str):
        assert own == wanted
        return
    assert torch.equal(own.data, wanted[0])
    for mine, theirs in zip(own.params.stored, wanted[1], strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


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
    own, (data, params) = zp.quantize(x, scheme), reference.quantize_dynamic(x, found)
    assert torch.equal(own.data, data)
    for mine, theirs in zip(own.params.stored, params, strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
