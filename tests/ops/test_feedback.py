"""Dense products of error feedback: kernels equal the reference, which equals NumPy within its rounding."""

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.errors import DtypeError, RangeError, ShapeError
from zeropoint.ops import feedback
from zeropoint.ops.feedback import Grid
from zeropoint.ops.feedback_reference import CHUNK
from zeropoint.ops.threads import thread_limit
from zeropoint.params.effective import effective_offset, effective_scale
from zeropoint.params.tensors import zero_point_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EACH = pytest.mark.usefixtures("every_backend")
INT4 = torch.arange(-8, 8, dtype=torch.float64)
FP4 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def hessian(columns: int) -> torch.Tensor:
    """Return the Gram matrix of inputs with a strong common part, damped."""
    x = normal(columns + 50, columns, seed=3).double()
    x = x + x[:, :1]
    return x.T @ x + 0.5 * torch.eye(columns, dtype=torch.float64)


def grid_of(rows: int, columns: int, kind: str, wide: torch.dtype = torch.float32) -> Grid:
    """Return a grid with 3 blocks a row: steps, steps with zero points and offsets, or a table."""
    generator = torch.Generator().manual_seed(5)
    scale = (torch.rand(rows, 3, generator=generator) * 0.3 + 0.1).to(wide)
    block_of = torch.arange(columns) * 3 // columns
    if kind == "steps":
        scale[0, 0] = 0.0
        return Grid(levels=INT4, scale=scale, block_of=block_of)
    if kind == "shifted":
        zero, offset = torch.full_like(scale, 2.25), scale / 7
        return Grid(levels=INT4 + 8, scale=scale, block_of=block_of, zero=zero, offset=offset)
    ties = torch.arange(len(FP4) - 1).remainder(2).to(torch.uint8)
    return Grid(levels=FP4, scale=-scale, block_of=block_of, ties_up=ties)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def on_every_backend(*call: object) -> tuple[torch.Tensor, ...]:
    """Return the results of the reference, after comparing those of kernels on one thread and on two."""
    function, *args = call
    assert callable(function)
    with zp.only_backend("reference"):
        expected = function(*args)
    for threads in (1, 2):
        with thread_limit(threads):
            found = function(*args)
        for a, b in zip(found, expected, strict=True):
            assert same_bytes(a, b), threads
    return tuple(expected)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 70), (64, 32), (65, 33), (150, 130)])
def test_kernels_sum_products_as_the_reference(dtype: torch.dtype, tokens: int, columns: int) -> None:
    x = normal(tokens, columns, dtype=dtype)
    y = normal(tokens, max(1, columns - 25), seed=1, dtype=dtype)
    into = normal(columns, y.shape[1], seed=2).double()
    (own,) = on_every_backend(lambda: (feedback.gram(x),))
    on_every_backend(lambda: (feedback.gram(x, y), feedback.gram(x, y, into=into), feedback.squares(x)))
    assert torch.equal(own, own.T)
    assert same_bytes(own, feedback.gram(x, x))


@EACH
def test_threads_share_tiles_and_tokens_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than are packed at a time, and outliers as large as float16 has."""
    monkeypatch.setattr("zeropoint.kernels.cpu.host.dense._PACKED", 1 << 16)
    x = normal(1100, 200, dtype=torch.float16) * 100
    x[5], x[:, 7] = 6e4, -4e4
    found, squares = on_every_backend(lambda: (feedback.gram(x), feedback.squares(x)))
    assert float(found[7, 7]) == pytest.approx(float(squares[7]), rel=CHUNK * 2.0**-24)


def test_the_gram_matrix_is_that_of_numbers_of_12_bits() -> None:
    x = normal(300, 20)
    mantissa, exponent = np.frexp(x.numpy().astype(np.float64))
    near = np.ldexp(np.rint(mantissa * 4096) / 4096, exponent)
    # 64 roundings of float32, each of half a unit of a sum that is no larger than that of magnitudes.
    bound = CHUNK * 2.0**-24 * (np.abs(near).T @ np.abs(near))
    assert (np.abs(feedback.gram(x).numpy() - near.T @ near) <= bound).all()


@EACH
def test_tokens_in_multiples_of_64_give_the_bytes_of_all_together() -> None:
    x, y = normal(300, 40), normal(300, 9, seed=1)
    parts, crossed = torch.zeros(40, 40, dtype=torch.float64), torch.zeros(40, 9, dtype=torch.float64)
    for a, b in zip(x.split([128, 64, 108]), y.split([128, 64, 108]), strict=True):
        parts, crossed = feedback.gram(a, into=parts), feedback.gram(a, b, into=crossed)
    assert same_bytes(parts, feedback.gram(x))
    assert same_bytes(crossed, feedback.gram(x, y))


@EACH
def test_numbers_too_large_for_float32_are_scaled_and_tiny_ones_are_zero() -> None:
    x = normal(70, 40)
    plain = feedback.gram(x)
    for dtype, power in ((torch.float32, 100), (torch.bfloat16, 120), (torch.float64, 300)):
        own = feedback.gram(x.to(dtype))
        large = (x.to(dtype).double() * 2.0**power).to(dtype)
        (found,) = on_every_backend(lambda large=large: (feedback.gram(large),))
        assert torch.equal(found, own * 2.0 ** (2 * power))
    assert bool(torch.isinf(feedback.gram(x.double() * 2.0**1000).diagonal()).all())
    assert torch.equal(feedback.gram(x * 2.0**-40), plain * 2.0**-80)
    assert not feedback.gram(x.clamp(-1, 1) * 2.0**-61).any()


@EACH
@pytest.mark.parametrize("columns", [1, 2, 16, 127, 128, 129, 300])
def test_kernels_factor_as_the_reference(columns: int) -> None:
    h = hessian(columns)
    m, d = on_every_backend(feedback.factor, h)
    assert torch.equal(m, m.triu())
    assert bool((m.diagonal() == 1).all())
    assert bool((d > 0).all())
    product = (m * d) @ m.T
    # Of the order of rounding: columns times half a unit.
    assert float((product - h).abs().max()) <= columns * 2.0**-53 * float(h.diagonal().max()) * 4


def test_the_factors_are_those_of_cholesky_from_the_last_column_on() -> None:
    h = hessian(60)
    lower = np.linalg.cholesky(h.flip((0, 1)).numpy())[::-1, ::-1]
    m, d = feedback.factor(h)
    np.testing.assert_allclose(d.sqrt().numpy(), np.diag(lower), rtol=1e-12)
    np.testing.assert_allclose(m.numpy(), lower / np.diag(lower), rtol=1e-9, atol=1e-12)


@EACH
def test_only_the_upper_half_is_read() -> None:
    h = hessian(140)
    found = feedback.factor(h.triu() + torch.full_like(h, torch.nan).tril(-1).nan_to_num(7.0))
    assert all(same_bytes(a, b) for a, b in zip(found, feedback.factor(h), strict=True))


@EACH
@pytest.mark.parametrize("column", [0, 5, 131, 149])
def test_a_pivot_that_is_not_positive_is_named(column: int) -> None:
    h = torch.eye(150, dtype=torch.float64)
    h[column, column] = 0.0
    sentence = rf"h \(shape \(150, 150\)\) is not positive definite: the pivot of column {column} is 0.0; add"
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend), pytest.raises(RangeError, match=sentence):
            feedback.factor(h)


@EACH
@pytest.mark.parametrize("kind", ["steps", "shifted", "table"])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (37, 9), (16, 128), (5, 129), (150, 270)])
def test_kernels_feed_back_as_the_reference(kind: str, wide: torch.dtype, rows: int, columns: int) -> None:
    weight, grid = normal(rows, columns, dtype=wide), grid_of(rows, columns, kind, wide)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    h = hessian(columns)
    m, d = feedback.factor(h[order][:, order])
    values, losses = on_every_backend(feedback.feed_back, weight, m, d, order, grid)
    assert values.dtype == wide
    error = weight.double() - values.double()
    torch.testing.assert_close(((error @ h) * error).sum(1), losses, rtol=1e-9, atol=1e-12)


@EACH
@pytest.mark.parametrize("kind", ["steps", "table"])
def test_kernels_descend_as_the_reference_and_losses_fall(kind: str) -> None:
    rows, columns = 37, 150
    weight, grid, h = normal(rows, columns), grid_of(rows, columns, kind), hessian(columns)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    m, d = feedback.factor(h[order][:, order])
    values, losses = feedback.feed_back(weight, m, d, order, grid)

    def descended() -> tuple[torch.Tensor, torch.Tensor]:
        return feedback.descend(weight, values, h, order, grid, sweeps=2)

    found, moved = on_every_backend(descended)
    error = weight.double() - found.double()
    after = ((error @ h) * error).sum(1)
    assert bool((after <= losses * (1 + 1e-9)).all())
    assert float(after.sum()) < float(losses.sum())
    assert int(moved[0]) > int(moved[1])


@EACH
def test_a_sweep_that_moves_nothing_is_the_last() -> None:
    weight, grid = normal(4, 20), grid_of(4, 20, "steps")
    values, _ = feedback.feed_back(weight, torch.eye(20).double(), torch.ones(20).double(), None, grid)
    found, moved = feedback.descend(weight, values, torch.eye(20).double(), None, grid, sweeps=5)
    assert torch.equal(found, values)
    assert moved.tolist() == [0] * 5


@EACH
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (37, 130), (150, 270)])
def test_systems_are_solved_as_numpy_does(rows: int, columns: int) -> None:
    h, y = hessian(columns), normal(rows, columns).double()
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    m, d = feedback.factor(h[order][:, order])
    (found,) = on_every_backend(lambda: (feedback.solve(y, m, d, order),))
    expected = np.linalg.solve(h.numpy(), y.numpy().T).T
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-11)
    straight = torch.arange(columns)
    assert same_bytes(feedback.solve(y, m, d), feedback.solve(y, m, d, straight))


def test_codes_are_those_of_gptq_with_the_inverse() -> None:
    """The loop of the paper: columns from the first on, errors divided by the inverse's Cholesky factor."""
    weight, h, grid = normal(20, 48).double(), hessian(48), grid_of(20, 48, "steps", torch.float64)
    factor = np.linalg.cholesky(np.linalg.inv(h.numpy())).T
    rest, codes = weight.numpy().copy(), np.zeros((20, 48))
    scale = grid.scale.numpy()[:, grid.block_of.numpy()]
    scale[0] = 0.25
    grid.scale[0] = 0.25
    for j in range(48):
        codes[:, j] = np.clip(np.rint(rest[:, j] / scale[:, j]), -8, 7)
        error = (rest[:, j] - codes[:, j] * scale[:, j]) / factor[j, j]
        rest[:, j:] -= np.outer(error, factor[j, j:])
    m, d = feedback.factor(h)
    values, _ = feedback.feed_back(weight, m, d, None, grid)
    assert (values.numpy() == codes * scale).all()


@EACH
@pytest.mark.parametrize("text", ["int4:g16", "uint4:g16:asym", "int4:g16:asym=real", "e2m1:g16", "q4_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_are_those_that_dequantizing_has(text: str, dtype: torch.dtype) -> None:
    """Values that codes have are found again, and leave no error."""
    x, scheme = normal(24, 512, dtype=dtype), zp.Scheme.parse(text)
    params = zp.choose_params(x, scheme)
    x = zp.quantize(x, params).dequantize()
    stored, shape = params.stored, tuple(x.shape)
    scale = effective_scale(scheme, stored, shape, dtype)
    assert scale is not None
    zero, offset = zero_point_of(scheme, stored), effective_offset(scheme, stored, shape, dtype)
    levels = FP4
    ties = torch.arange(len(FP4) - 1).remainder(2).to(torch.uint8)
    if scheme.element.is_integer:
        levels = torch.arange(scheme.qmin, scheme.qmax + 1, dtype=torch.float64)
    grid = Grid(
        levels=levels, scale=scale, block_of=torch.arange(512) * scale.shape[1] // 512,
        ties_up=None if scheme.element.is_integer else ties,
        zero=None if zero is None else zero.to(scale.dtype), offset=offset,
    )  # fmt: skip
    m, d = torch.eye(512, dtype=torch.float64), torch.ones(512, dtype=torch.float64)
    values, losses = feedback.feed_back(x, m, d, None, grid)
    assert torch.equal(values, x)
    assert not losses.any()


@EACH
def test_ties_are_rounded_as_the_grid_says() -> None:
    levels = torch.tensor([-1.0, 0.0, 3.0, 4.0], dtype=torch.float64)
    x = torch.tensor([[-0.5, 1.5, 3.5, -9.0, 9.0]])
    block_of, one, eye = torch.zeros(5, dtype=torch.int64), torch.ones(1, 1), torch.eye(5).double()
    for ties, expected in (([0, 1, 0], [-1, 3, 3, -1, 4]), ([1, 0, 1], [0, 0, 4, -1, 4])):
        grid = Grid(
            levels=levels, scale=one, block_of=block_of, ties_up=torch.tensor(ties, dtype=torch.uint8)
        )
        values, losses = on_every_backend(feedback.feed_back, x, eye, torch.ones(5).double(), None, grid)
        assert values.tolist() == [expected]
        assert losses.tolist() == [float((x - values).double().square().sum())]
    grid = Grid(levels=INT4, scale=one, block_of=block_of)
    values, _ = on_every_backend(feedback.feed_back, x, eye, torch.ones(5).double(), None, grid)
    assert values.tolist() == [[0, 2, 4, -8, 7]]


def test_what_does_not_fit_is_refused() -> None:
    one, eye, block_of = torch.ones(2, 1), torch.eye(3).double(), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RangeError, match=r"levels .2 numbers. must ascend"):
        Grid(levels=torch.tensor([1.0, 0.0]), scale=one, block_of=block_of)
    with pytest.raises(RangeError, match="levels must be consecutive integers where ties_up is None"):
        Grid(levels=FP4, scale=one, block_of=block_of)
    with pytest.raises(ShapeError, match=r"ties_up \(shape \(3,\)\) must have shape \(14,\)"):
        Grid(levels=FP4, scale=one, block_of=block_of, ties_up=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"zero \(shape \(2, 2\)\) must have the shape of scale \(2, 1\)"):
        Grid(levels=INT4, scale=one, block_of=block_of, zero=torch.ones(2, 2))
    grid = Grid(levels=INT4, scale=one, block_of=block_of)
    with pytest.raises(ShapeError, match=r"must have the rows and columns of a weight of shape \(4, 3\)"):
        feedback.feed_back(torch.ones(4, 3), eye, torch.ones(3).double(), None, grid)
    with pytest.raises(ShapeError, match=r"d \(shape \(2,\)\) must have a pivot for each of 3 columns of m"):
        feedback.feed_back(torch.ones(2, 3), eye, torch.ones(2).double(), None, grid)
    with pytest.raises(ShapeError, match=r"values \(shape \(1, 3\)\) must have the shape of \(2, 3\)"):
        feedback.descend(torch.ones(2, 3), torch.ones(1, 3), eye, None, grid, sweeps=1)
    with pytest.raises(DtypeError, match=r"h \(torch.float32\) must be float64; use h.double"):
        feedback.factor(torch.eye(3))
    with pytest.raises(ShapeError, match=r"h \(shape \(2, 3\)\) must be a square matrix"):
        feedback.factor(torch.ones(2, 3).double())
    with pytest.raises(ShapeError, match=r"tensor \(shape \(2, 4\)\) must have the 3 columns of its matrix"):
        feedback.solve(torch.ones(2, 4).double(), eye, torch.ones(3).double())
    with pytest.raises(DtypeError, match=r"torch.int64\) must hold floats of 16 to 64 bits"):
        feedback.gram(block_of[:, None])
    with pytest.raises(ShapeError, match=r"tensor \(shape \(3,\)\) must have two axes, tokens and columns"):
        feedback.squares(torch.ones(3))
    with pytest.raises(ShapeError, match=r"y \(2 tokens\) must have those of x \(3 tokens\)"):
        feedback.gram(torch.ones(3, 2), torch.ones(2, 2))
    with pytest.raises(ShapeError, match=r"into \(shape \(3,\)\) must have shape \(2, 2\)"):
        feedback.gram(torch.ones(3, 2), into=torch.ones(3))
