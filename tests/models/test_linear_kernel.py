"""Linear layers on integer codes: sums are those of int64, whatever the shape, the threads and the dtype."""

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint.errors import NonFiniteError, ShapeError, UnsupportedError
from zeropoint.ops import library
from zeropoint.ops.linear import LONGEST, linear_request
from zeropoint.ops.registry import Request, choose, kernel_of
from zeropoint.ops.threads import thread_limit

pytestmark = pytest.mark.rotating

ROWS, COLS, OUT = (1, 2, 3, 4, 6, 65), (1, 15, 16, 17, 33, 64, 160, 192), (1, 2, 3, 7, 66)
ENDS = {"int8:channel": (-128, 127), "int4:channel": (-8, 7), "uint4:channel": (0, 15)}


KERNELS = importlib.import_module("zeropoint.kernels.cpu.host.linear")


def wanted(source: str, weight: str, shape: tuple[int, int]) -> Request:
    """Return the request of a float32 layer on this machine."""
    dtypes = torch.float32, torch.float32
    return linear_request(source, weight, shape, dtypes, torch.device("cpu"), given=False)


def unit_weight(codes: torch.Tensor, scheme: str) -> zp.QuantizedTensor:
    """Return ``codes`` as a weight whose scales are all 1."""
    q = zp.quantize(torch.zeros(codes.shape), scheme)
    params = zp.QuantizationParams(
        scheme=q.scheme, shape=q.shape, scales=(torch.ones_like(q.scales[0]),), dtype=q.dtype
    )
    found = zp.quantize(codes.float(), params)
    assert torch.equal(found.codes.long(), codes.long())
    return found


def product(
    x: torch.Tensor, weight: zp.QuantizedTensor, bias: torch.Tensor | None = None, scheme: str = "int8:token"
) -> torch.Tensor:
    """Return the operator's output where each row of ``x`` gives its own scale."""
    return library.linear(
        x, [], weight.data, list(weight.scales), bias, scheme, str(weight.scheme), weight.dtype
    )


def fixed(x: torch.Tensor, weight: zp.QuantizedTensor, zero: int) -> torch.Tensor:
    """Return the output where the input has scale 1 and zero point ``zero``: the sums themselves."""
    given = [torch.ones(1, 1), torch.full((1, 1), zero, dtype=torch.int32)]
    scheme = "uint8:tensor:asym"
    return library.linear(
        x, given, weight.data, list(weight.scales), None, scheme, str(weight.scheme), weight.dtype
    )


def mixed(shape: tuple[int, int], ends: tuple[int, int], seed: int) -> torch.Tensor:
    """Return whole numbers between ``ends``, a third of them at one of these."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(ends[0], ends[1] + 1, shape, generator=generator)
    kind = torch.randint(0, 6, shape, generator=generator)
    return torch.where(kind == 0, ends[0], torch.where(kind == 1, ends[1], numbers))


@pytest.fixture(params=[False, True], ids=["pairs", "quads"])
def quads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Choose the kernel on codes in 16 or in 8 bits, whatever the processor has instructions for."""
    monkeypatch.setattr(KERNELS, "adds_quads", lambda: request.param)
    kernel_of.cache_clear()
    yield request.param
    kernel_of.cache_clear()


def test_a_kernel_runs_here() -> None:
    assert choose(wanted("int8:token", "int8:channel", (4, 32))).name == "cpu"


@pytest.mark.crossed
@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize("scheme", ENDS)
@pytest.mark.parametrize("cols", COLS)
def test_sums_are_those_of_int64_for_every_remainder(scheme: str, cols: int) -> None:
    for rows, out in itertools.product(ROWS, OUT):
        codes, weight = mixed((rows, cols), (0, 255), rows), mixed((out, cols), ENDS[scheme], out)
        for zero in (0, 100, 255):
            found = fixed((codes - zero).float(), unit_weight(weight, scheme), zero)
            assert torch.equal(found.long(), (codes - zero) @ weight.t()), (rows, out, zero)


@pytest.mark.parametrize(("scheme", "group"), [("int8:g16", 16), ("int4:g32", 32), ("int4:g128", 128)])
def test_sums_of_groups_are_those_of_int64(scheme: str, group: int) -> None:
    low, high = ENDS[scheme.split(":")[0] + ":channel"]
    for rows, out in itertools.product(ROWS, OUT):
        codes, weight = mixed((rows, 3 * group), (0, 255), rows), mixed((out, 3 * group), (low, high), out)
        found = fixed((codes - 7).float(), unit_weight(weight, scheme), 7)
        assert torch.equal(found.long(), (codes - 7) @ weight.t()), (rows, out)


@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize(
    ("scheme", "cols"),
    [("int8:g64", 64), ("int8:g64", 192), ("int4:g128", 384), ("int8:channel", 64), ("uint4:channel", 128)],
)
def test_sums_of_symmetric_inputs_are_those_of_int64(scheme: str, cols: int) -> None:
    ends = ENDS[scheme.split(":")[0] + ":channel"]
    for rows, out in itertools.product((*ROWS, 15, 16, 19, 130, 300), (*OUT, 9, 128, 135)):
        codes, weight = mixed((rows, cols), (-128, 127), rows), mixed((out, cols), ends, out)
        q = unit_weight(weight, scheme)
        found = library.linear(
            codes.float(),
            [torch.ones(1, 1)],
            q.data,
            list(q.scales),
            None,
            "int8:tensor",
            str(q.scheme),
            q.dtype,
        )
        assert torch.equal(found.long(), codes @ weight.t()), (rows, out)


def test_which_kernel_runs_is_decided_by_whole_steps_and_zero_points(quads: bool) -> None:
    expected = {
        ("int8:token", "int8:channel", 64): True,
        ("int8:token", "int8:channel", 96): False,
        ("uint8:token:asym", "int8:channel", 64): True,
        ("int8:token", "int4:g64", 128): True,
        ("int8:token", "int4:g32", 128): False,
        ("uint8:token:asym", "int4:g64", 128): False,
    }
    for (source, weight, cols), whole in expected.items():
        call = wanted(source, weight, (4, cols))
        bits = np.dtype(KERNELS._code_dtype(call, KERNELS._matrix_of(call))).itemsize * 8
        assert bits == (8 if whole and quads else 16), weight


@pytest.mark.parametrize(("scheme", "cols"), [("int8:channel", 48), ("int4:g32", 96), ("uint4:channel", 16)])
def test_products_with_floats_are_exact_where_floats_hold_them(scheme: str, cols: int) -> None:
    ends = ENDS[scheme.split(":")[0] + ":channel"]
    for rows, out in itertools.product(ROWS, OUT):
        x, weight = mixed((rows, cols), (-500, 500), rows), mixed((out, cols), ends, out)
        found = product(x.float(), unit_weight(weight, scheme), scheme="")
        assert torch.equal(found.long(), x @ weight.t()), (rows, out)


@pytest.mark.usefixtures("quads")
def test_the_longest_sums_do_not_overflow() -> None:
    cols = LONGEST - LONGEST % 64
    weight = torch.full((2, cols), -128)
    found = fixed(torch.full((5, cols), 255.0), unit_weight(weight, "int8:channel"), 0)
    # Near the end of int32 a float32 holds every 128th number.
    assert torch.equal(found, torch.full((5, 2), -128 * 255 * cols, dtype=torch.int64).float())


@pytest.mark.crossed
@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int8:token", "uint8:token:asym"])
def test_results_are_sums_times_scales_in_that_order(dtype: torch.dtype, scheme: str) -> None:
    torch.manual_seed(0)
    # The last has several chunks of the weight, of which each has its part of the bias.
    for rows, cols, out in ((1, 40, 3), (7, 384, 33), (130, 64, 18), (21, 128, 70), (2, 4096, 203)):
        x, weight = torch.randn(rows, cols).to(dtype), zp.quantize(torch.randn(out, cols), "int8:channel")
        bias = torch.randn(2 * out)[::2]
        q = zp.quantize(x, scheme)
        codes = q.codes.long() - (0 if q.zero_point is None else q.zero_point)
        sums = (codes @ weight.codes.long().t()).float()
        expected = (sums * weight.scales[0].t()) * q.scales[0].float() + bias
        assert torch.equal(product(x, weight, bias, scheme), expected.to(dtype))


@pytest.mark.crossed
@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize("scheme", ["int8:channel", "int8:tensor", "int4:g64", "int8:tensor:scale=ceil"])
@pytest.mark.parametrize("source", ["int8:token", "uint8:token:asym", "int8:token:narrow"])
def test_the_kernel_agrees_with_the_reference(scheme: str, source: str) -> None:
    torch.manual_seed(1)
    x, bias = torch.randn(9, 2, 128), torch.randn(21)
    weight = zp.quantize(torch.randn(21, 128), scheme)
    found = product(x, weight, bias, source)
    with zp.only_backend("reference"):
        expected = product(x, weight, bias, source)
    # The reference adds in float64; here two groups are added, scaled and moved by a bias in float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.crossed
@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize("scheme", ["int8:channel", "int4:g64"])
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("source", ["int8:token", ""])
def test_neither_threads_nor_other_rows_change_a_result(scheme: str, rows: int, source: str) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(rows, 512), zp.quantize(torch.randn(4099 if rows < 9 else 257, 512), scheme)
    with thread_limit(1):
        whole = product(x, weight, scheme=source)
        apart = torch.cat([product(row, weight, scheme=source) for row in x.split(1)])
    assert torch.equal(whole, apart)
    for threads in (2, 3):
        with thread_limit(threads):
            assert torch.equal(product(x, weight, scheme=source), whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_as_quantize_refuses_it(bad: float) -> None:
    x, weight = torch.randn(2, 70, 64), zp.quantize(torch.randn(5, 64), "int8:channel")
    x[1, 66, 63] = bad
    with pytest.raises(NonFiniteError) as theirs:
        zp.quantize(x, "int8:token")
    with pytest.raises(NonFiniteError) as ours:
        product(x, weight)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(NonFiniteError, match=r"at \(1, 66, 63\)"):
        fixed(x, weight, 3)


@pytest.mark.parametrize("source", ["int8:token", ""])
def test_float64_is_computed_in_float64(source: str) -> None:
    x, weight = torch.randn(3, 64, dtype=torch.float64), zp.quantize(torch.randn(5, 64), "int8:channel")
    values = x if not source else zp.quantize(x, source).dequantize()
    expected = values @ weight.dequantize(torch.float64).t()
    torch.testing.assert_close(product(x, weight, scheme=source), expected, rtol=1e-12, atol=1e-12)


def test_rows_of_zeros_and_no_rows_give_the_bias() -> None:
    weight, bias = zp.quantize(torch.randn(5, 64), "int8:channel"), torch.randn(5)
    assert torch.equal(product(torch.zeros(3, 64), weight, bias), bias.expand(3, 5))
    assert product(torch.empty(2, 0, 64), weight, bias).shape == (2, 0, 5)


def test_inputs_of_any_stride_are_taken() -> None:
    x, weight = torch.randn(64, 10), zp.quantize(torch.randn(5, 64), "int8:channel")
    assert torch.equal(product(x.t(), weight), product(x.t().contiguous(), weight))
    wide = torch.randn(7, 128)
    assert torch.equal(product(wide[:, ::2], weight), product(wide[:, ::2].contiguous(), weight))


def test_subnormal_scales_survive_a_thread_that_flushes_them() -> None:
    x, weight = torch.randn(4, 64) * 2.0**-120, zp.quantize(torch.randn(5, 64) * 2.0**-6, "int8:channel")
    expected = product(x, weight)
    assert bool((expected.abs() < 2.0**-120).any())
    try:
        assert torch.set_flush_denormal(True)
        found = product(x, weight)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("weight", "source", "reason"),
    [
        ("float8_e4m3fn:channel", "int8:token", "float8_e4m3fn:channel is not int8 or int4"),
        ("int6:channel", "int8:token", "int6:channel is not int8 or int4"),
        ("uint8:channel", "int8:token", "uint8:channel is not symmetric"),
        ("int4:g32:asym", "int8:token", "int4:g32:asym is not symmetric"),
        ("int8:block2x32", "int8:token", "rows of int8:block2x32 share scales in blocks"),
        ("int8:channel", "", "rows of 90 are not a multiple of 16"),
        ("int8:g24", "int8:token", "groups of 24 in rows of 96 are not a multiple of 16"),
        ("int8:channel", "int8:tensor", "int8:tensor does not have one scale a token"),
        ("int8:channel", "int4:token", "int4:token is not int8 or uint8"),
        ("int8:channel", "uint8:token:asym=real", "zero points of uint8:token:asym=real are not integers"),
    ],
)
def test_what_is_no_product_of_integer_codes_is_refused(weight: str, source: str, reason: str) -> None:
    w = torch.randn(4, 96 if source else 90)
    q = zp.quantize(w.abs() if weight == "uint8:channel" else w, weight)
    with pytest.raises(UnsupportedError, match=r"^linear cannot run on integer codes: ") as error:
        product(torch.randn(2, q.shape[1]), q, scheme=source)
    assert reason in str(error.value)


def test_too_long_sums_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="which fit 32 bits"):
        wanted("int8:token", "int8:channel", (1, LONGEST + 1))


@pytest.mark.crossed
@pytest.mark.parametrize("source", ["int8:token", "int8:tensor", "uint8:tensor:asym", ""])
@pytest.mark.parametrize("scheme", ["int8:channel", "int4:g64"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tensors_that_are_too_short_are_refused_before_they_are_read(
    scheme: str, source: str, backend: str
) -> None:
    x, weight = torch.randn(4, 128), zp.quantize(torch.randn(8, 128), scheme)
    whole = {
        "int8:tensor": [torch.ones(1, 1)],
        "uint8:tensor:asym": [torch.ones(1, 1), torch.zeros(1, 1).int()],
    }
    given, scale = whole.get(source, []), weight.scales[0]

    def run(
        params: list[torch.Tensor], scales: list[torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        with zp.only_backend(backend):
            return library.linear(x, params, weight.data, scales, bias, source, scheme, weight.dtype)

    assert run(given, [scale], torch.zeros(8)).shape == (4, 8)
    wrong = [
        (given, [scale[:3].clone()], None, "scales and zero points"),
        (given, [scale[:, :0]], None, "scales and zero points"),
        (given, [scale, scale], None, "scales and zero points"),
        (given, [scale], torch.zeros(7), "bias"),
        (given, [scale], torch.zeros(9), "bias"),
    ]
    if given:
        wrong += [
            ([torch.ones(0), *given[1:]], [scale], None, "scales and zero points"),
            ([*given[:1], torch.ones(0).int()], [scale], None, "scales and zero points"),
        ]
    for params, scales, bias, named in wrong:
        with pytest.raises(ShapeError, match=f"^{named}"):
            run(params, scales, bias)
