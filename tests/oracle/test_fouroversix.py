"""NVFP4 and four-over-six as fouroversix 1.0.5 computes them: its stored bytes, and itself where installed.

Every byte is the same but where a reason is named here:

- a negative zero of the input has code 0 there, as its sign is 0;
- quotients within rounding of a tie, as it multiplies by a reciprocal, and block scales within rounding of
  one between two values of float8_e4m3fn, as it multiplies by ``1536 / amax``;
- two candidates of nearly equal error, which it sums in float32.
"""

import json
from pathlib import Path

import pytest
import torch
from tests.oracles import fouroversix_golden

import zeropoint as zp

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fouroversix.json").read_text())
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
NEAR = 2.0**-20
"""Of a few roundings of float32, in relation to a number; of a sum of 16 squares, too."""
LARGEST = {"nvfp4": 6 * 448, "nvfp4:scale=four_over_six": 6 * 256}


def fields(data: torch.Tensor) -> torch.Tensor:
    """Return codes (rows, blocks, 16) of packed ones."""
    return torch.stack([data & 15, data >> 4], -1).view(len(data), -1, 16)


def unexplained(x: torch.Tensor, scheme: str, theirs: tuple[torch.Tensor, torch.Tensor, float]) -> int:
    """Return how many blocks differ from ours for no reason that the module names."""
    codes, scales, amax = theirs
    q = zp.quantize(x, f"{scheme}:dialect=zeropoint")
    ours, coarse = q.params.stored[0].view(torch.uint8), q.params.stored[1].double()
    if amax:
        assert float(coarse) == float(torch.tensor(amax / LARGEST[scheme], dtype=torch.float64).float())
    blocks = x.double().view(len(x), -1, 16)
    off = ours != scales
    factor = coarse * ours.view(torch.float8_e4m3fn).double()
    value = torch.where(factor[..., None] > 0, blocks.abs() / factor[..., None], 0.0)
    tie = ((value[..., None] - TIES).abs().amin(-1) <= NEAR * value) | (blocks == 0)
    wrong = ((fields(q.data) != fields(codes)) & ~tie).any(-1) & ~off

    def errors(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of squares, and how far roundings of float32 may move them."""
        step = coarse * stored.view(torch.float8_e4m3fn).double()[..., None]
        scaled = torch.where(step > 0, blocks.abs() / step, 0.0)
        off = GRID[(scaled[..., None] - GRID).abs().argmin(-1)] * step - blocks.abs()
        moved = (NEAR * blocks.abs()) * (2 * off.abs() + NEAR * blocks.abs())
        return off.square().sum(-1), moved.sum(-1) + NEAR * off.square().sum(-1)

    (mine, moved), (other, also) = errors(ours), errors(scales)
    alike = (mine - other).abs() <= moved + also
    quotient = blocks.abs().amax(-1) / (6 * coarse)
    candidates = [quotient, quotient * 1.5] if "four_over_six" in scheme else [quotient]
    between = torch.stack([_rounded(x * (1 - NEAR)) != _rounded(x * (1 + NEAR)) for x in candidates]).any(0)
    return int((wrong | (off & ~alike & ~between)).sum())


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['scheme']} {case['input']}")
def test_stored_bytes_of_the_package_are_ours(case: dict[str, str | float]) -> None:
    scheme, dtype = str(case["scheme"]), getattr(torch, str(case["dtype"]))
    x, codes, scales = (
        torch.frombuffer(bytearray.fromhex(str(case[part])), dtype=kind).view(fouroversix_golden.SHAPE[0], -1)
        for part, kind in (("x", dtype), ("codes", torch.uint8), ("scales", torch.uint8))
    )
    q = zp.quantize(x, f"{scheme}:dialect=zeropoint")
    if case["input"] == "zeros":  # whose scales are 0 there and 1 here
        assert not codes.any()
        assert not q.data.any()
        return
    if case["input"] not in ("grid", "sparse"):  # full of ties
        assert torch.equal(q.params.stored[0].view(torch.uint8), scales)
        assert torch.equal(q.data, codes)
    assert unexplained(x, scheme, (codes, scales, float(case["amax"]))) == 0


@pytest.mark.parametrize("scheme", fouroversix_golden.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_package_differs_for_named_reasons_alone(scheme: str, dtype: torch.dtype) -> None:
    pytest.importorskip(
        "fouroversix", reason="a source distribution; see tests/oracles/fouroversix_golden.py"
    )
    stream = torch.Generator().manual_seed(9)
    for number in range(60):
        x = torch.randn(64, 256, generator=stream)
        if number % 3 == 1:
            x = x / torch.rand(64, 256, generator=stream).clamp(min=1e-2)
        if number % 3 == 2:
            x = torch.randint(-12, 13, (64, 256), generator=stream) * 0.5 * (x.abs() > 0.5)
        x = x.to(dtype)
        codes, scales, amax = fouroversix_golden.theirs(x, fouroversix_golden.RULES[scheme])
        assert unexplained(x, scheme, (codes, scales, float(amax))) == 0, number


def test_numbers_past_the_grid_wrap_there_and_saturate_here() -> None:
    theirs = pytest.importorskip("fouroversix", reason="a source distribution") and fouroversix_golden.theirs
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 448.0, 448.0 * 2**-9 * 1.3 / 448  # the scale of the second block is rounded down
    codes, scales, _ = theirs(x, "static_6")
    q = zp.quantize(x, "nvfp4:dialect=zeropoint")
    assert torch.equal(q.params.stored[0].view(torch.uint8), scales)
    assert int(q.codes[0, 16]) == 7
    assert int(codes[0, 8]) & 15 == 8  # negative zero
