"""Methods in models: named by recipes and calls, given statistics by calibration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import pytest
import torch
from torch import nn

from zeropoint.errors import CalibrationError, RecipeError, UnsupportedError
from zeropoint.methods import LayerData, LayerResult, Scope, method_named, registry
from zeropoint.methods.method import NO_DATA
from zeropoint.methods.nearest import METHOD as NEAREST
from zeropoint.models import calibrate, calibrate_sequential, dequantize_model, prepare, quantize_model
from zeropoint.models.block_chain import Steps
from zeropoint.models.graph import prepare_graph, quantize_graph
from zeropoint.recipes import Assignment, Recipe, Rule, parse_recipe
from zeropoint.schemes import Scheme
from zeropoint.stats import Accumulator, GramMatrix, Statistics


@dataclass(frozen=True, kw_only=True)
class Curious:
    """Rounds to nearest, and keeps the statistics that it was given."""

    name: ClassVar[str] = "curious"
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = MappingProxyType(
        {"gram": lambda features: GramMatrix(features=features)}
    )
    takes: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = needs
    seen: list[Statistics] = field(default_factory=list)

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002
        return Scope.LAYER

    def refusal(self, scheme: Scheme) -> str | None:  # noqa: ARG002
        return None

    def value_bytes(self, scheme: Scheme) -> int:  # noqa: ARG002
        return 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        self.seen.append(data.statistics["gram"])
        return NEAREST.quantize(weight, scheme)


@pytest.fixture
def curious(monkeypatch: pytest.MonkeyPatch) -> Curious:
    """A method that needs the Gram matrix of inputs, as a module of the package would bring it."""
    method = Curious()
    known = registry._method
    monkeypatch.setattr(registry, "_method", lambda text: method if text == "curious" else known(text))
    return method


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 7, 32, generator=generator) for _ in range(count)]


def inputs(layers: nn.Sequential) -> list[torch.Tensor]:
    """Return the inputs of the second Linear layer, as rows of float64."""
    with torch.no_grad():
        return [layers[:2](x).reshape(-1, 48).double() for x in batches()]


def is_gram(found: torch.Tensor, x: torch.Tensor) -> bool:
    """Tell whether it is the Gram matrix of vectors whose numbers are rounded to 12 bits."""
    return bool(((found - x.T @ x).abs() <= 2.0**-10 * (x.abs().T @ x.abs())).all())


def test_a_weight_only_layer_gives_its_method_the_gram_matrix_of_its_inputs(curious: Curious) -> None:
    layers = model()
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int4:g16", method="curious")))
    assert recipe.needs_calibration
    calibration = calibrate(layers, recipe, batches())
    quantize_model(layers, recipe, calibration=calibration)
    first, second = curious.seen
    x = torch.cat([batch.reshape(-1, 32).double() for batch in batches()])
    assert is_gram(first["gram"], x)
    x = torch.cat(inputs(layers))
    assert is_gram(second["gram"], x)
    assert int(second["vectors"]) == len(x)


def test_calibration_block_by_block_gives_methods_the_same_statistics(curious: Curious) -> None:
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int4:g16", method="curious")))
    found = calibrate_sequential(model(), recipe, batches())
    assert found == calibrate(model(), recipe, batches())
    assert list(found.statistics) == ["0", "2"]
    assert "0: gram of its inputs" in str(found)


def test_with_quantized_inputs_a_method_sees_what_the_quantized_blocks_before_give(curious: Curious) -> None:
    layers = model()
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int2:g16", method="curious")))
    found = calibrate_sequential(layers, recipe, batches(), steps=Steps(quantized_inputs=True))
    changed = nn.Sequential(quantize_model(layers[0], "int2:g16").model, *layers[1:])
    x = torch.cat(inputs(changed))
    assert is_gram(found.statistics["2"]["gram"]["gram"], x)
    plain = calibrate(layers, recipe, batches()).statistics["2"]["gram"]["gram"]
    assert not is_gram(plain, x)


def test_a_method_that_takes_statistics_uses_them_where_they_are_and_does_without() -> None:
    layers = nn.Sequential(nn.Linear(256, 8, bias=False))
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="q4_k", method="ggml")))
    assert not recipe.needs_calibration
    data = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 2, 256)
    found = calibrate(layers, recipe, [data])
    ggml, scheme = method_named("ggml"), Scheme.parse("q4_k")
    known, mean = LayerData(statistics=found.statistics["0"]), found.statistics["0"]["mean_square"]
    assert torch.allclose(mean.accumulator.mean(mean.state), data.double().square().mean(0))
    weight = layers[0].weight.detach()
    plain, weighed = (ggml.quantize(weight, scheme, given).q.dequantize() for given in (NO_DATA, known))
    for calibration, wanted in ((None, plain), (found, weighed)):
        made = dequantize_model(quantize_model(layers, recipe, calibration=calibration).model)
        assert torch.equal(made[0].weight, wanted)
    assert not torch.equal(plain, weighed)


def test_a_method_without_its_statistics_is_an_error_that_names_the_layer(curious: Curious) -> None:
    with pytest.raises(CalibrationError, match="layer 0: method curious needs the gram of its inputs: pass"):
        quantize_model(model(), "int4:g16", method="curious")
    assert not curious.seen


def test_statistics_are_taken_of_linear_layers_alone(curious: Curious) -> None:
    given = Assignment.of(weight="int8:channel", method=curious.name)
    recipe = Recipe(rules=(Rule(types=("Conv2d",), gives=given),))
    with pytest.raises(
        UnsupportedError, match=r"layer 0 .a Conv2d.: method curious needs statistics of inputs"
    ):
        calibrate(nn.Sequential(nn.Conv2d(1, 2, 3)), recipe, [torch.ones(1, 1, 4, 4)])


def test_a_method_of_a_call_is_that_of_all_rules_that_name_none() -> None:
    recipe = Recipe(
        rules=(Rule(name="0", gives=Assignment.of(weight="int4:g16", method="nearest")),),
        default=Rule(gives=Assignment.of(weight="int4:g16")),
    )
    plain = quantize_model(model(), "int4:g16").layers
    mixed = quantize_model(model(), recipe, method="mse").layers
    better = quantize_model(model(), "int4:g16", method="mse").layers
    assert mixed[0].error == plain[0].error > better[0].error
    assert plain[1].error > mixed[1].error == better[1].error
    assert "method mse" in str(mixed[1])


def test_a_recipe_in_yaml_names_methods_for_all_weights_and_for_rules() -> None:
    recipe = parse_recipe(
        "default: w4a16\nmethod: mse\nrules:\n  - {name: a, weight: int4:g32, method: nearest}\n"
        "  - {name: b, preset: w8a16}\n  - {name: c, input: int8:token}\n  - {name: d, keep: true}\n"
    )
    given = [rule.gives and rule.gives.method for rule in (*recipe.rules, recipe.default)]
    assert given == ["nearest", "mse", None, None, "mse"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: w4a16\nmethod: msee", "line 2: method 'msee' is unknown; did you mean mse"),
        ("rules:\n  - {name: a, keep: true, method: mse}", "line 2: method is for what is quantized"),
        (
            "default: {input: int8:token, method: mse}",
            "method mse quantizes weights; give a weight scheme with it",
        ),
        ("method: mse", "the recipe is empty; it needs default or rules"),
    ],
)
def test_a_method_that_means_nothing_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text)


def test_training_refuses_a_method_that_it_would_not_follow() -> None:
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int4:g16", method="mse")))
    message = "method mse is for quantize_model; prepared layers round to"
    with pytest.raises(UnsupportedError, match=message):
        prepare(model(), recipe)
    with pytest.raises(UnsupportedError, match=message):
        prepare_graph(torch.export.export(model(), (batches(1)[0],)), recipe)


def test_a_graph_gets_the_codes_that_its_model_gets() -> None:
    recipe = Recipe(default=Rule(gives=Assignment.of(weight="int4:g16", method="mse")))
    program = torch.export.export(model(), (batches(1)[0],))
    errors = [layer.error for layer in quantize_graph(program, recipe).layers]
    assert errors == pytest.approx(
        [layer.error for layer in quantize_model(model(), recipe).layers], rel=1e-6
    )
