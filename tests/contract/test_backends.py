"""Every backend gives the bytes of the reference, for every scheme, dtype, shape, stride and thread count."""

import math
from dataclasses import replace

import pytest
import torch
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.functional import quantize_part, row_errors
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, Request, explain, kernel_of
from zeropoint.ops.threads import thread_limit
from zeropoint.schemes import PRESETS, Scheme, ZeroPoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((8, 256), (3, 5, 70), (1, 4099), (130, 33), (17,), (2, 2, 3, 48), (12, 384))
ELEMENTS = (
    "int8", "int8:channel", "int8:channel1", "int8:channel-1", "int8:token:narrow", "int2:g16", "int3:g8",
    "int5:g40", "int6:token", "int7:g24", "uint8:token", "uint4:g32", "binary:g32", "ternary:token",
    "float8_e5m2:channel", "float8_e4m3fnuz:token", "float8_e5m2fnuz:token", "float6_e3m2fn:g32",
    "float6_e2m3fn:g32", "float8_e4m3fn:cast", "e3m4:g32", "e2m2:token", "e4m0:token", "int4:block4x16",
    "float8_e4m3fn:block16x32", "int4:g1000", "table4:channel:scale=float16", "table2:g24",
    "table3:block4x16:scale=bfloat16",
)  # fmt: skip
SCALES = (
    "mxfp4:scale=even", "mxfp4:scale=ceil", "mxfp4:scale=rceil", "mxfp8_e5m2:scale=rceil",
    "int4:g32:scale=float16", "int4:g32:scale=bfloat16", "int4:g32:scale=input",
    "int4:g16:scale=ue4m3:scale2=float32@tensor", "mxint8:scale=ceil",
)  # fmt: skip
ZEROS = (
    "uint8:channel:asym", "uint4:g32:asym", "int8:tensor:asym", "int3:g8:asym=real", "uint8:token:asym=real",
    "uint4:g32:asym:scale=float16", "int4:g32:narrow:asym",
)  # fmt: skip
DIALECTS = (
    "int4:g128:dialect=torch", "uint8:channel:asym:dialect=torch", "uint8:tensor:asym:dialect=onnx",
    "int8:tensor:asym:dialect=burn:round=half_even", "uint4:g32:asym:dialect=compressed-tensors:scale=input",
    "mxfp4:dialect=compressed-tensors", "float4_e2m1fn:token:dialect=compressed-tensors:scale=input",
    "nvfp4:dialect=modelopt",
)  # fmt: skip
WEIGHTS = tuple(dict.fromkeys(preset.weight for preset in PRESETS.values()))
SCHEMES = (*ELEMENTS, *SCALES, *ZEROS, *DIALECTS, *WEIGHTS)
FAMILIES = ("int8:g32", "int4:g128", "int3:token", "uint4:g16:asym", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4")


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal data with a spread of rows, both zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp(torch.randn((*shape[:-1], 1), generator=generator))
    x.view(-1)[::7] = 0.0
    x.view(-1)[3::11] = -0.0
    if len(shape) > 1 and shape[0] > 2:
        x[1] = 0.0
    return x.to(dtype)


def sample_for(scheme: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a sample without negative numbers where the scheme's elements have none."""
    x, parsed = sample(shape, dtype, seed), Scheme.parse(scheme)
    return x.abs() if parsed.element.min >= 0 and parsed.zero_point is ZeroPoint.NONE else x


def assert_same_everywhere(x: torch.Tensor, scheme: str) -> str:
    """Run all operators on the reference and on the chosen backend; return the latter's name."""
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
        values, faked = expected.dequantize(), zp.fake_quantize(x, expected.params)
    actual = zp.quantize(x, scheme)
    for mine, theirs in zip(actual.scales, expected.scales, strict=True):
        assert same_bytes(mine, theirs), f"scales of {scheme} differ"
    if expected.zero_point is not None:
        assert actual.zero_point is not None
        assert same_bytes(actual.zero_point, expected.zero_point), f"zero points of {scheme} differ"
    assert same_bytes(actual.data, expected.data), f"codes of {scheme} differ"
    assert same_bytes(expected.dequantize(), values), f"values of {scheme} differ"
    assert same_bytes(zp.fake_quantize(x, expected.params), faked), (
        f"fake-quantized values of {scheme} differ"
    )
    if "_late" not in str(expected.scheme):  # those give other codes under the scales as they are stored
        given = zp.quantize(x, expected.params).data
        assert same_bytes(given, expected.data), f"codes of {scheme} under given parameters differ"
        assert same_bytes(values, faked), f"fake quantization of {scheme} is not quantize and dequantize"
    assert same_bytes(values, zp.fake_quantize(x, scheme)), f"fake quantization of {scheme} is another"
    assert same_bytes(gradient(x, expected, "reference"), gradient(x, expected, None)), (
        f"gradients of {scheme} differ"
    )
    return zp.explain(x, scheme).chosen


def assert_same_errors(x: torch.Tensor, scheme: str) -> None:
    """Compare measured errors with the reference's, in float64."""
    q = zp.quantize(x, scheme)
    actual = row_errors(x, q)
    wanted = request(Op.MEASURE, x, q.scheme)
    expected = kernel_of(wanted, "reference").run(x, q.data, q.params.stored)
    # Sums of 4100 float32 squares, 32 at a time: a relative error of some 32 * 2**-24.
    torch.testing.assert_close(actual.squares, expected.squares, rtol=4e-6, atol=0)
    torch.testing.assert_close(actual.errors, expected.errors, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(actual.largest, expected.largest, rtol=1e-5, atol=1e-12)
    assert abs(int(actual.clipped.sum()) - int(expected.clipped.sum())) <= 1


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "scheme", ["int4:g128", "uint4:g32:asym", "int8:g64", "int3:g32", "mxfp4", "nvfp4", "nf4:g64", "int4:g48"]
)
def test_short_rows_have_the_errors_that_each_has_alone(scheme: str, dtype: torch.dtype) -> None:
    for columns in (32, 96, 128, 384, 1024, 1056):
        x = sample_for(scheme, (21, columns), dtype, seed=columns)
        if columns % Scheme.parse(scheme).granularity.block_shape((1, 1 << 20))[1]:
            continue
        params = zp.quantize(x, scheme).params
        q = zp.quantize(x * 1.25, params)  # some of it clipped
        whole = row_errors(x * 1.25, q)
        for row in range(len(x)):
            scales, zero = _row(params.scales, row), _zero(params, row)
            own = replace(params, shape=(1, columns), scales=scales, zero_point=zero)
            alone = row_errors(x[row : row + 1] * 1.25, zp.quantize(x[row : row + 1] * 1.25, own))
            found = (whole.squares[row], whole.errors[row], whole.largest[row], whole.clipped[row])
            assert found == (alone.squares[0], alone.errors[0], alone.largest[0], alone.clipped[0])


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "scheme", ["q4_0", "q3_k", "q6_k", "iq4_nl", "int4:g16:scale=signed", "int4:g48:scale=signed"]
)
def test_few_values_are_clipped_under_scales_of_both_signs(scheme: str, dtype: torch.dtype) -> None:
    columns = 768
    x = torch.randn((32, columns), generator=torch.Generator().manual_seed(5)).to(dtype)
    q = zp.quantize(x, scheme)
    found = row_errors(x, q)
    with zp.only_backend("reference"):
        wanted = row_errors(x, q)
    assert bool((q.params.effective_scale() < 0).any())
    assert found.clipped.tolist() == wanted.clipped.tolist()
    assert 0 < found.clipped.sum() < x.numel() / 50


def _row(levels: tuple[torch.Tensor, ...], row: int) -> tuple[torch.Tensor, ...]:
    return tuple(level[row : row + 1] if len(level) > 1 else level for level in levels)


def _zero(params: zp.QuantizationParams, row: int) -> torch.Tensor | None:
    return None if params.zero_point is None else params.zero_point[row : row + 1]


def gradient(x: torch.Tensor, q: zp.QuantizedTensor, backend: str | None) -> torch.Tensor:
    """Return the straight-through gradient of values half as large again, some of which are clipped."""
    slope = torch.ones_like(x)
    arguments = (slope, x * 1.5, list(q.params.stored), str(q.scheme))
    if backend is None:
        return torch.ops.zeropoint.fake_quantize_backward(*arguments)
    with zp.only_backend(backend):
        return torch.ops.zeropoint.fake_quantize_backward(*arguments)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gives_the_same_bytes_on_every_backend(scheme: str, dtype: torch.dtype) -> None:
    tried = 0
    for shape in SHAPES:
        if len(Scheme.parse(scheme).granularity.extents) <= len(shape):
            assert_same_everywhere(sample_for(scheme, shape, dtype), scheme)
            tried += 1
    assert tried > 0


@pytest.mark.crossed
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", [*FAMILIES, "nf4", "binary:g32", "float8_e4m3fn:cast", "int4:block4x16"])
def test_what_torchs_default_device_is_changes_nothing(scheme: str, backend: str) -> None:
    x = sample((8, 96), torch.bfloat16)
    with zp.only_backend(backend):
        expected = zp.quantize(x, scheme)
        with torch.device("meta"):
            actual = zp.quantize(x, scheme)
            values, faked = actual.dequantize(), zp.fake_quantize(x, actual.params)
            errors = row_errors(x, actual)
    assert same_bytes(actual.data, expected.data)
    assert same_bytes(values, expected.dequantize())
    assert same_bytes(faked, values)
    assert float(errors.squares.sum()) > 0


@pytest.mark.parametrize("scheme", FAMILIES)
def test_every_length_gives_the_same_bytes(scheme: str) -> None:
    """Of three lengths one for each scheme, so that several schemes have each."""
    for length in range(FAMILIES.index(scheme) % 3, 258, 3):
        dtype = DTYPES[length % 2]
        assert assert_same_everywhere(sample((2, length), dtype, seed=length), scheme) == "cpu"


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "element",
    [
        "int8",
        "int4",
        "int3",
        "uint4",
        "nf4",
        "float4_e2m1fn",
        "float8_e4m3fn",
        "float6_e3m2fn",
        "int8:asym",
        "uint4:asym",
    ],
)
def test_blocks_of_any_number_of_whole_steps_give_the_same_bytes(element: str, dtype: torch.dtype) -> None:
    """Several such blocks fit a tile, whole ones, and with the rest of a row behind them."""
    name, *more = element.split(":")
    for group in (96, 224, 256, 288, 320, 992, 1056):
        for rest in (0, 32, 7, group - 32):
            scheme = ":".join((name, f"g{group}", *more))
            x = sample_for(scheme, (3, 4 * group + rest), dtype, seed=group)
            assert assert_same_everywhere(x, scheme) == "cpu"
            assert_same_errors(x, scheme)


@pytest.mark.parametrize("scheme", ["int8:channel", "int4:g32", "mxfp4", "uint8:channel:asym", "nf4"])
def test_every_stride_gives_the_bytes_of_the_contiguous_tensor(scheme: str) -> None:
    base = sample((12, 10, 64), torch.float32)
    views = {
        "transposed": base.transpose(0, 1), "every second row": base[::2],
        "every second column": base[:, :, ::2], "flipped": base.flip(0),
        "expanded": base[:1].expand(5, 10, 64), "offset": base.view(-1)[1:641].view(10, 64),
        "channels last": base.view(3, 4, 10, 64).to(memory_format=torch.channels_last),
    }  # fmt: skip
    for name, view in views.items():
        before = view.clone()
        assert same_bytes(zp.quantize(view, scheme).data, zp.quantize(view.contiguous(), scheme).data), name
        assert torch.equal(view, before), f"{name} was modified"


@pytest.mark.parametrize("scheme", [*FAMILIES, "float8_e4m3fn:tensor", "int8:channel-1", "int4:block4x16"])
def test_threads_do_not_change_a_byte(scheme: str) -> None:
    x = sample((700, 769), torch.bfloat16)
    results = []
    for threads in (1, 2, 7):
        with thread_limit(threads):
            q = zp.quantize(x, scheme)
            results.append((q.data, *q.scales, q.dequantize(), zp.fake_quantize(x, q.params)))
    for other in results[1:]:
        assert all(same_bytes(a, b) for a, b in zip(results[0], other, strict=True))


EXTREMES = (
    2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 1e-38, 2.0**-24, 2.0**-14, 1.75, math.nextafter(2.0, 0), 2.0,
    3.5, 7.0, 448.0, 464.0, 1e30, 2.0**127, torch.finfo(torch.bfloat16).max,
)  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize(
    "scheme",
    [s for s in (*FAMILIES, *(p.weight for p in PRESETS.values()), "mxfp4:scale=ceil") if "float16" not in s],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_at_the_ends_of_the_range_give_the_same_bytes(scheme: str, dtype: torch.dtype) -> None:
    for largest in EXTREMES:
        x = torch.linspace(-1, 1, 512).reshape(2, 256) * largest
        x[0, 5], x[1, 9] = largest, -largest
        try:
            with zp.only_backend("reference"):
                expected = zp.quantize(x.to(dtype), scheme)
        except zp.RangeError:
            with pytest.raises(zp.RangeError):
                zp.quantize(x.to(dtype), scheme)
            continue
        actual = zp.quantize(x.to(dtype), scheme)
        assert all(same_bytes(a, b) for a, b in zip(actual.scales, expected.scales, strict=True)), largest
        assert same_bytes(actual.data, expected.data), largest


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp4:dialect=compressed-tensors:scale=even"])
def test_the_16_bit_short_cut_gives_the_bytes_of_float32_for_every_bfloat16(scheme: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    for exponent in (-126, -120, -60, -8, 0, 9, 60, 126):
        small = finite[finite.abs() <= 2.0**exponent]
        blocks = torch.nn.functional.pad(small, (0, -small.numel() % 31)).reshape(-1, 31)
        x = torch.cat([torch.full((len(blocks), 1), 2.0**exponent, dtype=torch.bfloat16), blocks], 1)
        with zp.only_backend("reference"):
            expected = zp.quantize(x, scheme)
        actual = zp.quantize(x, scheme)
        assert same_bytes(actual.data, expected.data)
        assert same_bytes(actual.scales[0], expected.scales[0])


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_can_be_written_into_earlier_ones(scheme: str) -> None:
    first, second = (sample_for(scheme, (6, 288), torch.bfloat16, seed=seed) for seed in (1, 2))
    if len(Scheme.parse(scheme).granularity.extents) > 2:
        pytest.fail("the list of schemes has no such granularity")
    target, expected = zp.quantize(first, scheme), zp.quantize(second, scheme)
    result = zp.quantize(second, scheme, out=target)
    assert result.data.data_ptr() == target.data.data_ptr()
    assert same_bytes(result.data, expected.data)
    assert all(same_bytes(a, b) for a, b in zip(result.scales, expected.scales, strict=True))
    values = torch.empty(6, 288, dtype=torch.float32)
    assert same_bytes(zp.dequantize(result, out=values), expected.dequantize(torch.float32))


WHOLE = (
    "int8", "int8:tensor:asym", "uint8:tensor:asym:dialect=onnx", "float8_e4m3fn:tensor", "nvfp4", "nvfp4a16",
    "int4:g16:scale=ue4m3:scale2=float32@tensor", "mx9", "int4:g128",
    "int8:g4:scale=floor:scale2=floor@tensor", "int8:tensor:scale=floor:scale2=floor@tensor",
)  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WHOLE)
def test_parts_have_the_codes_of_the_whole_from_its_extremes(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    scheme = name
    x = sample((48, 256), dtype)
    extremes = float(x.min()), float(x.max())
    with zp.only_backend(backend):
        expected, last, rows = zp.quantize(x, scheme), None, 0
        for first, end in ((0, 16), (16, 32), (32, 46), (46, 47), (47, 48)):
            part = quantize_part(
                x[first:end], expected.scheme, extremes, out=last if end - first == rows else None
            )
            assert same_bytes(part.data, expected.data[first:end])
            assert same_bytes(part.dequantize(), expected.dequantize()[first:end])
            last, rows = part, end - first


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_extremes_that_are_not_finite_are_refused(name: str, backend: str) -> None:
    x = sample((16, 64), torch.float32)
    with zp.only_backend(backend), pytest.raises(zp.NonFiniteError, match="must be finite"):
        quantize_part(x, zp.Scheme.parse(name), (math.nan, math.nan))


def test_parts_of_a_tensor_do_not_depend_on_who_asked_first_for_its_scale() -> None:
    x, scheme, extremes = sample((16, 64), torch.float32), zp.Scheme.parse("nvfp4"), (-7.25, 8.5)
    place = quantize_part(x, scheme, (-1.0, 1.0))
    with torch.inference_mode(), torch.device("meta"):
        quantize_part(x, scheme, extremes, out=place)
    found = quantize_part(x, scheme, extremes)
    assert same_bytes(found.scales[1], place.scales[1])
    assert not found.scales[1].is_inference()
    found.scales[1].mul_(2)
    assert same_bytes(quantize_part(x, scheme, extremes).scales[1], place.scales[1])


@pytest.mark.parametrize("scheme", [*FAMILIES, "float8_e4m3fn:block16x32", "mxint8", "int4:token:narrow"])
def test_measured_errors_agree_with_float64(scheme: str) -> None:
    x = sample((20, 4100), torch.bfloat16) + 0.01
    assert_same_errors(x, scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        "q2_k",
        "q4_k",
        "q5_1",
        "uint4:g20:scale=float32:offset=float32",
        "uint3:channel:scale=float16:offset=float16",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_codes_with_offsets_are_measured_by_kernels(scheme: str, dtype: torch.dtype) -> None:
    x = sample((7, 5120), dtype) + 0.01
    assert zp.explain(x, scheme, op="measure").chosen == "cpu"
    assert_same_errors(x, scheme)
    decoded = zp.quantize(x, scheme).dequantize(torch.float32)
    found = row_errors(decoded, replace(zp.quantize(x, scheme), dtype=torch.float32))
    assert not found.errors.any()
    assert not found.largest.any()


@pytest.mark.crossed
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", [*FAMILIES, "float8_e4m3fn:tensor", "int4:block4x16", "mx9"])
def test_one_value_that_is_not_finite_is_refused_wherever_it_stands(scheme: str, value: float) -> None:
    for place in (0, 1, 15, 31, 32, 100, 257):
        x = sample((4, 258), torch.bfloat16)
        x[2, place] = value
        with pytest.raises(zp.NonFiniteError, match=rf"at \(2, {place}\)"):
            zp.quantize(x, scheme)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scheme", ["int8", "uint8:tensor:asym", "float8_e4m3fn", "mxfp4", "nf4:g32", "mx6:g2"]
)
def test_fake_quantization_treats_nan_and_inf_alike_on_every_backend(scheme: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, -2.0, 5e4, -0.0, 0.3] * 4], dtype=dtype)
    params = zp.choose_params(sample((1, 32), dtype), scheme)
    with zp.only_backend("reference"):
        expected = zp.fake_quantize(x, params)
    actual = zp.fake_quantize(x, params)
    assert torch.equal(torch.isnan(actual), torch.isnan(expected))
    assert bool(torch.isnan(actual[0, 0])) == (not scheme.startswith(("int", "uint")))
    assert same_bytes(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("scheme", [*FAMILIES, "float8_e4m3fn:token", "mxint8"])
def test_flushing_subnormals_to_zero_changes_no_byte(scheme: str) -> None:
    x = sample((40, 256), torch.float32) * torch.logspace(-44, -30, 40).unsqueeze(1)
    expected = zp.quantize(x, scheme)
    values = expected.dequantize()
    assert torch.set_flush_denormal(True)
    try:
        actual = zp.quantize(x, scheme)
        again = actual.dequantize()
        assert bool((torch.tensor(1e-40) * 1 == 0).item()), "the mode of the caller's thread is kept"
    finally:
        torch.set_flush_denormal(False)
    assert same_bytes(actual.data, expected.data)
    assert all(same_bytes(a, b) for a, b in zip(actual.scales, expected.scales, strict=True))
    assert same_bytes(again, values)


def test_explanations_name_the_reason_of_each_refusal() -> None:
    cases = {
        ("int8", torch.float64): "float64", ("int12:g32", torch.float32): "wider than a byte",
        ("int8:round=stochastic(7)", torch.float32): "rounding stochastic",
        ("int8:overflow=error", torch.float32): "overflow",
    }  # fmt: skip
    for (scheme, dtype), reason in cases.items():
        reported = explain(
            Request(
                op=Op.QUANTIZE, scheme=Scheme.parse(scheme), shape=(4, 64), dtype=dtype, own_dtype=dtype,
                device=torch.device("cpu"),
            )
        )  # fmt: skip
        assert reported.chosen == "reference"
        assert reason in reported.reasons["cpu"]


def test_a_backend_that_cannot_run_a_request_is_an_error_when_it_is_the_only_one_allowed() -> None:
    with zp.only_backend("cpu"), pytest.raises(zp.UnsupportedError, match="wider than a byte"):
        zp.quantize(torch.ones(2, 32), "int12:g32")


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_are_quantized_to_the_last_row() -> None:
    """Of 4.3 GB in bfloat16 and 1.1 GB in codes."""
    rows, cols = 32769, 65536
    x = torch.zeros(rows, cols, dtype=torch.bfloat16)
    x[-1] = sample((cols,), torch.bfloat16)
    q = zp.quantize(x, "mxfp4")
    expected = zp.quantize(x[-1:], "mxfp4")
    assert rows * cols > 1 << 31
    assert torch.equal(q.data[-1:], expected.data)
    assert int(q.data[:-1].max()) == 0
