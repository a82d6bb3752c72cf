"""HQQ: the published iteration block by block, the best zero point that it meets, and where it is refused."""

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
    """Return (squared error, zero point) of each iteration on one block, in units of 1.5 steps."""
    w, beta, met = block.double() / scale, 10.0, []
    for _ in range(41):
        codes = torch.round(w + zero).clamp(0, top)
        left = w - (codes - zero)
        met.append((float(left.square().sum()), zero))
        unit = left.abs() / 1.5
        shrunk = left.sign() * torch.relu(unit - unit.pow(0.7 - 1) / beta) * 1.5
        zero = float(torch.mean(codes - (w - shrunk)))
        beta *= 1.01
    return met


@pytest.mark.parametrize("text", [*SCHEMES, "uint3:g48:asym=real"])
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
def test_no_block_is_worse_than_under_nearest_and_the_norm_that_moves_zero_points_falls(text: str) -> None:
    scheme, x = Scheme.parse(text), weight()
    plain, better = (q.dequantize() for q in (zp.quantize(x, scheme), HQQ.quantize(x, scheme).q))
    rows, columns = scheme.granularity.block_shape(tuple(x.shape))

    def errors(decoded: torch.Tensor, power: float) -> torch.Tensor:
        left = (x.double() - decoded.double()).abs().pow(power)
        return left.unfold(0, rows, rows).unfold(1, columns, columns).sum((-1, -2))

    assert bool((errors(better, 2) <= errors(plain, 2) * (1 + 1e-6)).all())
    assert float(errors(better, 0.7).sum()) < 0.995 * float(errors(plain, 0.7).sum())


def of_the_package(x: torch.Tensor, top: int) -> torch.Tensor:
    """Return what hqq 0.2.8 decodes to: the zero points of its last step, or where the mean error grew."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    inverse, beta, least = top / (high - low), 10.0, torch.inf
    zero = -low * inverse
    for _ in range(20):
        codes = torch.round(x * inverse + zero).clamp(0, top)
        left = x - (codes - zero) / inverse
        shrunk = left.sign() * torch.relu(left.abs() - left.abs().pow(0.7 - 1) / beta)
        zero = torch.mean(codes - (x - shrunk) * inverse, -1, keepdim=True)
        beta *= 1.01
        mean = float(left.abs().mean())
        if mean >= least:
            break
        least = mean
    return (torch.round(x * inverse + zero).clamp(0, top) - zero) / inverse


@pytest.mark.crossed
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 128), (3, 64), (2, 64)])
@pytest.mark.parametrize("tails", [3.0, 5.0, 1000.0])
@pytest.mark.parametrize("unit", [1.0, 0.02])
def test_its_error_is_below_that_of_the_package_in_both_norms(
    bits: int, size: int, tails: float, unit: float
) -> None:
    torch.manual_seed(bits)
    x = torch.distributions.StudentT(tails).sample((64, 1024)) * unit
    ours = HQQ.quantize(x, Scheme.parse(f"uint{bits}:g{size}:asym=real")).q.dequantize()
    theirs = of_the_package(x.reshape(-1, size), 2**bits - 1).reshape(x.shape)
    for power in (0.7, 2.0):
        mine, other = (float((found - x).double().abs().pow(power).sum()) for found in (ours, theirs))
        assert mine < other


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
