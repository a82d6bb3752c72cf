"""Every backend on every device gives the bytes that the reference gives on the host, or says why not."""

from typing import Any

import pytest
import torch
from tests.contract.conftest import Place
from tests.contract.test_backends import sample_for
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.functional import row_errors
from zeropoint.ops import linear
from zeropoint.ops.registry import Op, Request, explain, kernel_of
from zeropoint.ops.row_errors import RowErrors

pytestmark = pytest.mark.rotating

SCHEMES = (
    "int8:channel", "int8:token:narrow", "int8:tensor", "int8:channel1", "int8:g32", "uint8:channel:asym",
    "int4:g32", "float8_e4m3fn:channel", "mxfp4", "nvfp4", "nf4:g32", "int8:channel:dialect=torch",
)  # fmt: skip
SHAPES = ((8, 96), (3, 5, 70), (33, 33), (1, 2050), (17,), (0, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OFFERED = {
    "reference": set(Op) - {Op.SEARCH},  # int8 by rows is no type of ggml
    "cpu": set(Op) - {Op.DEQUANTIZE_BACKWARD, Op.SEARCH},
    "triton": {
        Op.CHOOSE_PARAMS, Op.QUANTIZE_DYNAMIC, Op.QUANTIZE, Op.DEQUANTIZE, Op.FAKE_QUANTIZE,
        Op.FAKE_QUANTIZE_BACKWARD, Op.SEARCH_PARAMS, Op.MEASURE, Op.JOIN_BLOCKS, Op.SPLIT_BLOCKS, Op.TO_LINES,
        Op.FROM_LINES, Op.LINEAR_VALUES,
    },
}  # fmt: skip
"""What each backend offers for int8 with a scale for each row."""


def asked(op: Op, x: torch.Tensor, scheme: zp.Scheme, place: Place, **named: Any) -> Request:
    device = torch.empty(0, device=place.device).device
    return Request(
        op=op, scheme=scheme, shape=tuple(x.shape), dtype=x.dtype, own_dtype=x.dtype, device=device, **named
    )


def offers(op: Op, x: torch.Tensor, scheme: zp.Scheme, place: Place) -> bool:
    """Whether the backend runs the operator; where it does not there is a reason."""
    reported = explain(asked(op, x, scheme, place))
    reason = reported.reasons.get(place.backend)
    assert (reason is None) == (reported.chosen == place.backend)
    return reason is None or reason.startswith("slower than ")


def moved(params: zp.QuantizationParams, device: str) -> zp.QuantizationParams:
    return params if device == "cpu" else params.to(device)


def on_the_host(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor:
    with zp.only_backend("reference"):
        return zp.quantize(x, scheme)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_backend_on_every_device_gives_the_same_bytes(
    scheme: str, dtype: torch.dtype, place: Place
) -> None:
    tried = 0
    for shape in SHAPES:
        parsed = zp.Scheme.parse(scheme)
        if len(parsed.granularity.extents) > len(shape):
            continue
        tried += 1
        x = sample_for(scheme, shape, dtype)
        expected, here = on_the_host(x, scheme), x.to(place.device)
        params = moved(expected.params, place.device)
        if offers(Op.QUANTIZE_DYNAMIC, x, parsed, place):
            found = zp.quantize(here, scheme).to("cpu")
            assert same_bytes(found.data, expected.data)
            assert all(same_bytes(a, b) for a, b in zip(found.scales, expected.scales, strict=True))
        if offers(Op.QUANTIZE, x, parsed, place):
            assert same_bytes(zp.quantize(here, params).data.cpu(), expected.data)
        if offers(Op.DEQUANTIZE, x, parsed, place):
            q = zp.QuantizedTensor(
                data=expected.data.to(place.device), params=params, shape=shape, dtype=dtype
            )
            with zp.only_backend("reference"):
                values = expected.dequantize()
            assert same_bytes(q.dequantize().cpu(), values)
        if offers(Op.FAKE_QUANTIZE, x, parsed, place):
            with zp.only_backend("reference"):
                values = zp.fake_quantize(x, expected.params)
            assert same_bytes(zp.fake_quantize(here, params).cpu(), values)
        if offers(Op.CHOOSE_PARAMS, x, parsed, place):
            chosen = zp.choose_params(here, scheme).to("cpu")
            assert all(same_bytes(a, b) for a, b in zip(chosen.scales, expected.scales, strict=True))
    assert tried > 0


def test_each_backend_offers_what_it_is_known_for(place: Place) -> None:
    x, scheme = torch.ones(8, 32), zp.Scheme.parse("int8:channel")
    assert {op for op in set(Op) - {Op.SEARCH} if offers(op, x, scheme, place)} == OFFERED[place.backend]


def test_errors_are_measured_on_every_device(place: Place) -> None:
    x = sample_for("int8:channel", (6, 100), torch.float32)
    if not offers(Op.MEASURE, x, zp.Scheme.parse("int8:channel"), place):
        return
    q, here = on_the_host(x, "int8:channel"), x.to(place.device)
    expected: RowErrors = kernel_of(
        asked(Op.MEASURE, x, q.scheme, Place("reference", "cpu")), "reference"
    ).run(x, q.data, q.params.stored)
    found = row_errors(here, q.to(place.device))
    assert float(expected.squares.sum()) > 0
    for name in ("squares", "errors", "largest"):
        torch.testing.assert_close(
            torch.from_numpy(getattr(found, name)),
            torch.from_numpy(getattr(expected, name)),
            rtol=1e-4,
            atol=1e-9,
        )


def test_layers_of_integer_codes_give_the_same_sums_on_every_device(place: Place) -> None:
    x, q = sample_for("int8:token", (5, 64), torch.float32), on_the_host(torch.randn(7, 64), "int8:channel")
    dtypes, device = (torch.float32, torch.float32), torch.empty(0, device=place.device).device
    request = linear.linear_request("int8:token", "int8:channel", (7, 64), dtypes, device, given=False)
    kernel = kernel_of(request, place.backend)
    params = moved(q.params, place.device)
    layer = kernel.run(q.data.to(place.device), params.stored, None)
    with zp.only_backend("reference"):
        expected = zp.quantize(x, "int8:token").dequantize().double() @ q.dequantize().double().t()
    torch.testing.assert_close(layer(x.to(place.device), None).cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.crossed
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_with_its_place(value: float, place: Place) -> None:
    x = torch.ones(3, 700)
    x[2, 650] = value
    params = zp.choose_params(torch.ones(3, 700), "int8:channel") if place.backend != "triton" else None
    params = params or on_the_host(torch.ones(3, 700), "int8:channel").params
    for scheme in ("int8:channel", moved(params, place.device)):
        with pytest.raises(zp.NonFiniteError, match=r"at \(2, 650\)"):
            zp.quantize(x.to(place.device), scheme)
