"""Elements whose scale is a table of their block, against loops over blocks and all partitions of numbers."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.methods.test_kmeans import least_error
from tests.peers import Peer

import zeropoint as zp
from zeropoint.errors import (
    FormatError,
    NonFiniteError,
    RangeError,
    SchemeError,
    ShapeError,
    UnsupportedError,
)
from zeropoint.formats import TableFormat, get_format
from zeropoint.kernels.cpu.host import parameter_searches
from zeropoint.methods import LayerData, method_named
from zeropoint.ops import block_tables
from zeropoint.ops.clusters import EXACT
from zeropoint.schemes import PRESETS, Scheme
from zeropoint.stats import MeanSquare, Statistics

pytestmark = pytest.mark.rotating

cluster = Peer("sklearn.cluster")

FIT = method_named("kmeans")
SHAPES = [(), (1,), (7,), (0,), (3, 0), (0, 4), (5, 9), (2, 3, 10)]
BLOCKS = ["tensor", "channel", "token", "g4", "g64", "block2x3", "channel-1"]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) ** 3).to(dtype)


def blocks_of(x: torch.Tensor, scheme: Scheme) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the place of each block on the grid, and in the tensor."""
    shape = tuple(x.shape)
    extents = scheme.granularity.block_shape(shape)
    for place in itertools.product(*map(range, scheme.granularity.grid(shape))):
        yield place, tuple(slice(n * side, (n + 1) * side) for n, side in zip(place, extents, strict=True))


def nearest(value: float, table: list[float]) -> float:
    """Return the nearest number of a table; a middle goes down."""
    return min(table, key=lambda number: (abs(number - value), number))


@pytest.mark.crossed
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_nearest_numbers_of_the_table_of_their_block(
    shape: tuple[int, ...], blocks: str
) -> None:
    scheme, x = Scheme.parse(f"table2:{blocks}"), numbers(*shape)
    if len(shape) < len(scheme.granularity.extents):
        with pytest.raises(ShapeError):
            zp.quantize(x, scheme)
        return
    for q in (zp.quantize(x, scheme), FIT.quantize(x, scheme).q):
        (tables,) = q.scales
        assert tables.shape == (*scheme.granularity.grid(shape), 4)
        values = q.dequantize()
        assert values.shape == x.shape
        for place, inside in blocks_of(x, scheme):
            table = tables[place].tolist()
            assert table == sorted(table)
            expected = [nearest(value, table) for value in x[inside].flatten().tolist()]
            assert values[inside].flatten().tolist() == expected
            assert torch.equal(tables[place][q.codes[inside].long()], values[inside])


def test_tables_go_from_end_to_end_in_equal_steps_unless_a_method_chooses_them() -> None:
    q = zp.quantize(torch.tensor([[-1.0, 0.2, 2.0], [5.0, 5.0, 5.0]]), "table2:channel")
    assert torch.equal(q.scales[0], torch.tensor([[[-1.0, 0.0, 1.0, 2.0]], [[5.0, 5.0, 5.0, 5.0]]]))
    assert q.codes.tolist() == [[0, 1, 3], [0, 0, 0]]


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "input", "float64", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ends_are_rounded_away_so_that_the_bound_is_half_the_widest_gap(
    dtype: torch.dtype, kind: str
) -> None:
    x = numbers(16, 70, dtype=dtype)
    q = zp.quantize(x, f"table3:g32:scale={kind}")
    low, high = q.params.representable()
    bound = q.error_bound()
    off = (q.dequantize().double() - x.double()).abs()
    for place, inside in blocks_of(x, q.scheme):
        assert low[place] <= x[inside].min()
        assert x[inside].max() <= high[place]
        assert off[inside].max() <= bound[place]
    gap = q.scales[0].double().diff(dim=-1).amax(-1) / 2
    assert bool((bound <= gap * 1.01 + 0.01 * high.abs().maximum(low.abs())).all())


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_the_bound_is_inf_where_a_fitted_table_may_have_clipped(kind: str) -> None:
    x = numbers(30, 40)
    q = FIT.quantize(x, Scheme.parse(f"table1:token:scale={kind}")).q
    assert bool(torch.isinf(q.error_bound()).all())  # both codes are ends
    off, bound = (q.dequantize().double() - x.double()).abs().amax(1), q.error_bound(x)[:, 0]
    assert bool((off <= bound).all())


@pytest.mark.crossed
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_partition_of_a_block_has_less_error_than_its_table(seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    bits, size, kind = int(rng.integers(1, 3)), int(rng.integers(3, 12)), rng.integers(0, 3)
    u = rng.standard_normal((3, size)) ** 3 + (100 if kind == 1 else 0)
    u = np.round(4 * u) / 4 if kind == 2 else u  # with equal ones
    x = torch.from_numpy(u)
    with zp.only_backend("cpu" if backend == "cpu" else "reference"):
        (tables,) = search(x, f"table{bits}:channel:scale=float64", None)
    for row, table in zip(u, tables[:, 0].numpy(), strict=True):
        found = float(((row[:, None] - table) ** 2).min(1).sum())
        assert found == pytest.approx(least_error(row, np.ones(size), 1 << bits), rel=1e-9, abs=1e-12)


def search(x: torch.Tensor, scheme: str, importance: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the tables that the operator finds on the backend that may run."""
    from zeropoint.ops import library
    from zeropoint.ops.registry import Op

    parsed = Scheme.parse(scheme)
    with zp.only_backend("reference"):
        start = zp.quantize(x, parsed).params.stored
    kernel = library.kernel_for(Op.SEARCH_PARAMS, x, parsed)
    return tuple(kernel.run(x, start, importance))


@pytest.mark.parametrize("seed", range(10))
def test_weighted_errors_are_the_least_of_all_partitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    u, w = rng.standard_normal((2, 9)) ** 3, rng.random(9) + 0.01
    (tables,) = search(torch.from_numpy(u), "table1:channel:scale=float64", torch.from_numpy(w))
    for row, table in zip(u, tables[:, 0].numpy(), strict=True):
        found = float((w * ((row[:, None] - table) ** 2).min(1)).sum())
        assert found == pytest.approx(least_error(row, w, 2), rel=1e-9)


@pytest.mark.parametrize(("length", "count"), [(5, 4), (17, 2), (128, 16), (300, 8), (40, 256)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_finds_the_tables_of_the_reference_to_the_bit(
    length: int, count: int, weighted: bool
) -> None:
    rng = np.random.default_rng(length)
    rows = np.sort(np.round(rng.standard_normal((60, length)), 2 if length < 200 else 6), 1)
    rows[3, -2:], rows[4] = np.inf, 1.0
    weights = rng.random((60, length)) ** 4 * (rng.random((60, length)) > 0.3) if weighted else None
    found = parameter_searches.fitted_rows(rows, weights, count)
    assert found.tobytes() == block_tables.fitted_rows(rows, weights, count).tobytes()


def test_the_best_of_many_starts_of_scikit_learn_is_not_better() -> None:
    x = numbers(4, 700, seed=3)
    q = FIT.quantize(x, Scheme.parse("table3:channel")).q
    found = (q.dequantize().double() - x.double()).square().sum(1)
    for row, mine in zip(x.double(), found.tolist(), strict=True):
        theirs = cluster.KMeans(8, n_init=10, random_state=0, tol=0.0).fit(row[:, None].numpy())
        assert mine <= theirs.inertia_ * (1 + 1e-6)
        assert theirs.inertia_ <= mine * 1.05  # the same problem


def test_blocks_longer_than_are_searched_exactly_are_merged_first() -> None:
    x = numbers(1, EXACT + 100)
    q, plain = FIT.quantize(x, Scheme.parse("table2:channel")).q, zp.quantize(x, "table2:channel")
    errors = [float((each.dequantize() - x).square().sum()) for each in (q, plain)]
    assert errors[0] < errors[1] / 2


def test_blocks_of_few_different_numbers_are_kept_exactly() -> None:
    x = torch.tensor([[0.5, -3.0, 7.0, 0.5], [0.0, 0.0, -0.0, 0.0], [2.5, 2.5, 2.5, 2.5]])
    for text in ("table2:channel", "table2:g4:scale=float16"):
        assert torch.equal(FIT.quantize(x, Scheme.parse(text)).q.dequantize(), x)


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e200, 1.7e308])
def test_numbers_whose_squares_leave_float64_have_finite_tables(size: float) -> None:
    x = numbers(3, 64, dtype=torch.float64)
    x = x / x.abs().max() * size
    q = FIT.quantize(x, Scheme.parse("table3:g32:scale=float64")).q
    assert float(((q.dequantize() - x) / size).abs().max()) < 0.3


def test_mean_squares_of_inputs_weigh_errors() -> None:
    x, inputs = numbers(8, 32), torch.cat((torch.full((5, 8), 30.0), torch.ones(5, 24)), 1)
    square, scheme = MeanSquare(features=32), Scheme.parse("table2:channel")
    state = square.update(square.start(), inputs)
    data = LayerData(statistics={"mean_square": Statistics(accumulator=square, state=state)})
    weighted = method_named("mse_weighted").quantize(x, scheme, data).q
    weights = inputs.square().mean(0)
    errors = [
        float(((q.dequantize() - x).square() * weights).sum()) for q in (weighted, FIT.quantize(x, scheme).q)
    ]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "e4m3"])
def test_bytes_count_tables_and_survive_saving(tmp_path: Path, kind: str) -> None:
    x = numbers(6, 4096)
    q = FIT.quantize(x, Scheme.parse(f"table4:channel:scale={kind}")).q
    width = {"float32": 32, "e4m3": 8}.get(kind, 16)
    expected = 4 + 16 * width / 4096
    assert q.bits_per_value == q.scheme.bits_per_value((6, 4096)) == expected
    assert q.nbytes == 6 * 2048 + 6 * 16 * width // 8
    assert q.compression_ratio == 32 / expected
    q.save(tmp_path / "q.safetensors")
    loaded = zp.QuantizedTensor.load(tmp_path / "q.safetensors")
    assert loaded.params == q.params
    assert torch.equal(loaded.dequantize(), q.dequantize())


def test_numbers_that_are_not_finite_are_refused_and_fake_quantization_passes_them_on() -> None:
    x = numbers(2, 8)
    params = zp.quantize(x, "table2:channel").params
    x[1, 3] = math.nan
    with pytest.raises(NonFiniteError, match=r"contains nan at \(1, 3\)"):
        zp.quantize(x, "table2:channel")
    assert bool(torch.isnan(zp.fake_quantize(x, params)[1, 3]))


def test_gradients_pass_between_the_ends_and_are_summed_for_each_number_of_a_table() -> None:
    params = zp.quantize(torch.tensor([[-1.0, 0.0, 1.0, 2.0]]), "table2:channel").params
    table = params.scales[0].clone().requires_grad_()
    learned = zp.QuantizationParams.of(params.scheme, (1, 4), torch.float32, [table])
    x = torch.tensor([[-1.5, 0.1, 0.2, 2.0]], requires_grad=True)
    for given in (params, learned):
        y = zp.fake_quantize(x, given)
        assert y.tolist() == [[-1.0, 0.0, 0.0, 2.0]]
        (y * torch.tensor([[1.0, 10.0, 100.0, 1000.0]])).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[0.0, 10.0, 100.0, 1000.0]]
        x.grad = None
    assert table.grad is not None
    assert table.grad.flatten().tolist() == [1.0, 110.0, 0.0, 1000.0]


def test_tables_are_validated() -> None:
    q = zp.quantize(numbers(2, 8), "table2:channel")
    for change, words in ((lambda t: t.flip(-1), "must rise"), (lambda t: t * math.nan, "must be finite")):
        wrong = zp.QuantizationParams.of(q.scheme, q.shape, q.dtype, [change(q.scales[0])])
        with pytest.raises(RangeError, match=words):
            zp.quantize(numbers(2, 8), wrong)
    with pytest.raises(ShapeError, match=r"must have shape \(2, 1, 4\)"):
        zp.QuantizationParams.of(q.scheme, q.shape, q.dtype, [q.scales[0][..., :3]]).validate()
    with pytest.raises(SchemeError, match="has a table for each block"):
        zp.QuantizationParams.given("table2:tensor", 1.0)
    with pytest.raises(RangeError, match="does not fit float16"):
        zp.quantize(torch.tensor([1.0, 1e5]), "table2:tensor:scale=float16")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table4:cast", "needs one level of scales"),
        ("table4:g16:scale=e4m3:scale2=float32@tensor", "needs one level of scales"),
        ("table4:g16:scale=even", "needs one level of scales"),
        ("table4:g16:scale=signed", "needs one level of scales"),
        ("table4:g16:scale=search", "needs one level of scales|is not for tables of blocks"),
        ("table4:g16:offset=float16", "needs one level of scales"),
        ("table4:g16:scale=ue4m3", "may hold negative numbers"),
        ("table4:g16:asym", "needs a scaled integer format"),
        ("table4:g16:round=floor", "takes the nearest value"),
        ("table4:g16:dialect=compressed-tensors", "not defined for tables of blocks"),
        ("int4:g16:scale=table4", "has no numbers without a scale"),
    ],
)
def test_schemes_without_meaning_are_refused(text: str, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        Scheme.parse(text)


def test_a_format_of_tables_has_no_numbers_of_its_own() -> None:
    fmt = get_format("table3")
    assert fmt == TableFormat(3)
    assert (fmt.bits, fmt.code_count, fmt.per_scale, fmt.spelling) == (3, 8, 8, "table3")
    assert all(Scheme.parse(preset.weight).element.per_scale == 1 for preset in PRESETS.values())
    with pytest.raises(FormatError, match="what the table of its block says"):
        fmt.number(1)
    for wrong in ("table0", "table9"):
        with pytest.raises(FormatError, match=r"must lie in 1\.\.8"):
            get_format(wrong)


def test_methods_of_other_parameters_refuse_tables() -> None:
    scheme = Scheme.parse("table4:g16")
    for name in ("hqq", "ggml"):
        with pytest.raises(UnsupportedError):
            method_named(name).quantize(torch.ones(2, 32), scheme)
