"""Static inputs and outputs take their parameters from data, and nothing of the model stays changed."""

import importlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests import processes
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError, RecipeError, UnsupportedError
from zeropoint.models import Add, calibrate, calibrate_sequential, prepare, quantize_model
from zeropoint.models.graph import calibrate_graph, quantize_graph
from zeropoint.recipes import Assignment, Recipe, Rule, parse_recipe
from zeropoint.schemes import Scheme
from zeropoint.stats import Histogram, MinMax, Percentile, State, Statistic, StatisticFor, statistic_named

STATIC = "w8a8_static"
small_tensors = importlib.import_module("zeropoint.models.small_tensors")


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
        weight = zp.quantize(net[0].weight, "w8a8_static").dequantize()
        inner = torch.relu(nn.functional.linear(fixed, weight, net[0].bias))
        fixed = zp.fake_quantize(inner, calibration.params["3.input"])
        weight = zp.quantize(net[3].weight, "w8a8_static").dequantize()
        expected = nn.functional.linear(fixed, weight, net[3].bias)
        drift = (found - net(x)).norm() / net(x).norm()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert 0 < float(drift) < 0.03
    assert conversion.model[0].explain().startswith("inputs are multiplied by integer codes")


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
    with pytest.raises(CalibrationError, match=r"^0\.input received no finite number"):
        calibrate(model(), STATIC, [torch.full((2, 16), torch.nan)])


def test_numbers_that_are_not_finite_poison_nothing() -> None:
    data = batches()
    spoiled = [*data, torch.full((1, 16), torch.inf)]
    clean, dirty = (calibrate(model().eval(), STATIC, d).params["0.input"] for d in (data, spoiled))
    assert torch.equal(clean.scales[0], dirty.scales[0])


def test_parameters_for_another_scheme_are_refused() -> None:
    calibration = calibrate(model(), STATIC, batches())
    with pytest.raises(CalibrationError, match="was calibrated for uint8:tensor:asym, not for float8_e4m3fn"):
        quantize_model(model(), "fp8", calibration=calibration)


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

    x = torch.randn(2, 16)
    done = calibrate(Adder(), STATIC, [(x, x), {"a": x, "b": x}, [x, x]])
    assert done.batches == 3
    expected = zp.choose_params(2 * x, "uint8:tensor:asym").scales[0]
    assert done.params["linear.input"].scales[0].item() == expected.item()


def test_a_recipe_without_static_parts_has_nothing_to_learn() -> None:
    with pytest.raises(CalibrationError, match="pass it to quantize_model or prepare without calibration"):
        calibrate(model(), "w8a8", batches(2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(8, 16), r"data \(a Tensor\) must be .*would give its rows; pass a list of"),
        ({"input": torch.ones(8, 16)}, r"data \(a dict\) must be .*would give its keys; pass a list of"),
        (5, r"^data \(a int\) must be an iterable of batches; pass a list of batches$"),
    ],
)
def test_what_gives_no_batches_is_refused(data: object, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate(model(), STATIC, data)  # type: ignore[arg-type]


def test_what_is_no_recipe_is_refused_by_whatever_takes_one() -> None:
    net, data = model().eval(), batches()
    program = torch.export.export(net, (data[0],))
    for call in (
        lambda: calibrate(net, 5, data),  # type: ignore[arg-type]
        lambda: calibrate_sequential(net, 5, data),  # type: ignore[arg-type]
        lambda: calibrate_graph(program, 5, data),  # type: ignore[arg-type]
        lambda: quantize_graph(program, 5),  # type: ignore[arg-type]
    ):
        with pytest.raises(RecipeError, match=r"^recipe \(=5\) must be a Recipe, the name of a preset"):
            call()


@pytest.mark.parametrize("name", ["minmax", "percentile:99", "mse", "entropy", "moving_average:0.5"])
def test_a_statistic_is_chosen_by_its_name(name: str) -> None:
    net, data = model().eval(), batches()
    data[2][0, 0] = 12.0
    rule = "{name: '*', weight: int8:channel:narrow, input: uint2:tensor:asym static}"
    recipe = parse_recipe(f"rules: [{rule}]")
    found = calibrate(net, recipe, data, statistic=name)
    assert found == calibrate(net, recipe, data, statistic=statistic_named(name))
    if name != "minmax":
        assert found.params["0.input"] != calibrate(net, recipe, data).params["0.input"]


def test_a_misspelled_statistic_is_refused_before_any_data() -> None:
    def never() -> Iterator[torch.Tensor]:
        raise AssertionError
        yield

    with pytest.raises(CalibrationError, match=r"statistic \(='min-max'\) is unknown; did you mean minmax"):
        calibrate(model(), STATIC, never(), statistic="min-max")


def test_what_is_no_statistic_is_refused() -> None:
    with pytest.raises(
        CalibrationError, match=r"^statistic \(=5\) must be a name such as 'minmax', or a fun"
    ):
        calibrate(model(), STATIC, batches(), statistic=5)  # type: ignore[arg-type]


def test_batches_may_come_from_what_is_read_by_position() -> None:
    class Numbered:
        def __getitem__(self, position: int) -> torch.Tensor:
            return batches()[position]

    assert calibrate(model(), STATIC, Numbered()) == calibrate(model(), STATIC, batches())  # type: ignore[arg-type]


def test_a_prepared_model_is_not_calibrated_in_silence() -> None:
    prepared = prepare(model(), "w8a16")
    for way in (calibrate, calibrate_sequential):
        with pytest.raises(
            UnsupportedError, match=r"^layer 0 is prepared already; convert the model or pass"
        ):
            way(prepared, STATIC, batches())


def test_parameters_are_those_of_a_calibration() -> None:
    params = calibrate(model(), STATIC, batches()).params
    with pytest.raises(
        CalibrationError, match=r"^layer 0: calibration \(a dict\) must be the Calibration that"
    ):
        quantize_model(model(), STATIC, calibration=params)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_without_parameters_is_calibrated_in_the_dtype_of_what_it_sees(dtype: torch.dtype) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.add = nn.Linear(16, 16), Add()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.add(x, self.linear(x))
            return result

    net, data = Sum().to(dtype).eval(), [batch.to(dtype) for batch in batches()]
    recipe = parse_recipe("rules: [{type: Add, input: 'int8:tensor static'}]")
    params = calibrate(net, recipe, data).params
    assert params["add.input"].dtype is dtype
    assert params == calibrate_graph(torch.export.export(net, (data[0],)), recipe, data).params


class Reader(nn.Module):
    """Three layers that read one tensor, which is doubled in place before the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        y = self.a(x) + self.b(x)
        x *= 2
        result: torch.Tensor = y + self.c(x)
        return result


def test_a_tensor_that_several_layers_read_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(statistic: Statistic, x: torch.Tensor) -> State:
        measured.append(x)
        return plain(statistic, x)

    plain = Statistic.measure
    monkeypatch.setattr(Statistic, "measure", measure)
    monkeypatch.setattr(small_tensors, "SMALL", 0)
    data = batches(3)
    params = calibrate(Reader(), STATIC, data).params
    assert len(measured) == 2 * len(data)
    monkeypatch.undo()
    whole = torch.cat(data)
    for place, seen in (("a.input", whole), ("b.input", whole), ("c.input", 2 * whole)):
        assert params[place].scales[0].item() == zp.choose_params(seen, "uint8:tensor:asym").scales[0].item()


class LargestMedian(MinMax):
    """The largest median of a batch: not that of all batches together."""

    def measure(self, x: torch.Tensor) -> State:
        return super().measure(x.nanmedian())


NAMES = ("minmax", "moving_average:0.3", "absolute_mean", "percentile:99")


@pytest.mark.parametrize("statistic", [*NAMES, lambda _, __: LargestMedian()])
def test_small_tensors_are_measured_together_and_teach_the_same(
    monkeypatch: pytest.MonkeyPatch, statistic: str | StatisticFor
) -> None:
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(rows, 16, generator=generator) for rows in (3, 40, 5, 1, 64, 2)]
    data[2][1, 3] = torch.nan
    expected = {}
    for small, held in ((0, 0), (1 << 18, 1 << 24), (1 << 18, 1000), (20 * 64, 1 << 24)):
        monkeypatch.setattr(small_tensors, "SMALL", small)
        monkeypatch.setattr(small_tensors, "HELD", held)
        found = calibrate(Reader(), STATIC, data, statistic=statistic).params
        expected = expected or found
        assert found == expected, (small, held)


def test_small_tensors_are_read_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measure(statistic: Statistic, x: torch.Tensor) -> State:
        sizes.append(x.numel())
        return plain(statistic, x)

    plain = Statistic.measure
    monkeypatch.setattr(Statistic, "measure", measure)
    calibrate(Reader(), STATIC, data := batches())
    assert sizes == [sum(batch.numel() for batch in data)] * 2  # of a and b together, and of c
    sizes.clear()
    monkeypatch.setattr(small_tensors, "HELD", 3 * data[0].nbytes)  # of the fourth copy on, all are measured
    calibrate(Reader(), STATIC, data)
    assert len(sizes) > 3
    assert max(sizes) <= 4 * data[0].numel()


class Fickle(nn.Module):
    """Three layers that read one tensor in an order, and as often, as its number of rows says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = ((0, 1, 2), (1, 1, 0, 2), (2, 0), (1, 0, 1, 2, 2))[len(x) % 4]
        return torch.stack([self.layers[number](x) for number in order])


@pytest.mark.parametrize("held", [0, 2000, 1 << 24])
def test_layers_that_do_not_always_read_the_same_learn_what_each_has_read(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(rows, 16, generator=generator) for rows in (4, 8, 1, 2, 3, 4, 40, 3, 1)]
    monkeypatch.setattr(small_tensors, "HELD", held)
    for small in (20 * 64, 1 << 18):
        net = Fickle()
        monkeypatch.setattr(small_tensors, "SMALL", 0)
        expected = calibrate(net, STATIC, data, statistic="moving_average:0.3").params
        monkeypatch.setattr(small_tensors, "SMALL", small)
        assert calibrate(net, STATIC, data, statistic="moving_average:0.3").params == expected
    ranges = {params.scales[0].item() for params in expected.values()}
    assert len(ranges) == 3


def test_hooks_are_gone_when_what_waited_cannot_be_measured() -> None:
    class Failing(MinMax):
        def measure(self, x: torch.Tensor) -> State:  # noqa: ARG002 - as Statistic.measure
            raise RuntimeError("no measure")

    net = Reader()
    with pytest.raises(RuntimeError, match="no measure"):
        calibrate(net, STATIC, batches(2), statistic=lambda _, __: Failing())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_inference_mode_learns_the_same() -> None:
    net, data = Reader(), batches(3)

    def run(root: nn.Module, batch: torch.Tensor) -> None:
        with torch.inference_mode():
            root(batch)

    assert calibrate(net, STATIC, data, run=run) == calibrate(net, STATIC, data)


BAR = """
import torch, zeropoint as zp
layer = torch.nn.Sequential(torch.nn.Linear(8, 4))
zp.calibrate(layer, "w8a8_static", [torch.ones(2, 8)] * 3, progress=True)
"""


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else() -> None:
    piped = processes.run(BAR)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "", "")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    shown = subprocess.run([sys.executable, "-c", BAR], stderr=theirs, env=environment, check=False)
    os.close(theirs)
    assert shown.returncode == 0
    assert b"Calibrating" in os.read(ours, 1 << 16)
    os.close(ours)
