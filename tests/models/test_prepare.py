"""What trains is what ships: prepared models, their quantizers, and what becomes of them when converted."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.one_layer import grads, recipe_for
from torch import nn

import zeropoint as zp
from zeropoint.errors import (
    CalibrationError,
    NonFiniteError,
    RecipeError,
    SchemeError,
    UnsupportedError,
    ZeropointError,
)
from zeropoint.models import (
    QAT_CONFIGS,
    PreparedLayer,
    QATConfig,
    QuantizedLinear,
    calibrate,
    calibrate_sequential,
    convert,
    fold,
    prepare,
    quantize_model,
)
from zeropoint.recipes import Assignment, Recipe, Rule, model_preset
from zeropoint.schemes import PRESETS
from zeropoint.training import FakeQuantize, LearnedScale, LearnedThreshold, MovingAverageFakeQuantize, Pact

pytestmark = [
    # torch's own compiler makes one (torch 2.13).
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instan")
]
torch.manual_seed(0)
INDEX = torch.tensor([[1, 0, 4], [7, 7, 2]])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 10)
    )


IMAGES = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 10, (16,), generator=torch.Generator().manual_seed(2))


def everywhere(preset: str | Assignment) -> Recipe:
    gives = model_preset(preset) if isinstance(preset, str) else preset
    return Recipe(rules=(Rule(types=("Linear", "Conv2d"), gives=gives),))


def train(model: nn.Module, steps: int = 5, rate: float = 1e-3) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(IMAGES), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


LEARNED = {
    "minmax": Assignment.of(weight="int4:channel", input="uint8:tensor:asym static"),
    "average": Assignment.of(weight="int4:channel", input="uint8:tensor:asym static"),
    "fixed": Assignment.of(weight="mxfp8_e4m3", input="int8:tensor static"),
    "lsq": Assignment.of(weight="int4:channel", input="uint8:tensor:asym static"),
    "tqt": Assignment.of(weight="int4:tensor:scale=ceil", input="int8:tensor:scale=ceil static"),
    "pact": Assignment.of(weight="int4:channel", input="uint4:tensor static"),
}


def seen(name: str) -> torch.Tensor:
    """Return images to calibrate on, without negative numbers for unsigned codes, which hold none."""
    return IMAGES.abs() if name == "pact" else IMAGES


@pytest.mark.parametrize("name", LEARNED)
def test_a_trained_model_ships_as_it_is(name: str) -> None:
    model, recipe = net(), everywhere(LEARNED[name])
    prepared = prepare(model, recipe, qat=name, calibration=calibrate(model, recipe, [seen(name)]))
    before = {n: p.detach().clone() for n, p in prepared.named_parameters()}
    losses = train(prepared, 20)
    assert losses[-1] < losses[0]
    moved = {n for n, p in prepared.named_parameters() if not torch.equal(before[n], p)}
    # Zero points and ends of ranges have no gradient where no number is clipped.
    assert moved >= {n for n in before if not n.endswith(("zero_point", "alpha"))}
    assert (name == "pact") == any(n.endswith("alpha") for n in moved)
    conversion = convert(prepared)
    assert torch.equal(conversion.model(*grads(IMAGES)), prepared(IMAGES))
    assert conversion.model[0].weights["weight"].scheme == LEARNED[name].weight


def test_qat_configs_make_the_quantizers_they_are_named_after() -> None:
    kinds = {"fixed": FakeQuantize, "lsq": LearnedScale, "tqt": LearnedThreshold}
    activations = {**kinds, "minmax": FakeQuantize, "pact": Pact, "average": MovingAverageFakeQuantize}
    assert set(QAT_CONFIGS) == set(LEARNED)
    for name, gives in LEARNED.items():
        recipe = everywhere(gives)
        model = prepare(net(), recipe, qat=name, calibration=calibrate(net(), recipe, [seen(name)]))
        assert type(model[0].input_quantizer) is activations[name]
        if name in kinds:
            assert type(model[0].weight_quantizers["weight"]) is kinds[name]


def test_a_qat_config_of_ones_own_may_look_at_the_scheme() -> None:
    def weight(x: torch.Tensor, scheme: zp.Scheme) -> nn.Module:
        return (
            LearnedScale.from_tensor(x, scheme) if scheme.bits == 2 else FakeQuantize.from_tensor(x, scheme)
        )

    rules = (
        Rule(name="0", gives=Assignment.of(weight="int2:channel")),
        Rule(types=("Linear",), gives=Assignment.of(weight="mxfp4")),
    )
    model = prepare(net(), Recipe(rules=rules), qat=QATConfig(weight=weight))
    found = [type(model[place].weight_quantizers["weight"]) for place in (0, 3, 5)]
    assert found == [LearnedScale, FakeQuantize, FakeQuantize]


def test_a_threshold_starts_where_calibration_ended() -> None:
    recipe = everywhere(LEARNED["tqt"])
    calibration = calibrate(net(), recipe, [IMAGES])
    model = prepare(net(), recipe, qat="tqt", calibration=calibration)
    for place in ("0", "3", "5"):
        found = model.get_submodule(f"{place}.input_quantizer").params
        assert torch.equal(found.scales[0], calibration.params[f"{place}.input"].scales[0])


def test_scales_of_weights_follow_the_weights_unless_they_are_fixed() -> None:
    for qat, follows in (("minmax", True), ("fixed", False)):
        model = prepare(nn.Linear(8, 4), "w8a16", qat=qat)
        with torch.no_grad():
            model.weight.mul_(4)
        packed = convert(model).model.weight.quantized()
        largest = model.weight.detach().abs().amax(1, keepdim=True) / 127.5
        assert torch.equal(packed.scales[0], largest) is follows


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 16)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.again = self.body
        self.head.weight = self.words.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.again(torch.relu(self.body(self.words(index)))))
        return result


TIED = Recipe(rules=(Rule(name="*", gives=Assignment.of(weight="int4:token")),))


@pytest.mark.parametrize("qat", ["minmax", "lsq"])
def test_tied_weights_have_one_quantizer_and_stay_tied(qat: str) -> None:
    model = prepare(Tied(), TIED, qat=qat)
    assert model.body is model.again
    assert model.words.weight is model.head.weight
    assert model.words.weight_quantizers["weight"] is model.head.weight_quantizers["weight"]
    model(INDEX).sum().backward()
    conversion = convert(model)
    assert conversion.model.words.weight is conversion.model.head.weight
    with torch.no_grad():
        torch.testing.assert_close(conversion.model(INDEX), model(INDEX), rtol=1e-5, atol=1e-6)
    reported = {layer.name: layer for layer in conversion.layers}
    assert (reported["head"].tied_to, reported["head"].nbytes) == ("words", (0, 0))
    assert str(reported["head"]).endswith("its weight is that of words")
    assert list(reported) == ["words", "body", "head"]


def test_one_tensor_seen_with_other_rows_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3))
    model[1].weight = model[0].weight
    recipe = Recipe(
        rules=(Rule(types=("Conv2d", "ConvTranspose2d"), gives=Assignment.of(weight="int8:channel")),)
    )
    with pytest.raises(
        UnsupportedError, match=r"layer 1: 1.weight is the tensor of 0.weight with other channels"
    ):
        prepare(model, recipe)


@pytest.mark.parametrize("qat", ["minmax", "lsq"])
def test_prepared_models_are_copied_and_their_states_loaded(qat: str) -> None:
    model = prepare(net(), everywhere(Assignment.of(weight="int4:channel")), qat=qat)
    train(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = prepare(net(), everywhere(Assignment.of(weight="int4:channel")), qat=qat)
    fresh.load_state_dict(torch.load(file), strict=True)
    expected = model(IMAGES)
    for other in (fresh.eval(), copy.deepcopy(model)):
        assert torch.equal(other(IMAGES), expected)
        assert torch.equal(convert(other).model(*grads(IMAGES)), expected)
    copied = copy.deepcopy(model)
    train(copied, 2)
    assert torch.equal(model(IMAGES), expected)
    assert not torch.equal(copied(IMAGES), expected)


@pytest.mark.parametrize("qat", ["minmax", "lsq"])
def test_a_compiled_step_is_the_eager_one_without_graph_breaks(qat: str) -> None:
    gives = Assignment.of(weight="int4:channel", input="int8:tensor dynamic")
    model = prepare(net(), everywhere(gives), qat=qat)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    compiled(IMAGES).sum().backward()
    model(IMAGES).sum().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("qat", ["minmax", "lsq"])
def test_models_in_other_dtypes_ship_as_they_train(dtype: torch.dtype, qat: str) -> None:
    model = prepare(net(), everywhere(Assignment.of(weight="int4:channel")), qat=qat).to(dtype)
    images = IMAGES.to(dtype)
    nn.functional.cross_entropy(model(images).float(), LABELS).backward()
    found = convert(model).model(*grads(images))
    assert (found.dtype, torch.equal(found, model(images))) == (dtype, True)


def test_autocast_computes_the_same_before_and_after_conversion() -> None:
    gives = Assignment.of(weight="int4:channel", input="int8:tensor dynamic")
    model = prepare(net(), everywhere(gives), qat="lsq")
    with torch.autocast("cpu", torch.bfloat16):
        model(IMAGES).float().sum().backward()
        found = model(IMAGES)
        assert found.dtype == torch.bfloat16
        assert torch.equal(convert(model).model(*grads(IMAGES)), found)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_ships_as_it_trains_within_the_rounding_of_sums(preset: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 96))
    x = torch.randn(5, 192)
    needs = model_preset(preset).needs_calibration
    prepared = prepare(model, preset, calibration=calibrate(model, preset, [x]) if needs else None)
    converted = convert(prepared).model
    assert torch.equal(converted(*grads(x)), prepared(x))
    with torch.no_grad():
        found, expected = converted(x), prepared(x)
        # Of two sums of n rounded products each is off by at most n eps sum |w x| (Higham, section 3.1).
        (weight,) = prepared[0].quantized_weights().values()
        inner = x if prepared[0].input_quantizer is None else prepared[0].input_quantizer(x)
        limit = 2 * 194 * 2.0**-24 * (inner.abs().double() @ weight.abs().double().t() + 1)
        if prepared[0].output_quantizer is None:
            assert bool(((found - expected).abs().double() <= limit).all())


def test_rules_that_keep_modules_without_parameters_match_nothing() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Sequential(nn.Linear(8, 8)))
    for kind in ("MultiheadAttention", "Sequential"):
        recipe = Recipe(rules=(Rule(types=(kind,), gives=None),), default=Rule(gives=model_preset("w8a16")))
        with pytest.raises(RecipeError, match="matches no module by type"):
            quantize_model(model, recipe)


def test_in_place_means_the_model_itself() -> None:
    model = net()
    layer = model[3]
    assert prepare(model, "w8a16", inplace=True) is model
    assert model[3].layer is layer
    assert convert(model, inplace=True).model is model
    assert isinstance(model[3], QuantizedLinear)
    other = net()
    assert quantize_model(other, "w8a16", inplace=True).model is other
    kept = net()
    assert prepare(kept, "w8a16") is not kept
    assert type(kept[3]) is nn.Linear


def test_modes_of_training_are_kept() -> None:
    model = net().train()
    model[3].eval()
    prepared = prepare(model, "w8a16")
    assert [m.training for m in (prepared[0], prepared[3], prepared[5])] == [True, False, True]
    assert [m.training for m in (convert(prepared).model[3], convert(prepared).model[5])] == [False, True]


def test_the_summary_names_every_layer_and_why_it_was_kept() -> None:
    class Odd(nn.Linear):
        pass

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 4))

    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.LayerNorm(4), Odd(4, 4), Own(), nn.Linear(4, 4), nn.ReLU())
    nn.utils.parametrizations.weight_norm(model[4])
    model.append(nn.Linear(4, 4))
    for conversion in (quantize_model(model, "w8a16"), convert(prepare(model, "w8a16"))):
        assert str(conversion).splitlines()[:-1] == [
            "0 (Conv1d 3x2x1): kept, the default is for Linear layers",
            "1 (LayerNorm): kept, LayerNorm has no quantized form",
            "2 (Odd): kept, Odd is a subclass of Linear and may compute something else",
            "3 (Own): kept, Own has no quantized form",
            "4 (Linear): kept, its weight is parametrized; remove the parametrization first",
            str(conversion.layers[-1]),
        ]
        assert conversion.layers[-1].gives is not None
        assert conversion.layers[4].nbytes == (80, 80)  # directions (4, 4) and lengths (4, 1) in float32


def test_a_layer_that_has_no_parameters_yet_is_kept_until_it_has() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    reported = quantize_model(model, "w8a16").layers[0]
    assert reported.reason == "its parameters are not initialized; run the model once first"
    model(torch.ones(2, 8))
    assert quantize_model(model, "w8a16").layers[0].gives is not None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: quantize_model(net(), 5), RecipeError, r"^recipe \(=5\) must be a Recipe, the name"),
        (lambda: prepare(net(), None), RecipeError, r"^recipe \(=None\) must be a Recipe, the name"),
        (lambda: prepare(net(), "w8a6"), RecipeError, "preset 'w8a6' is unknown; did you mean"),
        (
            lambda: prepare(net(), "w8a8", qat="lqs"),
            RecipeError,
            r"^qat 'lqs' is unknown; did you mean lsq\?",
        ),
        (
            lambda: prepare(net(), "w8a8", qat=["lsq"]),
            RecipeError,
            r"^qat \['lsq'\] is unknown; did you mean lsq\?",
        ),
        (
            lambda: quantize_model("net", "w8a8"),
            UnsupportedError,
            r"^model \(a str\) must be a torch\.nn\.Module",
        ),
        (
            lambda: convert(quantize_model(net(), "w8a8")),
            UnsupportedError,
            r"^model \(a Conversion\) must be a torch\.nn\.Module; pass the model of a conversion or",
        ),
        (
            lambda: quantize_model(nn.Sequential(nn.Linear(4, 4, device="meta")), "w8a8"),
            UnsupportedError,
            "^layer 0: its weights are on the meta device, without numbers; load them first$",
        ),
        (lambda: fold(5), UnsupportedError, r"^model \(a int\) must be a torch\.nn\.Module"),
        (lambda: calibrate(nn.Linear, "w8a8", []), UnsupportedError, r"^model \(a type\) must be a torch"),
        (
            lambda: calibrate_sequential(5, "w8a8", []),
            UnsupportedError,
            r"^model \(a int\) must be a torch\.nn\.Module",
        ),
        (lambda: convert(net()), UnsupportedError, r"^model \(a Sequential\) has no prepared layers"),
        (
            lambda: prepare(prepare(net(), "w8a8"), "w8a8"),
            UnsupportedError,
            "^layer 3 is prepared already; convert the model or pass the model before prepare",
        ),
        (
            lambda: prepare(net(), "mxfp4", qat="lsq"),
            SchemeError,
            r"^layer 3: scheme \(=.*\) must have one scale level with a linear rule",
        ),
        (lambda: prepare(net(), "w8a8_static"), CalibrationError, "^layer 3: its input needs calibration"),
        (
            lambda: prepare(nn.Embedding(3, 4, max_norm=1.0), recipe_for(nn.Embedding(1, 1), weight="int8")),
            UnsupportedError,
            r"^layer model: max_norm \(=1.0\) changes the table; set it to None first",
        ),
        (
            lambda: prepare(nn.ReLU(), recipe_for(nn.ReLU(), weight="int8")),
            UnsupportedError,
            "ReLU has no weight to quantize; give its rule an input or an output alone",
        ),
    ],
)
def test_what_cannot_be_is_said(call: Callable[[], Any], error: type[ZeropointError], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_qat_configs_refuse_what_they_cannot_start_from() -> None:
    for qat, scheme, text in (
        ("tqt", "uint8:tensor:asym static", "has a zero point; thresholds are for symmetric codes"),
        ("pact", "uint8:tensor:asym static", "has a zero point; PACT learns the end of a range from 0"),
        ("pact", "int8:tensor static", "must be of unsigned integers with one linear scale"),
    ):
        recipe = recipe_for(nn.Linear(1, 1), input=scheme)
        calibration = calibrate(net(), recipe, [IMAGES])
        with pytest.raises(ZeropointError, match=rf"^layer 3: .*{text}"):
            prepare(net(), recipe, qat=qat, calibration=calibration)


def test_conversion_refuses_what_would_not_compute_the_same() -> None:
    model = prepare(net(), "w8a16", qat="fixed")
    model[3].weight_quantizers["weight"].enabled = False
    with pytest.raises(UnsupportedError, match="layer 3: a quantizer is not enabled; set enabled to True"):
        convert(model, inplace=True)
    assert isinstance(model[5], PreparedLayer)
    model[3].weight_quantizers["weight"] = nn.Identity()
    with pytest.raises(UnsupportedError, match=r"layer 3: quantizer \(a Identity\) must be a Quantizer"):
        convert(model)


def test_a_weight_that_diverged_is_named() -> None:
    model = prepare(net(), "w8a16")
    with torch.no_grad():
        model[5].weight[3, 4] = torch.inf
    with pytest.raises(NonFiniteError, match=r"^layer 5: "):
        convert(model)


def test_an_error_leaves_a_model_in_place_as_it_was() -> None:
    model = net()
    layers = list(model.modules())
    with pytest.raises(SchemeError, match="layer 3"):
        prepare(model, "mxfp4", qat="lsq", inplace=True)
    assert list(model.modules()) == layers
