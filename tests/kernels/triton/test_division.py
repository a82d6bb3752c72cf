"""Quotients on a GPU are made of fused multiplications and additions, and have IEEE's codes all the same."""

from __future__ import annotations

import pytest
import torch

import zeropoint as zp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def assert_codes_of_the_host(x: torch.Tensor, scheme: str, scales: torch.Tensor) -> None:
    params = zp.QuantizationParams(
        scheme=zp.Scheme.parse(scheme), shape=tuple(x.shape), scales=(scales,), dtype=x.dtype
    )
    with zp.only_backend("reference"):
        expected = zp.quantize(x, params).data
    with zp.only_backend("triton"):
        found = zp.quantize(x.cuda(), params.to("cuda")).data.cpu()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scheme", ["int8:channel", "float8_e4m3fn:channel", "float4_e2m1fn:channel"])
@pytest.mark.parametrize("power", [0, -59, 59, -61, 61, -100, 100])
def test_quotients_next_to_ties_have_the_codes_of_the_host(scheme: str, power: int) -> None:
    generator = torch.Generator().manual_seed(power + 200)
    bits = torch.randint(0, 1 << 23, (4096, 1), generator=generator, dtype=torch.int32)
    bits[:64] = (1 << 23) - 1 - torch.arange(64)[:, None]  # all ones, for which one correction is too few
    scales = (bits + (127 << 23)).view(torch.float32) * 2.0**power
    halves = torch.randint(-512, 512, (4096, 256), generator=generator) / 4
    near = (halves.double() * scales.double()).float()
    steps = torch.randint(-2, 3, near.shape, generator=generator, dtype=torch.int32)
    x = (near.view(torch.int32) + steps).view(torch.float32)
    assert_codes_of_the_host(torch.where(torch.isfinite(x), x, 0.0), scheme, scales)


def test_values_far_from_their_scale_are_clamped() -> None:
    exponents = torch.arange(-149, 128)
    x = torch.ldexp(torch.ones(277), exponents).expand(277, -1) * torch.tensor([1.0, -1.5]).repeat(139)[:277]
    x = torch.where(torch.isfinite(x), x, 1.0).contiguous()
    for scheme in ("int8:channel", "float8_e5m2:channel"):
        assert_codes_of_the_host(
            x, scheme, torch.ldexp(torch.ones(277, 1), exponents.clamp(min=-127)[:, None])
        )
