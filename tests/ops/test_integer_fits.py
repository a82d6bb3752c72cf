"""Scales that fit integer codes: against the best real scale, exact arithmetic, and kernels."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.host.calls import one_pass
from zeropoint.ops import reference
from zeropoint.ops.integer_fits import fits_of
from zeropoint.ops.threads import thread_limit
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

GAP = 2.0**-12
"""Of the squares of a block; what the scale found may be worse than the best real one."""


def made(kind: str, count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return blocks of one kind of numbers, float32."""
    make = np.random.default_rng(seed)
    normal = make.standard_normal((count, size))
    values = {
        "normal": normal,
        "heavy": make.standard_t(2, (count, size)),
        "steps": make.integers(-12, 13, (count, size)) / 2,
        "few": make.choice([-1.0, 0.5, 0.25, 1.5, 3.0], (count, size)),
        "small": normal * 1e-39,
        "large": normal * 1e37,
        "powers": np.exp2(make.integers(-30, 1, (count, size))),
    }[kind]
    return torch.tensor(values, dtype=torch.float32)


KINDS = ("normal", "heavy", "steps", "few", "small", "large", "powers")


def least_error(block: np.ndarray, scheme: Scheme) -> float:
    """Return the least squared error of codes under any real scale: one of each interval without a tie."""
    low, high = scheme.qmin, scheme.qmax
    ties = [abs(x) / (k + 0.5) for x in block if x for k in range(high if x > 0 else -low)]
    ends = np.unique([*ties, 1e-9, 1e9])
    scales = np.sqrt(ends[1:] * ends[:-1])
    best = float((block**2).sum())
    for part in np.array_split(scales, max(1, len(scales) // 512)):
        codes = np.clip(np.rint(block / part[:, None]), low, high)
        squares, products = (codes**2).sum(1), codes @ block
        gains = np.where(squares > 0, products**2 / np.maximum(squares, 1), 0.0)
        best = min(best, float((block**2).sum() - gains.max()))
    return best


@pytest.mark.parametrize("text", ["int4:g32", "int4:g128", "int3:g64", "int2:g16", "int8:g16"])
def test_no_real_scale_is_better_by_more_than_what_is_promised(text: str) -> None:
    scheme, size = Scheme.parse(f"{text}:scale=search"), int(text.rsplit("g", 1)[1])
    for kind in ("normal", "heavy", "steps", "few", "powers"):
        x = made(kind, 4, size)
        errors = (zp.quantize(x, scheme).dequantize(torch.float64) - x.double()).square().sum(1)
        for block, error in zip(x.double().numpy(), errors.tolist(), strict=True):
            assert error <= least_error(block, scheme) + GAP * float((block**2).sum()) + 1e-12


@pytest.mark.parametrize(("text", "most"), [("int4:g32", 1.001), ("int3:g64", 1.001), ("int8:g16", 1.25)])
def test_normal_numbers_have_hardly_more_error_than_under_the_best_real_scales(
    text: str, most: float
) -> None:
    scheme, size = Scheme.parse(f"{text}:scale=search"), int(text.rsplit("g", 1)[1])
    x = made("normal", 60, size, seed=3)
    error = float((zp.quantize(x, scheme).dequantize(torch.float64) - x.double()).square().sum())
    assert error <= most * sum(least_error(block, scheme) for block in x.double().numpy())


def exact_scale(block: np.ndarray, scheme: Scheme) -> float:
    """Return the scale that the rule describes, its sums and comparisons in Python's integers."""
    fits = fits_of(scheme, len(block))
    amax = float(np.abs(block).max())
    exponent = fits.places - (int(np.floor(np.log2(amax))) + 1)
    numbers = np.rint(np.ldexp(block.astype(np.float64), exponent))
    narrow = numbers.astype(np.float32)
    first = np.float32(fits.first) / np.abs(narrow).max()

    def sums(inverse: np.float32) -> tuple[int, int]:
        codes = np.clip(np.rint(narrow * inverse), scheme.qmin, scheme.qmax).astype(int).tolist()
        products = sum(int(x) * q for x, q in zip(numbers, codes, strict=True))
        return products, sum(q * q for q in codes)

    best = 0, 1
    for ratio in fits.ratios:
        best = gains(best, sums(first * np.float32(ratio)))
    for _ in range(2):
        best = gains(best, sums(np.float32(best[1]) / np.float32(best[0])))
    return max(float(Fraction(*best) / Fraction(2) ** exponent), amax * fits.least)


def gains(best: tuple[int, int], tried: tuple[int, int]) -> tuple[int, int]:
    """Return the sums of the larger gain; of equals the later ones."""
    better = tried[0] > 0 and tried[0] ** 2 * best[1] >= best[0] ** 2 * tried[1]
    return tried if better else best


@pytest.mark.parametrize("text", ["int4:g48", "int3:g128", "int8:g32", "int2:g16"])
def test_the_scale_is_that_of_exact_sums(text: str) -> None:
    scheme, size = Scheme.parse(f"{text}:scale=search"), int(text.rsplit("g", 1)[1])
    x = made("heavy", 24, size, seed=7)
    found = zp.quantize(x, scheme).params.scales[0].double().reshape(-1).tolist()
    start = zp.quantize(x, scheme.start).params.scales[0].double().reshape(-1).tolist()
    wanted = [float(np.float32(exact_scale(block, scheme))) for block in x.numpy()]
    assert all(own in pair for own, *pair in zip(found, wanted, start, strict=True))
    assert sum(own == other for own, other in zip(found, wanted, strict=True)) >= len(wanted) * 2 // 3


SEARCHED = (
    "int4:g128", "int4:g32", "int3:g64", "int2:g16", "int8:g96", "int5:g48", "w4a16",
    "int4:g64:scale=bfloat16", "int8:g32:scale=float16",
    "int4:g32:dialect=onnx-reference",
)  # fmt: skip


@pytest.mark.crossed
@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", SEARCHED)
def test_the_kernel_finds_what_the_reference_finds(text: str, dtype: torch.dtype) -> None:
    scheme = Scheme.parse(f"{text}:scale=search")
    narrow = dtype is torch.float16 or "float16" in text.split("scale=")[-1]
    x = torch.cat(
        [made(kind, 3, 384, seed=1) for kind in KINDS if not narrow or kind not in ("large", "small")]
    )
    x[4, :128] = 0.0
    x[5, 7] = -0.0
    x = x.to(dtype)
    assert one_pass(scheme, tuple(x.shape), dtype) is not None
    data, stored = reference.quantize_dynamic(x, scheme)
    for threads in (1, 3):
        with thread_limit(threads):
            q = zp.quantize(x, scheme)
        assert torch.equal(q.data, data)
        assert torch.equal(q.params.scales[0].view(torch.uint8), stored[0].view(torch.uint8))
    assert torch.equal(zp.choose_params(x, scheme).scales[0].view(torch.uint8), stored[0].view(torch.uint8))


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("text", ["int5:g64:scale=search", "int8:g128:scale=search"])
def test_quotients_that_are_ties_are_rounded_the_same_way(text: str) -> None:
    # Of numbers of 8 bits and scales that are simple parts of the largest, in some blocks of a thousand.
    x = made("normal", 700, int(text.split(":")[1][1:]), seed=1).bfloat16()
    with zp.only_backend("reference"):
        wanted = zp.quantize(x, text)
    found = zp.quantize(x, text)
    assert torch.equal(found.params.stored[0], wanted.params.stored[0])
    assert torch.equal(found.data, wanted.data)


@pytest.mark.crossed
@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("text", ["int4:g128:scale=search", "int3:g64:scale=search", "int2:g16:scale=search"])
@pytest.mark.parametrize("kind", ["heavy", "steps", "few", "outliers"])
def test_scales_that_the_kernel_leaves_out_are_not_the_best(text: str, kind: str) -> None:
    size = int(text.split(":")[1][1:])
    x = made("normal" if kind == "outliers" else kind, 64 * 1024 // size, size, seed=2)
    if kind == "outliers":  # best clipped, more of them from block to block
        x.abs_().clamp_(max=1.0)
        x[:, : size // 8] *= torch.linspace(1, 12, len(x))[:, None]
    with zp.only_backend("reference"):
        wanted = zp.quantize(x, text)
    found = zp.quantize(x, text)
    assert torch.equal(found.params.stored[0], wanted.params.stored[0])
    assert torch.equal(found.data, wanted.data)


def test_rows_that_are_no_whole_blocks_and_long_blocks_are_searched_without_the_kernel() -> None:
    x = made("normal", 3, 200)
    for text in ("int4:g48:scale=search", "int4:channel:scale=search", "int4:g24:scale=search"):
        scheme = Scheme.parse(text)
        assert one_pass(scheme, tuple(x.shape), x.dtype) is None
        error, other = (
            float((zp.quantize(x, own).dequantize() - x).square().sum()) for own in (scheme, scheme.start)
        )
        assert error < other
