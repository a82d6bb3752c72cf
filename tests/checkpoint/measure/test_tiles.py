"""What is found out about tiles before they are quantized."""

import math

import pytest
import torch

from zeropoint.checkpoint.measure.tiles import extremes_of


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 4099)])
def test_extremes_are_the_smallest_and_the_largest_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    for values in (x, x.abs() + 1, -x.abs() - 1):
        assert extremes_of(values) == (float(values.min()), float(values.max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_extremes_are_nan_where_one_number_is(dtype: torch.dtype, sign: float) -> None:
    x = torch.ones(3, 70, dtype=dtype)
    x[1, 5] = math.copysign(math.nan, sign)
    assert all(map(math.isnan, extremes_of(x)))
    x[1, 5] = sign * math.inf
    assert sign * math.inf in extremes_of(x)
