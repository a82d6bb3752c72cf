"""Equality and distance of values, against numpy."""

import math

import numpy as np
import pytest
import torch

from zeropoint.checkpoint.measure.equality import Equality, apart, equality
from zeropoint.checkpoint.measure.tensor_error import TensorError

NAN, INF = math.nan, math.inf


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("a", "b", "unequal", "signs"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([0.0, 2.0], [-0.0, 2.0], 0, 1),
        ([NAN, 2.0], [NAN, 2.0], 0, 0),
        ([NAN, 2.0], [-NAN, 3.0], 1, 0),
        ([NAN, 2.0], [1.0, NAN], 2, 0),
        ([INF, -INF], [INF, INF], 1, 0),
        ([1.0, 2.0**-149], [1.0, 0.0], 1, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_equal_that_are_so_for_numpy(
    a: list[float], b: list[float], unequal: int, signs: int, dtype: torch.dtype
) -> None:
    x, y = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
    found = equality(x, y)
    assert found == Equality(values=2, unequal=unequal, signs=signs)
    assert found.of_bits == (not unequal and not signs)
    assert np.array_equal(x.numpy(), y.numpy(), equal_nan=True) == (not unequal)


def test_integers_beyond_float64_are_distinguished() -> None:
    a = torch.tensor([[2**53]])
    assert apart(a, a + 1)[0].unequal == 1


def test_the_error_is_that_of_numpy() -> None:
    a = torch.randn(37, 211, generator=torch.Generator().manual_seed(1))
    b = a + 0.01 * torch.randn(37, 211, generator=torch.Generator().manual_seed(2))
    b[3] = a[3]
    found, error = apart(a, b)
    x, y = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
    assert found.unequal == int((x != y).sum())
    assert error.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-14)
    assert error.largest == np.abs(y - x).max()


def test_a_number_is_infinitely_far_from_what_is_none() -> None:
    for other in (NAN, INF):
        _, error = apart(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, other]]))
        assert (error.relative, error.sqnr_db, error.largest) == (INF, -INF, INF)
    _, error = apart(torch.tensor([[INF, NAN, 1.0]]), torch.tensor([[INF, NAN, 1.0]]))
    assert (error.relative, error.largest) == (0.0, 0.0)


@pytest.mark.parametrize("rows", [1, 3, 64, 999])
def test_rows_may_be_cut_anywhere(rows: int) -> None:
    a = torch.randn(1000, 100, generator=torch.Generator().manual_seed(3))
    b = a.half().float()
    parts = [apart(x, y) for x, y in zip(torch.split(a, rows), torch.split(b, rows), strict=True)]
    assert (Equality.merge(e for e, _ in parts), TensorError.merge(e for _, e in parts)) == apart(a, b)
