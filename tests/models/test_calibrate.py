"""Static inputs and outputs take their parameters from data, and nothing of the model stays changed."""

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError
from zeropoint.models import calibrate, quantize_model
from zeropoint.recipes import Assignment, Recipe, Rule, parse_recipe
from zeropoint.schemes import Scheme
from zeropoint.stats import Histogram, Percentile, Statistic

STATIC = "w8a8_static"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 4))


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def test_parameters_are_those_of_all_data_at_once() -> None:
    net, data = model().eval(), batches()
    params = calibrate(net, STATIC, data).params
    whole = torch.cat(data)
    with torch.no_grad():
        inner = torch.relu(net[0](whole))
    for place, seen in (("0.input", whole), ("3.input", inner)):
        expected = zp.choose_params(seen, "uint8:tensor:asym")
        found, zero_point = params[place].scales[0], params[place].zero_point
        assert found.item() == expected.scales[0].item(), place
        assert zero_point is not None
        assert expected.zero_point is not None
        assert zero_point.item() == expected.zero_point.item(), place
    assert sorted(params) == ["0.input", "3.input"]


def test_the_converted_model_computes_with_the_learned_ranges() -> None:
    net, data = model().eval(), batches()
    calibration = calibrate(net, STATIC, data)
    conversion = quantize_model(net, STATIC, calibration=calibration)
    x = data[0]
    with torch.no_grad():
        found = conversion.model(x)
        fixed = zp.fake_quantize(x, calibration.params["0.input"])
        weight = zp.quantize(net[0].weight, "int8:channel:narrow").dequantize()
        inner = torch.relu(nn.functional.linear(fixed, weight, net[0].bias))
        fixed = zp.fake_quantize(inner, calibration.params["3.input"])
        weight = zp.quantize(net[3].weight, "int8:channel:narrow").dequantize()
        expected = nn.functional.linear(fixed, weight, net[3].bias)
        drift = (found - net(x)).norm() / net(x).norm()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert 0 < float(drift) < 0.03
    assert "fixed parameters" in conversion.model[0].explain()


def test_outputs_are_calibrated_and_quantized_too() -> None:
    net, data = model().eval(), batches()
    calibration = calibrate(net, "int8_power_of_two", data)
    assert sorted(calibration.params) == ["0.input", "0.output", "3.input", "3.output"]
    scale = calibration.params["3.output"].effective_scale()
    assert scale is not None
    with torch.no_grad():
        y = quantize_model(net, "int8_power_of_two", calibration=calibration).model(data[0])
    steps = y / scale.item()
    assert torch.equal(steps, steps.round())
    assert float(steps.abs().max()) <= 127


def test_calibration_leaves_the_model_as_it_was() -> None:
    net = model().train()
    net[1].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    calibrate(net, STATIC, batches())
    assert [module.training for module in net] == [True, False, True, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_hooks_are_gone_after_a_failure() -> None:
    net = model().train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        calibrate(net, STATIC, [torch.randn(8, 16), torch.randn(8, 17)])
    assert net.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_no_data_is_an_error_and_a_layer_without_numbers_is_named() -> None:
    with pytest.raises(CalibrationError, match="calibration data are empty"):
        calibrate(model(), STATIC, [])
    with pytest.raises(CalibrationError, match=r"^0\.input has seen no finite number"):
        calibrate(model(), STATIC, [torch.full((2, 16), torch.nan)])


def test_numbers_that_are_not_finite_poison_nothing() -> None:
    data = batches()
    spoiled = [*data, torch.full((1, 16), torch.inf)]
    clean, dirty = (calibrate(model().eval(), STATIC, d).params["0.input"] for d in (data, spoiled))
    assert torch.equal(clean.scales[0], dirty.scales[0])


def test_parameters_for_another_scheme_are_refused() -> None:
    calibration = calibrate(model(), STATIC, batches())
    with pytest.raises(CalibrationError, match="was calibrated for uint8:tensor:asym, not for float8_e4m3fn"):
        quantize_model(model(), "fp8_static", calibration=calibration)


def test_the_statistic_is_chosen_by_the_caller() -> None:
    def tails_cut(scheme: Scheme, shape: tuple[int, ...]) -> Statistic:
        return Histogram(granularity=scheme.granularity, shape=shape, rule=Percentile(percent=90.0))

    wide = calibrate(model(), STATIC, batches()).params["0.input"]
    cut = calibrate(model(), STATIC, batches(), statistic=tails_cut).params["0.input"]
    assert float(cut.scales[0]) < 0.8 * float(wide.scales[0])


def test_channels_of_the_last_axis_are_calibrated_one_by_one() -> None:
    gives = Assignment.of(weight="int8:channel", input="int8:channel-1")
    net, data = model().eval(), batches()
    recipe = Recipe(default=Rule(gives=gives))
    params = calibrate(net, recipe, data).params["0.input"]
    largest = torch.cat(data).abs().amax(0)
    torch.testing.assert_close(params.scales[0].reshape(-1), largest / 127.5, rtol=0, atol=0)
    assert quantize_model(net, recipe, calibration=calibrate(net, recipe, data)).model(data[0]).shape == (
        8,
        4,
    )


def test_batches_are_mappings_tuples_or_tensors_and_are_counted() -> None:
    class Adder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(a + b)
            return result

    x, seen = torch.randn(2, 16), []
    done = calibrate(Adder(), STATIC, [(x, x), {"a": x, "b": x}, [x, x]], on_batch=seen.append)
    assert (seen, done.batches) == ([1, 2, 3], 3)
    expected = zp.choose_params(2 * x, "uint8:tensor:asym").scales[0]
    assert done.params["linear.input"].scales[0].item() == expected.item()


def test_a_recipe_without_static_parts_learns_nothing_but_runs() -> None:
    recipe = parse_recipe("default: w8a8")
    assert calibrate(model(), recipe, batches(2)).params == {}
