"""A quality picks a method for each scheme, from one table."""

import pytest
import torch

import zeropoint as zp
from zeropoint.cli.options import QualityName
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import CODECS
from zeropoint.layout.blocks import spread_blocks
from zeropoint.methods import method_named
from zeropoint.methods.method import Bound
from zeropoint.recipes import Assignment, Quality, Recipe, Rule, one_name, parse_recipe, picked
from zeropoint.recipes.quality import LADDER
from zeropoint.schemes import Scheme

BY_DATA = {own: (alone, with_inputs) for own, alone, with_inputs in LADDER if own is not Quality.FAST}


def test_every_quality_but_the_first_learns_from_data_and_has_a_chain_for_quantized_inputs() -> None:
    assert [own for own in Quality if own in BY_DATA] == [Quality.GOOD, Quality.BEST]
    for alone, with_inputs in BY_DATA.values():
        assert method_named(alone).needs
        assert with_inputs.startswith("smooth+")
        assert method_named(with_inputs).needs
    for own, *names in LADDER:
        assert own is not Quality.FAST or not any(method_named(name).needs for name in names)


@pytest.mark.parametrize(
    ("scheme", "method"),
    [("q4_k", "ggml"), ("int4:g64", "mse"), ("nvfp4a16", "mse"), ("float8_e5m2:cast", "nearest")],
)
def test_without_data_the_best_search_that_takes_the_scheme_is_picked(scheme: str, method: str) -> None:
    weight = Scheme.parse(zp.schemes.PRESETS[scheme].weight if scheme in zp.schemes.PRESETS else scheme)
    assert picked(Quality.FAST, weight, quantized_inputs=False).method == method


@pytest.mark.parametrize("layout", list(CODECS))
def test_the_method_of_fast_quantizes_what_a_layout_holds(layout: str) -> None:
    """GPTQ's int4 and int8 in groups of 32 have the structure of types of GGUF, and other scales."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    tried = 0
    for text in (*CODECS[layout].presets, "int4:g32", "int8:g32", "int5:g32", "uint4:g32:asym", "int4:g128"):
        try:
            weight = layer_scheme(text, CODECS[layout]).weight
        except zp.ZeropointError:
            continue
        name = picked(Quality.FAST, weight, quantized_inputs=False).method
        q = method_named(name).quantize(x, weight).q
        assert float((x - q.dequantize()).norm() / x.norm()) < 0.9, (text, name)
        if method_named(name).bound(weight) is Bound.ROUNDING:
            bound = spread_blocks(q.error_bound(x), weight.granularity, q.shape)
            assert bool(((x - q.dequantize()).abs() <= bound).all()), (text, name)
        tried += 1
    assert tried


@pytest.mark.parametrize("quality", [Quality.GOOD, Quality.BEST])
def test_a_scheme_that_the_method_refuses_gets_that_of_a_lower_quality_and_the_reason(
    quality: Quality,
) -> None:
    taken = picked(quality, Scheme.parse("int4:g64"), quantized_inputs=False)
    assert (taken.method, taken.refusal) == (BY_DATA[quality][0], "")
    assert picked(quality, Scheme.parse("q4_k"), quantized_inputs=True).method == BY_DATA[quality][1]
    fallen = picked(quality, Scheme.parse("if4"), quantized_inputs=False)
    assert fallen.method == picked(Quality.FAST, Scheme.parse("if4"), quantized_inputs=False).method
    assert "rounds one weight at a time" in fallen.refusal


def test_each_rule_of_a_recipe_gets_the_method_for_its_scheme_unless_it_names_one() -> None:
    rules = (
        Rule(name="a", gives=Assignment.of(weight="int4:g64")),
        Rule(name="b", gives=Assignment.of(weight="int8:channel", input="int8:token")),
        Rule(name="c", gives=Assignment.of(weight="int4:g64", method="hqq")),
        Rule(name="d", gives=None),
    )
    made = Recipe(rules=rules).with_method("good")
    found = [None if rule.gives is None else rule.gives.method for rule in made.rules]
    assert found == [*BY_DATA[Quality.GOOD], "hqq", None]
    written = parse_recipe("default: w8a8\nmethod: good").default.gives
    assert written is not None
    assert written.method == BY_DATA[Quality.GOOD][1]


def test_a_quality_without_data_or_with_a_method_is_one_sentence() -> None:
    with pytest.raises(zp.CalibrationError, match=r"^quality='good' learns from data; pass calibration=DATA"):
        one_name(None, "good", has_data=False)
    with pytest.raises(zp.OptionError, match=r"^quality='fast' and method='mse' both say how .*; give one"):
        one_name("mse", "fast", has_data=True)
    with pytest.raises(zp.OptionError, match=r"^quality='worst' must be one of fast, good, best$"):
        one_name(None, "worst", has_data=True)
    assert one_name("mse", None, has_data=False) == "mse"
    assert one_name(None, "fast", has_data=False) == "fast"


def test_a_model_in_memory_gets_the_same_methods() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 32))
    fast, mse = (
        zp.quantize_model(model, "w4a16", quality="fast"),
        zp.quantize_model(model, "w4a16", method="mse"),
    )
    assert fast.layers == mse.layers
    data = [torch.randn(8, 128, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    gives = zp.quantize_model(model, "w4a8", quality="good", calibration=data).layers[0].gives
    assert gives is not None
    assert gives.method == BY_DATA[Quality.GOOD][1]
    with pytest.raises(zp.CalibrationError, match="quality='best' learns from data"):
        zp.quantize_model(model, "w4a16", quality="best")


@pytest.mark.parametrize("tied", [False, True])
def test_layers_without_inputs_get_what_a_quality_has_without_data(*, tied: bool) -> None:
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), *blocks, torch.nn.Linear(32, 64, bias=False))
    if tied:
        model[3].weight = model[0].weight
    both = Rule(name="re:[03]", gives=Assignment.of(weight="int8:channel"))
    recipe = Recipe(rules=(both,), default=Rule(gives=Assignment.of(weight="int4:g32")))
    data = [torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    found = zp.quantize_model(model, recipe, quality="good", calibration=data)
    methods = {layer.name: layer.gives.method for layer in found.layers if layer.gives is not None}
    learning = BY_DATA[Quality.GOOD][0]
    head = "mse" if tied else learning
    assert methods == {"0": "mse", "1.0": learning, "2.0": learning, "3": head}


def test_the_command_line_has_the_same_words() -> None:
    assert [name.value for name in QualityName] == list(Quality)
