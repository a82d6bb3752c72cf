"""HQQ: the published iteration block by block, the best zero point that it meets, and where it is refused."""

from __future__ import annotations

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.methods import method_named
from zeropoint.schemes import Scheme

HQQ = method_named("hqq")
SCHEMES = ("uint4:g64:asym=real", "uint2:g32:asym=real", "uint3:channel:asym=real", "uint4:tensor:asym=real")


def weight() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.distributions.StudentT(3.0).sample((24, 128)) * 0.02


def published(block: torch.Tensor, scale: float, zero: float, top: int) -> list[tuple[float, float]]:
    """Return (0.7-norm, zero point) of each iteration on one block, as hqq's core/optimize.py computes it."""
    w, inverse, beta, met = block.double(), 1.0 / scale, 10.0, []
    for _ in range(21):
        codes = torch.round(w * inverse + zero).clamp(0, top)
        left = w - (codes - zero) / inverse
        met.append((float(left.abs().pow(0.7).sum()), zero))
        shrunk = left.sign() * torch.relu(left.abs() - left.abs().pow(0.7 - 1) / beta)
        zero = float(torch.mean(codes - (w - shrunk) * inverse))
        beta *= 1.01
    return met


@pytest.mark.parametrize("text", SCHEMES)
def test_each_block_has_the_best_zero_point_of_the_published_iteration(text: str) -> None:
    scheme, x = Scheme.parse(text), weight()
    start, found = zp.quantize(x, scheme).params, HQQ.quantize(x, scheme).q.params
    assert torch.equal(start.scales[0], found.scales[0])
    assert start.zero_point is not None
    assert found.zero_point is not None
    rows, columns = scheme.granularity.block_shape(tuple(x.shape))
    moved = 0
    for i in range(start.zero_point.shape[0]):
        for j in range(start.zero_point.shape[1]):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale, first = float(start.scales[0][i, j]), float(start.zero_point[i, j])
            met = published(block, scale, first, 2**scheme.bits - 1)
            errors = [error for error, _ in met]
            # Zero points are float32 in each step; a value half-way between two codes may fall to the other.
            found_at = min(met, key=lambda pair: abs(pair[1] - float(found.zero_point[i, j])))
            assert abs(found_at[1] - float(found.zero_point[i, j])) < 1e-3
            assert found_at[0] <= min(errors) * (1 + 1e-3)
            moved += float(found.zero_point[i, j]) != first
    assert moved > 0


@pytest.mark.parametrize("text", SCHEMES)
def test_no_block_is_worse_than_under_nearest_in_the_norm_that_is_minimized(text: str) -> None:
    scheme, x = Scheme.parse(text), weight()
    plain, better = (q.dequantize() for q in (zp.quantize(x, scheme), HQQ.quantize(x, scheme).q))
    rows, columns = scheme.granularity.block_shape(tuple(x.shape))

    def errors(decoded: torch.Tensor) -> torch.Tensor:
        left = (x.double() - decoded.double()).abs().pow(0.7)
        return left.unfold(0, rows, rows).unfold(1, columns, columns).sum((-1, -2))

    assert bool((errors(better) <= errors(plain) * (1 + 1e-6)).all())
    assert float(errors(better).sum()) < 0.99 * float(errors(plain).sum())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("uint4:g64:asym", "use asym=real, or method mse"),
        ("int4:g64", "use asym=real, or method mse"),
        ("uint4:g64:asym=real:round=stochastic(1)", "use half_even"),
    ],
)
def test_schemes_without_a_zero_point_to_move_are_refused(text: str, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        HQQ.quantize(weight(), Scheme.parse(text))
