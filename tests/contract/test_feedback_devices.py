"""Dense products of error feedback have one result, on every backend and every device there is."""

from dataclasses import replace

import pytest
import torch
from tests.contract.conftest import Place
from tests.ops.test_feedback import grid_of, hessian, normal, same_bytes

import zeropoint as zp
from zeropoint.ops import feedback
from zeropoint.ops.feedback import Grid

pytestmark = pytest.mark.rotating

ROWS, COLUMNS = 5, 40


def moved(grid: Grid, device: str) -> Grid:
    """Return a grid on another device."""
    names = ("levels", "scale", "block_of", "ties_up", "offset", "zero")
    given = {name: x for name in names if (x := getattr(grid, name)) is not None}
    return replace(grid, **{name: x.to(device) for name, x in given.items()})


def products(dtype: torch.dtype, kind: str, device: str) -> list[torch.Tensor]:
    """Return the results of all products on a device."""
    x, weight = normal(70, COLUMNS, dtype=dtype).to(device), normal(ROWS, COLUMNS).to(device)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1)).to(device)
    h, grid = hessian(COLUMNS).to(device), moved(grid_of(ROWS, COLUMNS, kind), device)
    m, d = feedback.factor(h[order][:, order])
    values, losses = feedback.feed_back(weight, m, d, order, grid)
    found, counts = feedback.descend(weight, values, h, order, grid, sweeps=2)
    sums = [feedback.gram(x), feedback.gram(x, x[:, :9]), feedback.squares(x)]
    return [*sums, m, d, values, losses, found, counts, feedback.solve(weight.double(), m, d, order)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "steps"), (torch.float32, "table"), (torch.float64, "shifted")],
    ids=str,
)
def test_every_place_has_the_bytes_of_the_reference_on_the_host(
    place: Place, dtype: torch.dtype, kind: str
) -> None:
    found = products(dtype, kind, place.device)
    with zp.only_backend("reference"):
        expected = products(dtype, kind, "cpu")
    for a, b in zip(found, expected, strict=True):
        assert same_bytes(a.cpu().contiguous(), b.contiguous())
