"""Triton's dense products of error feedback have the bytes of the reference on the host."""

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.contract.test_feedback_devices import moved
from tests.kernels.triton.interpreter import DEVICE
from tests.ops.test_feedback import DTYPES, FP4, INT4, grid_of, hessian, normal, same_bytes

import zeropoint as zp
from zeropoint.errors import RangeError
from zeropoint.kernels.triton import DENSE, backend, dense_launches
from zeropoint.ops import feedback, feedback_reference
from zeropoint.ops.feedback import Grid
from zeropoint.ops.registry import dense

pytestmark = pytest.mark.rotating

WHOLE = torch.arange(18, dtype=torch.float64)
Results = tuple[torch.Tensor, ...]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process few columns at a time, so that small matrices have several blocks."""
    monkeypatch.setattr(dense_launches, "BLOCK", 16)


def assert_bytes_of_the_reference(call: Callable[[str], Results]) -> None:
    """Compare what a call returns on the device of the kernels with the reference on the host."""
    with zp.only_backend("reference"):
        expected = call("cpu")
    with zp.only_backend("triton"):
        assert dense(torch.ones(1, device=DEVICE), "triton") is DENSE
        found = call(DEVICE)
    for a, b in zip(found, expected, strict=True):
        assert same_bytes(a.cpu().contiguous(), b.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 70), (64, 32), (65, 129), (150, 130)])
def test_products_of_columns_are_summed_in_the_order_of_tokens(
    dtype: torch.dtype, tokens: int, columns: int
) -> None:
    x = normal(tokens, columns, dtype=dtype)
    y = normal(tokens, max(1, columns - 25), seed=1, dtype=dtype)
    into = normal(columns, y.shape[1], seed=2).double()
    own, before = into[:, :1] * into[:, 0], normal(columns, seed=3).double()

    def products(device: str) -> Results:
        a, b = x.to(device), y.to(device)
        crossed = feedback.gram(a, b, into=into.to(device))
        sums = feedback.squares(a, into=before.to(device))
        return feedback.gram(a), feedback.gram(a, into=own.to(device)), crossed, sums

    assert_bytes_of_the_reference(products)


def test_tokens_in_parts_and_columns_of_a_view_have_the_bytes_of_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dense_launches, "_ROUNDED", 128 * 128)
    x = normal(150, 300, dtype=torch.bfloat16)
    assert_bytes_of_the_reference(lambda device: (feedback.gram(x.to(device)[:, 3:103]),))
    x = normal(300, 40)[:, ::2]
    assert_bytes_of_the_reference(
        lambda device: (feedback.gram(x.to(device)), feedback.squares(x.to(device)))
    )


@pytest.mark.parametrize(
    ("dtype", "power"),
    [(torch.float32, 100), (torch.bfloat16, 120), (torch.float64, 300), (torch.float32, -61)],
)
def test_large_numbers_are_scaled_and_tiny_ones_are_zero(dtype: torch.dtype, power: int) -> None:
    x = (normal(70, 40).to(dtype).double() * 2.0**power).to(dtype)
    into = normal(40, 40, seed=1).double().T

    def products(device: str) -> Results:
        there = x.to(device)
        return feedback.gram(there), feedback.gram(there, there, into=into.to(device))

    assert_bytes_of_the_reference(products)


def test_no_tokens_no_columns_and_no_rows_are_taken() -> None:
    def products(device: str) -> Results:
        none = torch.zeros(0, 3, device=device)
        grid = moved(grid_of(0, 3, "shifted"), device)
        eye = torch.eye(3, dtype=torch.float64, device=device)
        fed = feedback.feed_back(none, eye, eye[0], None, grid)
        return feedback.gram(none), feedback.gram(none.T), feedback.squares(none), *fed

    assert_bytes_of_the_reference(products)


def test_a_gpu_multiplies_tiles_and_the_interpreter_does_not() -> None:
    assert dense_launches._dot_adds_in_order(torch.device(DEVICE)) is (DEVICE == "cuda")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("columns", [1, 2, 16, 17, 63, 130])
def test_factors_have_the_bytes_of_the_reference(columns: int) -> None:
    h = hessian(columns)
    assert_bytes_of_the_reference(lambda device: feedback.factor(h.to(device)))
    garbage = h.triu() + torch.full_like(h, 7.0).tril(-1)
    assert_bytes_of_the_reference(lambda device: feedback.factor(garbage.to(device)))
    assert DENSE.factor(h.to(DEVICE)).m.is_contiguous()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("column", "pivot"), [(0, 0.0), (5, -2.5), (40, 0.0), (49, float("nan"))])
def test_the_first_pivot_that_is_not_positive_is_named(column: int, pivot: float) -> None:
    h = torch.eye(50, dtype=torch.float64)
    h[column, column], h[0, 0] = pivot, min(pivot, 0.0)
    message = f"is not positive definite: the pivot of column {column} is {pivot}; add"
    with zp.only_backend("triton"), pytest.raises(RangeError, match=message):
        feedback.factor(h.to(DEVICE))


@pytest.mark.crossed
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["steps", "shifted", "table"])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (37, 9), (17, 70)])
def test_feedback_descent_and_solutions_have_the_bytes_of_the_reference(
    kind: str, wide: torch.dtype, rows: int, columns: int
) -> None:
    weight, grid, h = normal(rows, columns, dtype=wide), grid_of(rows, columns, kind, wide), hessian(columns)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    m, d = feedback.factor(h[order][:, order])
    values, _ = feedback.feed_back(weight, m, d, order, grid)

    def results(device: str) -> Results:
        own, *rest = (x.to(device) for x in (weight, m, d, order, values, h))
        m_there, d_there, order_there, values_there, h_there = rest
        theirs = moved(grid, device)
        fed = feedback.feed_back(own, m_there, d_there, order_there, theirs)
        after = feedback.descend(own, values_there, h_there, order_there, theirs, sweeps=2)
        return *fed, *after, feedback.solve(own.double(), m_there, d_there, order_there)

    assert_bytes_of_the_reference(results)


def test_blocks_of_64_columns_have_the_bytes_of_the_reference() -> None:
    weight, grid, h = normal(3, 66), grid_of(3, 66, "steps"), hessian(66)

    def results(device: str) -> Results:
        m, d = feedback.factor(h.to(device))
        return m, d, *feedback.feed_back(weight.to(device), m, d, None, moved(grid, device))

    assert_bytes_of_the_reference(results)


@pytest.mark.parametrize(
    ("levels", "ties_up"),
    [(INT4, None), (INT4[:1], None), *itertools.product((INT4, FP4, FP4[:1], FP4[:2], WHOLE), (0, 1))],
)
def test_ties_and_ends_are_rounded_as_the_grid_says(levels: torch.Tensor, ties_up: int | None) -> None:
    ties = None if ties_up is None else torch.full((len(levels) - 1,), ties_up, dtype=torch.uint8)
    middles = (levels[1:] + levels[:-1]) / 2
    ends = torch.tensor([-1e9, -0.0, 0.0, 1e9], dtype=torch.float64)
    near = torch.cat([ends, levels, middles, middles.nextafter(ends[0]), middles.nextafter(ends[-1])])
    x = near[None, :] * torch.tensor([[1.0], [0.5], [-2.0], [0.0]], dtype=torch.float64)
    scale = torch.tensor([[1.0], [0.5], [-2.0], [0.0]], dtype=torch.float64)
    block_of = torch.zeros(len(near), dtype=torch.int64)
    grid = Grid(levels=levels, scale=scale, block_of=block_of, ties_up=ties)
    eye, ones = torch.eye(len(near), dtype=torch.float64), torch.ones(len(near), dtype=torch.float64)

    def fed(device: str) -> Results:
        return feedback.feed_back(x.to(device), eye.to(device), ones.to(device), None, moved(grid, device))

    assert_bytes_of_the_reference(fed)


def test_zeros_keep_their_signs_in_solutions() -> None:
    m = torch.eye(4, dtype=torch.float64)
    m[0, 1:], m[1, 2:] = torch.tensor([1.0, -1.0, 0.0]), -0.0
    y = torch.tensor([[0.0, -0.0, -0.0, 0.0], [-0.0, -0.0, -0.0, -0.0], [1.0, 1.0, -1.0, -0.0]]).double()
    found = DENSE.substitute(y.to(DEVICE), m.to(DEVICE)).cpu()
    assert same_bytes(found.contiguous(), feedback_reference.substitute(y, m))


def test_the_host_without_the_interpreter_and_an_old_triton_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert DENSE.takes(torch.ones(1, device=DEVICE))
    backend._triton_refusal.cache_clear()
    with monkeypatch.context() as old:
        old.setattr("triton.__version__", "3.5.1")
        assert not DENSE.takes(torch.ones(1, device=DEVICE))
    backend._triton_refusal.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not DENSE.takes(torch.ones(1))
