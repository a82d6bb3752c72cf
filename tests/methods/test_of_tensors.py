"""Methods on single tensors: the codes that a model's layer of this weight gets, from the same data."""

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.methods import method_named


def weight() -> torch.Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(0)) ** 3


def off(q: zp.QuantizedTensor, x: torch.Tensor) -> float:
    return float((q.dequantize() - x).square().sum())


@pytest.mark.parametrize("method", ["nearest", "mse"])
def test_a_tensor_has_the_codes_of_a_layer_with_this_weight(method: str) -> None:
    layer = nn.Linear(128, 32, bias=False)
    layer.weight.data = weight()
    made = zp.dequantize_model(zp.quantize_model(nn.Sequential(layer), "int4:g32", method=method).model)
    q = zp.quantize(weight(), "int4:g32", method=method)
    assert torch.equal(q.dequantize(), made[0].weight)


def test_a_method_that_takes_data_takes_inputs() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 4, 128, generator=generator) * torch.linspace(0.1, 4, 128)
    squares = inputs.reshape(-1, 128).square().mean(0)

    def weighted(method: str) -> float:
        q = zp.quantize(weight(), "int4:g32", method=method, inputs=inputs)
        return float(((q.dequantize() - weight()).square() * squares).sum())

    assert weighted("mse_weighted") < weighted("mse") < weighted("nearest")
    with pytest.raises(zp.CalibrationError, match="needs the mean_square of inputs; pass inputs="):
        zp.quantize(weight(), "int4:g32", method="mse_weighted")


def test_memory_is_used_again_and_any_rank_is_taken() -> None:
    first = zp.quantize(weight(), "int4:g32", method="mse")
    second = zp.quantize(2 * weight(), "int4:g32", method="mse", out=first)
    assert second.data.data_ptr() == first.data.data_ptr()
    cube = weight().reshape(2, 16, 128)
    assert off(zp.quantize(cube, "int4:g32", method="mse"), cube) < off(zp.quantize(cube, "int4:g32"), cube)


def test_what_means_nothing_is_one_sentence() -> None:
    params = zp.choose_params(weight(), "int4:g32")
    with pytest.raises(zp.UnsupportedError, match="method mse chooses parameters, and some are given"):
        zp.quantize(weight(), params, method="mse")
    with pytest.raises(zp.UnsupportedError, match="rotates what is multiplied with the result"):
        zp.quantize(weight(), "int4:g32", method="hadamard32+mse")
    with pytest.raises(zp.RecipeError, match="method 'msee' is unknown; did you mean mse"):
        zp.quantize(weight(), "int4:g32", method="msee")
    assert method_named("mse").name == "mse"


def test_layers_that_are_ignored_stay_as_they_are() -> None:
    model = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("up", "down", "head")})
    made = zp.quantize_model(model, "w4a16", ignore=["head", "re:d.*"])
    assert [layer.reason for layer in made.layers if layer.reason] == [
        "ignored by 're:d.*'",
        "ignored by 'head'",
    ]
    assert type(made.model["head"]) is nn.Linear
    assert type(made.model["up"]) is not nn.Linear
    prepared = zp.prepare(model, "w8a8", ignore="up")
    assert type(prepared["up"]) is nn.Linear
    assert type(prepared["down"]) is not nn.Linear
    with pytest.raises(zp.RecipeError, match="gate"):
        zp.quantize_model(model, "w4a16", ignore="gate")


def test_the_error_of_a_tensor_is_that_of_its_decoded_values() -> None:
    x = weight()
    found = zp.quantize(x, "int4:g32").error(x)
    difference = zp.quantize(x, "int4:g32").dequantize().double() - x.double()
    assert found.relative == pytest.approx(float(difference.norm() / x.double().norm()), rel=1e-12)
    assert found.largest == float(difference.abs().max())
    assert str(found).startswith(
        f"relative error {found.relative:.4f}, SQNR {found.sqnr_db:.1f} dB, largest "
    )
    assert str(zp.quantize(torch.ones(2, 32), "int8:g32:scale=ceil").error(torch.ones(2, 32))).startswith(
        "relative error 0.0000, SQNR exact"
    )
    assert zp.quantize(torch.zeros(0, 32), "int4:g32").error(torch.zeros(0, 32)).relative == 0
    with pytest.raises(zp.ShapeError, match="must have the shape"):
        zp.quantize(x, "int4:g32").error(x.T)
