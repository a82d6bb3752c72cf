"""Fits of scales and zero points: all codes of small blocks, dense sweeps and other orders as oracles."""

import itertools

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.methods import LayerData, method_named
from zeropoint.ops import scale_search
from zeropoint.schemes import Scheme
from zeropoint.stats import MeanSquare, Statistics

pytestmark = pytest.mark.rotating

MSE = method_named("mse")


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of Student's t with 4 degrees of freedom."""
    torch.manual_seed(seed)
    return torch.distributions.StudentT(4.0).sample((rows, columns))


def squares(x: torch.Tensor, scheme: str, method: str = "mse") -> torch.Tensor:
    """Return the squared error of each row."""
    values = method_named(method).quantize(x, Scheme.parse(scheme)).q.dequantize(torch.float64)
    return (values - x.double()).square().sum(-1)


def least_error(block: np.ndarray, top: int, zeros: range | None) -> float:
    """Return the least squared error over all codes, scales above 0 and zero points (real ones for None)."""
    least = float((block**2).sum())
    for codes in itertools.product(range(top + 1), repeat=len(block)):
        q = np.array(codes, dtype=np.float64)
        for zero in (q.mean(),) if zeros is None else zeros:
            moved, x = q - zero, block - block.mean() if zeros is None else block
            product, square = moved @ x, moved @ moved
            if product > 0:
                least = min(least, float(x @ x - product * product / square))
    return least


@pytest.mark.parametrize(("scheme", "zeros"), [("asym=real", None), ("asym", range(4))])
def test_little_is_left_to_the_best_of_all_codes(scheme: str, zeros: range | None) -> None:
    x = numbers(25, 5, seed=3)
    found = squares(x, f"uint2:g5:{scheme}")
    least = torch.tensor([least_error(row, 3, zeros) for row in x.double().numpy()])
    assert bool((found >= least * (1 - 1e-5) - 1e-9).all())
    assert float(found.sum()) <= 1.03 * float(least.sum())
    assert int((found <= least * 1.001 + 1e-9).sum()) >= 15


def swept(blocks: torch.Tensor, top: int, *, real: bool) -> torch.Tensor:
    """Return the least squared error of each row under dense widths and places, each fitted to its codes."""
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    if not real:
        low, high = low.clamp(max=0), high.clamp(min=0)
    best = torch.full((len(blocks),), torch.inf, dtype=blocks.dtype)
    for ratio in np.geomspace(0.2, 1.3, 180):
        scale = (high - low) * ratio / top
        for part in np.linspace(0, 1, 17):
            at = part * top - (low + part * (high - low)) / scale
            at = at if real else at.round().clamp(0, top)
            moved = (blocks / scale + at).round().clamp(0, top) - at
            x = blocks
            if real:
                moved, x = moved - moved.mean(1, keepdim=True), blocks - blocks.mean(1, keepdim=True)
            product, square = (moved * x).sum(1), moved.square().sum(1)
            gain = torch.where((product > 0) & (square > 0), product.square() / square, 0.0)
            best = torch.minimum(best, x.square().sum(1) - gain)
    return best


@pytest.mark.crossed
@pytest.mark.parametrize("sign", [0, 1, -1])
@pytest.mark.parametrize(
    ("bits", "size", "zero", "most"),
    [
        (4, 32, "=real", 1.004), (4, 32, "", 1.0035), (3, 64, "=real", 1.0007), (3, 64, "", 1.0007),
        (2, 32, "", 1.006),
    ],
)  # fmt: skip
def test_a_dense_sweep_finds_hardly_less(bits: int, size: int, zero: str, most: float, sign: int) -> None:
    x = numbers(48, 2 * size, seed=bits)
    if sign:
        x = sign * x.abs()
    best = swept(x.double().reshape(-1, size), 2**bits - 1, real=bool(zero))
    found = squares(x, f"uint{bits}:g{size}:asym{zero}")
    assert float(found.sum()) <= most * float(best.sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_signed_scales_are_fitted_on_both_sides_of_zero(bits: int) -> None:
    x = numbers(64, 32, seed=bits)
    scheme = f"int{bits}:g32:scale=signed/float32"
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    largest = x.abs().amax(1, keepdim=True)
    best = torch.full((64,), torch.inf)
    for ratio in np.geomspace(0.5, 2.0 * 2 ** (bits - 1), 400):
        for sign in (1, -1):
            scale = sign * largest / float(ratio)
            codes = (x / scale).round().clamp(low, high)
            best = torch.minimum(best, (codes * scale - x).square().sum(1))
    found = squares(x, scheme)
    assert float(found.sum()) <= 1.0005 * float(best.sum())
    assert float(found.sum()) < float(squares(x, f"int{bits}:g32").sum())
    scales = MSE.quantize(x, Scheme.parse(scheme)).q.scales[0]
    assert bool((scales > 0).any())
    assert bool((scales < 0).any())


@pytest.mark.parametrize("scheme", ["uint4:g32:asym=real", "uint3:g32:asym", "int4:g32:scale=signed/float32"])
def test_neither_pieces_nor_threads_nor_neighbors_change_a_byte(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers(40, 96, seed=7)
    x[3] = 0.0
    x[4] = 2.5
    x[5, :32] = torch.linspace(100, 101, 32)
    parsed = Scheme.parse(scheme)
    whole = MSE.quantize(x, parsed).q
    monkeypatch.setattr(scale_search, "PIECE", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = MSE.quantize(x, parsed).q
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again.data, whole.data)
    assert all(torch.equal(a, b) for a, b in zip(again.params.stored, whole.params.stored, strict=True))
    assert bool((squares(x, scheme) <= squares(x, scheme, "nearest")).all())


def test_blocks_far_from_zero_keep_what_a_real_zero_point_is_for() -> None:
    x = 1000 + numbers(16, 64)
    near = squares(x - 1000, "uint4:g64:asym=real").sum()
    assert float(squares(x, "uint4:g64:asym=real").sum()) < 1.02 * float(near)


def test_a_rule_keeps_its_bound_on_blocks_far_from_zero() -> None:
    x = torch.cat([1000 + numbers(8, 64), numbers(8, 64, seed=1)])
    q, start = zp.quantize(x, "uint4:g64:asym:scale=search"), zp.quantize(x, "uint4:g64:asym")
    assert bool((q.scales[0] >= start.scales[0] / 4).all())
    off, plain = ((found.dequantize() - x).double() for found in (q, start))
    assert bool((off.square().sum(1) <= plain.square().sum(1)).all())
    assert bool((off.abs() <= q.error_bound().repeat_interleave(64, 1)).all())


def test_importance_decides_what_is_fitted() -> None:
    x, weights = numbers(8, 32), torch.ones(32)
    weights[:4] = 1000.0
    accumulator = MeanSquare(features=32)
    state = accumulator.update(accumulator.start(), weights.sqrt().reshape(1, -1))
    data = LayerData(statistics={"mean_square": Statistics(accumulator=accumulator, state=state)})
    scheme = Scheme.parse("uint3:g32:asym=real")
    plain, weighted = (
        (method_named(name).quantize(x, scheme, data).q.dequantize() - x).square()
        for name in ("mse", "mse_weighted")
    )
    assert float((weighted * weights).sum()) < 0.5 * float((plain * weights).sum())
