"""Parameters from given numbers and vectors, and those that serve tensors of any shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zeropoint as zp
from zeropoint import QuantizationParams, RangeError, SchemeError, ShapeError

WORD: Any = "a"
FRACTION: Any = 2.5


def test_the_statement_of_torsh_is_no_silent_nothing() -> None:
    with pytest.raises(zp.UnsupportedError, match=r"write params = params.with_range\(minimum, maximum\)"):
        QuantizationParams.int8_symmetric().from_statistics(-2.0, 2.0)


@pytest.mark.parametrize("axis", [0, 1, 3, -1, -3])
def test_given_vectors_are_for_the_channels_of_an_axis(axis: int) -> None:
    x = torch.randn(3, 4, 5, 6)
    count = x.shape[axis]
    scale, zeros = torch.rand(count) + 0.1, torch.arange(count, dtype=torch.int32)
    params = QuantizationParams.given("uint8", scale, zeros, axis=axis)
    sides = [-1 if place == axis % 4 else 1 for place in range(4)]
    s, z = scale.reshape(sides), zeros.reshape(sides)
    assert torch.equal(zp.quantize(x, params).codes, ((x / s).round() + z).clamp(0, 255).to(torch.uint8))


def test_given_grids_are_for_the_blocks_of_a_shape() -> None:
    scale = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    params = QuantizationParams.given("int8:g2", scale, shape=(2, 4), dtype=torch.bfloat16)
    assert params == QuantizationParams.given(
        "int8:g2", scale.flatten().tolist(), shape=(2, 4), dtype=torch.bfloat16
    )
    assert torch.equal(params.scales[0], scale)


def test_given_scales_are_rounded_to_their_format_and_keep_their_gradient() -> None:
    scale = torch.tensor([0.1, 0.2], requires_grad=True)
    params = QuantizationParams.given("int8:channel:scale=bfloat16", scale)
    assert torch.equal(params.scales[0], scale.to(torch.bfloat16))
    params.scales[0].sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [1.0, 1.0]
    assert QuantizationParams.given("mxfp4", 2.0).scales[0].float().tolist() == [2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: QuantizationParams.given("int8", [1.0, 2.0]), ShapeError, r"2 numbers\) must be one"),
        (
            lambda: QuantizationParams.given("int8", [1.0, 2.0, 3.0], [0, 1], axis=0),
            ShapeError, r"zero_point \(shape \(2,\)\) must be one number, or a vector of 3",
        ),
        (lambda: QuantizationParams.given("int8", [1.0, -2.0], axis=0), RangeError, "must be finite and at"),
        (lambda: QuantizationParams.given("uint8", 1.0, 256), RangeError, r"\(=256\) .* must lie in 0"),
        (lambda: QuantizationParams.given("uint8", 1.0, 0.5), RangeError, r"0.5\) of block .* whole number"),
        (lambda: QuantizationParams.given("int8", "wide"), RangeError, r"scale \(='wide'\) must be a number"),
        (lambda: QuantizationParams.given("int8", torch.tensor(True)), RangeError, "must be of real numbers"),
        (lambda: QuantizationParams.given("int8:scale=ue4m3", -1.0), RangeError, r"\(-1.0..-1.0\) must lie"),
        (lambda: QuantizationParams.given("nvfp4", 1.0), SchemeError, "must have one scale level"),
        (lambda: QuantizationParams.given("int8:cast", 1.0, axis=0), SchemeError, "which a cast has not"),
        (lambda: QuantizationParams.new(WORD), RangeError, r"scale \(='a'\) must be a number"),
        (lambda: QuantizationParams.channel_wise(0), ShapeError, r"count \(=0\) must be a whole number"),
        (lambda: QuantizationParams.channel_wise(FRACTION), ShapeError, r"count \(=2.5\) must be"),
    ],
)  # fmt: skip
def test_given_numbers_that_mean_nothing_are_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.crossed
@pytest.mark.parametrize("shape", [(128,), (256,), (300,), (4, 256), (2, 3, 130)])
@pytest.mark.parametrize("element", ["int8", "uint8:asym", "float4_e2m1fn"])
def test_block_wise_serves_any_number_of_blocks(element: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) * 5
    params = QuantizationParams.block_wise(128, element)
    q = zp.quantize(x, params)
    assert q.scales[0].shape == (*shape[:-1], -(-shape[-1] // 128))
    whole = QuantizationParams.given(f"{element}:tensor", 1.0, 0 if params.zero_point is None else 128)
    assert torch.equal(q.dequantize(), zp.quantize(x, whole).dequantize())


def test_parameters_of_a_tensor_of_one_block_serve_no_other_number_of_blocks() -> None:
    params = zp.quantize(torch.ones(128), "int8:g128").params
    with pytest.raises(ShapeError, match=r"do not fit a tensor of shape \(256,\)"):
        zp.quantize(torch.ones(256), params)
