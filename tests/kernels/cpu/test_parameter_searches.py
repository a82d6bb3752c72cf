"""The compiled searches of parameters against the reference, byte for byte."""

import pytest
import torch

import zeropoint as zp
from zeropoint.ops import library
from zeropoint.ops.registry import Op
from zeropoint.ops.threads import gradual_underflow, thread_limit
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

SCHEMES = (
    "int4:g128:asym", "uint4:g64:asym=real", "int8:g48:asym", "uint3:g16:asym=real:scale=float16",
    "uint4:g32:asym=real:dialect=compressed-tensors", "int4:g128", "nf4:g64", "nvfp4a16", "mxfp8",
    "float8_e4m3fn:g128:scale=bfloat16", "int8:channel",
)  # fmt: skip
MORE = (
    "uint4:g32:asym:scale=bfloat16", "int2:g32:asym=real", "uint8:g112:asym=real",
    "int4:g128:asym:scale=input", "uint4:g64:asym:dialect=compressed-tensors", "int8:g128:asym=real",
    "int3:g16:scale=float16", "int4:g32:scale=input:dialect=compressed-tensors", "int8_mx:g32:scale=e8m0",
    "float8_e4m3fn:channel:scale=bfloat16", "nf4:g192", "int4:channel:scale=ue4m3", "e2m3:tensor",
    "mxfp4", "e2m3:g32:scale=ue5m3", "e3m0:g32", "iq4:g48", "int4:g16:scale=ue4m3", "uint4:g32", "nvfp4",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 384


def numbers(dtype: torch.dtype, scheme: str = "", columns: int = COLUMNS) -> torch.Tensor:
    """Return rows of many kinds: normal, heavy tails, far from zero, one sign, ties, the ends of floats."""
    make = torch.Generator().manual_seed(columns)
    normal = torch.randn(11, columns, generator=make)
    x = normal.clone()
    x[1] = normal[1] ** 5
    x[2] += 1000
    x[3] = normal[3].abs()
    x[4] = (normal[4] * 3).round() / 2
    scheme = scheme.replace("/", "=")
    small = dtype is torch.float16 or "=float16" in scheme or "=ue5" in scheme
    tiny, little, large = (1e-2, 1e-3, 2e4) if small else (1e-41, 1e-37, 1e38)
    if "=ue4" in scheme:
        tiny, little, large = 0.5, 0.25, 50.0
    x[5] *= tiny
    x[6] *= little
    x[7] = normal[7].clamp(-3, 3) * large
    x[8, ::50] *= 100
    x[9, 20:200] = 0
    x[10] = 2.5
    return x.to(dtype)


def importances(columns: int = COLUMNS) -> dict[str, torch.Tensor | None]:
    """Return weights of errors: none, of columns, of elements, some of them zero, of all magnitudes."""
    make = torch.Generator().manual_seed(5)
    plain = torch.randn(columns, generator=make, dtype=torch.float64)
    some = plain.exp()
    some[:64] = 0
    each = torch.rand(11, columns, generator=make, dtype=torch.float64)
    return {
        "none": None, "columns": plain.exp() ** 3, "elements": each, "some": some, "wild": 10 ** (plain * 40)
    }  # fmt: skip


def searched(x: torch.Tensor, scheme: str, importance: torch.Tensor | None, only: str) -> list[torch.Tensor]:
    start = zp.quantize(x, scheme).params.stored
    with zp.only_backend(only), gradual_underflow():
        found = library.kernel_for(Op.SEARCH_PARAMS, x, Scheme.parse(scheme)).run(x, start, importance)
    return [level.view(torch.uint8) for level in found]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_give_the_bytes_of_the_reference(scheme: str) -> None:
    x = numbers(torch.bfloat16, scheme)
    for given in ("none", "columns"):
        importance = importances()[given]
        assert same(searched(x, scheme, importance, "cpu"), searched(x, scheme, importance, "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", importances())
@pytest.mark.parametrize("scheme", [*SCHEMES, *MORE])
def test_all_dtypes_and_weights_give_the_bytes_of_the_reference(
    scheme: str, given: str, dtype: torch.dtype
) -> None:
    x, importance = numbers(dtype, scheme), importances()[given]
    if scheme.startswith("uint") and "asym" not in scheme:
        x = x.abs()
    assert same(searched(x, scheme, importance, "cpu"), searched(x, scheme, importance, "reference"))


@pytest.mark.parametrize("rows", [1, 15, 17])
def test_blocks_past_the_last_sixteen_are_searched_and_no_more(rows: int) -> None:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    assert same(*(searched(x, "uint4:g32:asym", None, only) for only in ("cpu", "reference")))


@pytest.mark.parametrize(("scheme", "shape"), [
    ("uint4:g32:asym", (6, 80)), ("uint4:channel:asym", (6, 300)), ("nf4:channel", (6, 300)),
    ("float8_e4m3fn:channel", (3, 5, 336)), ("int8:channel", (700, 336)), ("uint4:g20:asym=real", (6, 60)),
    ("uint4:g32:asym", (2, 3, 64)), ("uint4:g32:asym", (64,)), ("uint4:g32:asym", (0, 64)),
], ids=str)  # fmt: skip
def test_shapes_that_kernels_know_or_not_make_no_difference(scheme: str, shape: tuple[int, ...]) -> None:
    make = torch.Generator().manual_seed(0)
    x, weights = torch.randn(shape, generator=make), torch.rand(shape[-1], generator=make).double()
    for importance in (None, weights):
        assert same(*(searched(x, scheme, importance, only) for only in ("cpu", "reference")))


def test_the_number_of_threads_changes_no_byte() -> None:
    x = torch.randn(1024, 384, generator=torch.Generator().manual_seed(1))
    found = []
    for count in (1, 3):
        with thread_limit(count):
            found.append(searched(x, "uint4:g64:asym=real", torch.rand(384).double() * 0 + 2, "cpu"))
    assert same(*found)


def test_neighbors_in_memory_are_not_read_as_weights() -> None:
    x = numbers(torch.float32)
    weights = torch.rand(COLUMNS, 2, dtype=torch.float64)[:, 0]
    dense = searched(x, "uint4:g64:asym", weights.clone(), "cpu")
    assert same(searched(x, "uint4:g64:asym", weights, "cpu"), dense)
    assert same(searched(x, "uint4:g64:asym", weights.expand(11, COLUMNS), "cpu"), dense)


@pytest.mark.parametrize("scheme", ["int4:g128", "int4:g128:asym", "int8:channel"])
def test_each_element_may_have_a_weight_of_its_own(scheme: str) -> None:
    x, each = numbers(torch.bfloat16, scheme), importances()["elements"]
    assert same(*(searched(x, scheme, each, only) for only in ("cpu", "reference")))


LONG_AFFINE = ("int8:channel:asym", "uint4:g192:asym=real")
MORE_LONG_AFFINE = (
    "int4:g192:asym", "uint4:channel:asym:scale=bfloat16", "uint8:channel:asym=real",
    "int3:g48:asym=real:scale=float16", "uint4:g192:asym:dialect=compressed-tensors", "uint4:tensor:asym",
)  # fmt: skip


@pytest.mark.parametrize("scheme", LONG_AFFINE)
def test_zero_points_in_long_blocks_have_the_bytes_of_the_reference(scheme: str) -> None:
    x = numbers(torch.bfloat16, scheme)
    for given in ("none", "columns"):
        importance = importances()[given]
        assert same(*(searched(x, scheme, importance, only) for only in ("cpu", "reference")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", importances())
@pytest.mark.parametrize("scheme", [*LONG_AFFINE, *MORE_LONG_AFFINE])
def test_zero_points_in_long_blocks_make_no_difference_under_any_weights(
    scheme: str, given: str, dtype: torch.dtype
) -> None:
    x, importance = numbers(dtype, scheme), importances()[given]
    assert same(*(searched(x, scheme, importance, only) for only in ("cpu", "reference")))


@pytest.mark.parametrize("scheme", ["int8:g64:asym", "int4:g128:asym", "int8:channel:asym"])
def test_zero_points_halfway_between_two_are_rounded_alike(scheme: str) -> None:
    # Of blocks whose ends are opposite, zero points are -0.5 under ranges of their width.
    x = torch.randn(256, COLUMNS, generator=torch.Generator().manual_seed(6)).bfloat16()
    ends = (2.5 + torch.arange(256)[:, None] / 64).bfloat16()
    x = x.minimum(ends).maximum(-ends)
    x[:, ::64], x[:, 1::64] = ends, -ends
    assert same(*(searched(x, scheme, None, only) for only in ("cpu", "reference")))


def test_squares_of_codes_that_float32_cannot_add_are_added_exactly() -> None:
    # Of codes near 255, those of a lane are above 2 ** 24 after 259 vectors.
    x = torch.rand(2, 16 * 600, generator=torch.Generator().manual_seed(2)) * 0.03 + 0.97
    x[:, 0] = 0
    assert same(*(searched(x, "uint8:channel:asym", None, only) for only in ("cpu", "reference")))


@pytest.mark.parametrize("count", [1, 3])
def test_threads_share_long_blocks_with_zero_points(count: int) -> None:
    x = torch.randn(300, 2, 192, generator=torch.Generator().manual_seed(3))
    with thread_limit(count):
        found = searched(x, "int4:g192:asym", None, "cpu")
    rows = [searched(x[n : n + 100], "int4:g192:asym", None, "cpu") for n in (0, 100, 200)]
    assert same(found, [torch.cat(parts) for parts in zip(*rows, strict=True)])


def at_the_ends() -> torch.Tensor:
    """Return rows at the ends of float32, also ones whose numbers hardly differ."""
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    x[0] = 1 + x[0] * 1e-7
    x[1] = -1e30 + x[1] * 1e24
    x[2] = 3e38 * x[2].sign()
    x[3] *= 1e-45
    x[4] = 1e38 + x[4] * 1e31
    x[5] = 1e-38 + x[5] * 1e-45
    x[6] = (x[6] * 100).round() * 1e-44
    x[7] = torch.where(x[7] > 1, 3e38, 1e-30)
    return x


@pytest.mark.parametrize("scheme", ["int4:g128:asym", "uint4:g64:asym=real", "uint4:g16:asym=real"])
def test_sums_that_are_not_finite_or_reciprocals_without_bound_change_no_byte(scheme: str) -> None:
    plain = torch.randn(128, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for x in (at_the_ends(), numbers(torch.float32, scheme, 128)):
        for weights in (10 ** (plain * 100), plain.exp() * 1e280, plain.exp() * 1e300, plain.exp() * 1e-300):
            assert same(*(searched(x, scheme, weights, only) for only in ("cpu", "reference")))


POWERS = ("int4:g128:scale=search2.4", "float8_e4m3fn:g64:scale=search3", "nvfp4:scale=search1.5")
MORE_POWERS = (
    "int8:g128:scale=search2.4", "int3:g48:scale=search4", "int2:g16:scale=search1.25/float16",
    "mxfp4:scale=search2.4", "mxfp8:scale=search8", "nf4:g64:scale=search3.5", "int4:channel:scale=search2.4",
    "float8_e4m3fn:g192:scale=search5.001", "int4:g32:scale=search2.4/ue4m3", "e3m0:g32:scale=search6",
    "int4:g128:scale=search1", "nvfp4:scale=search1", "int4:g32:scale=search2.4/bfloat16",
)  # fmt: skip


def quantized(x: torch.Tensor, scheme: str, only: str) -> list[torch.Tensor]:
    with zp.only_backend(only):
        q = zp.quantize(x, scheme)
    return [level.contiguous().view(torch.uint8) for level in (q.data, *q.params.stored)]


LONG = ("int8:channel", "int4:g192", "int4:channel")
MORE_LONG = ("int3:g192", "int2:channel:scale=bfloat16", "int8:g192:scale=float16", "int4:g48", "int5:tensor")


def whole_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of few values, under which errors are equal or none, and one of zeros."""
    make = torch.Generator().manual_seed(7)
    x = torch.randint(-7, 8, (12, COLUMNS), generator=make).to(dtype)
    x[1:4] *= torch.tensor([0.5, 0.125, 3.0]).to(dtype)[:, None]
    x[4:6] = x[4:6].sign()
    x[6] = 0
    return x


@pytest.mark.parametrize("scheme", POWERS)
def test_other_powers_have_kernels_with_the_bytes_of_the_reference(scheme: str) -> None:
    for x in (numbers(torch.bfloat16, scheme), whole_numbers(torch.float32)):
        assert same(*(quantized(x, scheme, only) for only in ("cpu", "reference")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [*POWERS, *MORE_POWERS])
def test_all_dtypes_give_the_bytes_of_the_reference_under_other_powers(
    scheme: str, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(3)
    many = torch.randn(200, COLUMNS, generator=make).to(dtype)
    for x in (numbers(dtype, scheme), whole_numbers(dtype), many):
        assert same(*(quantized(x, scheme, only) for only in ("cpu", "reference")))


def test_the_power_of_an_error_that_is_measured_nearly_decides_nothing_that_is_close() -> None:
    x = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(4)).repeat(1, 2)
    x[:, COLUMNS:] *= 1 + 2.0**-20
    for scheme in ("int4:g128:scale=search2.4", "int4:g16:scale=search2.001/ue4m3"):
        assert same(*(quantized(x, scheme, only) for only in ("cpu", "reference")))


@pytest.mark.parametrize("scheme", LONG)
def test_integers_in_long_blocks_have_the_bytes_of_the_reference(scheme: str) -> None:
    for x in (numbers(torch.bfloat16, scheme), whole_numbers(torch.float32)):
        assert same(*(searched(x, scheme, None, only) for only in ("cpu", "reference")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [*LONG, *MORE_LONG])
def test_all_dtypes_of_integers_in_long_blocks_have_the_bytes_of_the_reference(
    scheme: str, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(3)
    long = torch.randn(3, 40960, generator=make).to(dtype)
    for x in (numbers(dtype, scheme), whole_numbers(dtype), long, long**3):
        assert same(*(searched(x, scheme, None, only) for only in ("cpu", "reference")))
