"""Prepared and packed layers of every kind compute what torch computes, and the same as each other."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.one_layer import grads, recipe_for
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zeropoint as zp
from zeropoint.errors import ShapeError, UnsupportedError
from zeropoint.models import (
    PackedWeight,
    PreparedLayer,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedLayer,
    calibrate,
    convert,
    prepare,
    quantize_model,
)
from zeropoint.recipes import Assignment, Recipe, Rule

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    # torch's own compiler makes one (torch 2.13).
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instan"),
]
torch.manual_seed(0)
INDEX = torch.tensor([[1, 0, 4], [7, 7, 2]])
SEQUENCE = pack_sequence([torch.randn(4, 6), torch.randn(2, 6), torch.randn(7, 6)], enforce_sorted=False)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(70, 33), (torch.randn(4, 70),)),
    "linear without bias": (lambda: nn.Linear(70, 33, bias=False), (torch.randn(2, 3, 70),)),
    "embedding": (lambda: nn.Embedding(9, 40, padding_idx=0), (INDEX,)),
    "bag": (lambda: nn.EmbeddingBag(9, 40, mode="mean", padding_idx=7), (INDEX,)),
    "bag with offsets": (
        lambda: nn.EmbeddingBag(9, 40, mode="sum", include_last_offset=True),
        (INDEX.reshape(-1), torch.tensor([0, 2, 6]), torch.randn(6)),
    ),
    "largest of a bag": (lambda: nn.EmbeddingBag(9, 40, mode="max"), (INDEX,)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding="same"), (torch.randn(2, 6, 11),)),
    "conv2d": (
        lambda: nn.Conv2d(6, 8, (3, 5), stride=2, padding=1, dilation=(1, 2), groups=2),
        (torch.randn(2, 6, 13, 17),),
    ),
    "conv2d with reflection": (
        lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect", bias=False),
        (torch.randn(2, 6, 9, 9),),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3), (torch.randn(1, 2, 5, 6, 7),)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), (torch.randn(2, 6, 5),)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(6, 8, (3, 4), stride=2, padding=1, output_padding=1, groups=2),
        (torch.randn(2, 6, 5, 5),),
    ),
    "transposed 2d of a size": (
        lambda: nn.ConvTranspose2d(6, 4, 3, stride=2), (torch.randn(2, 6, 5, 5), [12, 11])
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 2, 3, dilation=2), (torch.randn(1, 4, 3, 4, 3),)),
    "lstm": (lambda: nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True), (torch.randn(3, 4, 6),)),
    "lstm with states": (
        lambda: nn.LSTM(6, 5, proj_size=3),
        (torch.randn(4, 2, 6), (torch.randn(1, 2, 3), torch.randn(1, 2, 5))),
    ),
    "lstm of one": (lambda: nn.LSTM(6, 5, bias=False), (torch.randn(4, 6),)),
    "lstm of lengths": (lambda: nn.LSTM(6, 5, bidirectional=True), (SEQUENCE,)),
    "lstm of lengths with states": (
        lambda: nn.LSTM(6, 5), (SEQUENCE, (torch.randn(1, 3, 5), torch.randn(1, 3, 5)))
    ),
    "gru": (lambda: nn.GRU(6, 5, 2), (torch.randn(4, 3, 6), torch.randn(2, 3, 5))),
    "gru of one": (lambda: nn.GRU(6, 5), (torch.randn(4, 6), torch.randn(1, 5))),
    "gru of lengths": (lambda: nn.GRU(6, 5, batch_first=True), (SEQUENCE,)),
    "rnn": (lambda: nn.RNN(6, 5, nonlinearity="relu"), (torch.randn(4, 3, 6),)),
    "lstm cell": (lambda: nn.LSTMCell(6, 5), (torch.randn(3, 6), (torch.randn(3, 5), torch.randn(3, 5)))),
    "lstm cell of one": (lambda: nn.LSTMCell(6, 5, bias=False), (torch.randn(6),)),
    "gru cell": (lambda: nn.GRUCell(6, 5), (torch.randn(3, 6),)),
    "rnn cell": (lambda: nn.RNNCell(6, 5), (torch.randn(3, 6), torch.randn(3, 5))),
    "rnn cell with relu": (lambda: nn.RNNCell(6, 5, nonlinearity="relu"), (torch.randn(6), torch.randn(5))),
}  # fmt: skip


SCHEMES = ("int8:channel:narrow", "int4:g32", "mxfp4", "uint3:channel:asym")


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    make, args = LAYERS[name]
    return make().eval(), args


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value if item is not None for tensor in tensors(item)]


def same(a: Any, b: Any) -> bool:
    left, right = tensors(a), tensors(b)
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_its_own_weights_computes_what_torch_computes(name: str) -> None:
    layer, args = made(name)
    wrapped = prepare(layer, recipe_for(layer, output="int8:tensor dynamic"))
    assert isinstance(wrapped, PreparedLayer)
    wrapped.output_quantizer = None
    with torch.no_grad():
        assert same(wrapped(*args), layer(*args))


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", LAYERS)
def test_converted_layers_compute_what_prepared_ones_compute_bit_for_bit(name: str, scheme: str) -> None:
    layer, args = made(name)
    prepared = prepare(layer, recipe_for(layer, weight=scheme))
    conversion = convert(prepared)
    expected = prepared(*args)
    assert same(conversion.model(*grads(*args)), expected)
    assert not same(layer(*args), expected)
    assert not any(p.ndim > 1 for p in conversion.model.parameters())
    (reported,) = conversion.layers
    assert reported.nbytes[0] == sum(p.nbytes for p in layer.parameters() if p.ndim > 1)
    assert 0 < reported.error < 0.4


@pytest.mark.parametrize("name", [name for name in LAYERS if "bag" not in name and "embedding" not in name])
def test_inputs_and_outputs_are_quantized_by_what_calibration_found(name: str) -> None:
    layer, args = made(name)
    recipe = recipe_for(
        layer, weight="int8:channel", input="uint8:tensor:asym static", output="int8:tensor dynamic"
    )
    calibration = calibrate(layer, recipe, [args])
    prepared = prepare(layer, recipe, calibration=calibration)
    found = prepared(*args)
    assert same(convert(prepared).model(*grads(*args)), found)
    x = args[0]
    data = x.data if isinstance(x, PackedSequence) else x
    fixed = zp.fake_quantize(data, calibration.params["input"])
    inner = x._replace(data=fixed) if isinstance(x, PackedSequence) else fixed
    plain = prepare(layer, recipe_for(layer, weight="int8:channel"))(inner, *args[1:])
    first = tensors(plain)[0]
    assert torch.equal(tensors(found)[0], zp.fake_quantize(first, "int8:tensor"))


def test_channels_of_a_transposed_convolution_are_its_outputs() -> None:
    layer = nn.ConvTranspose2d(6, 4, 3).eval()
    scaled = copy.deepcopy(layer)
    with torch.no_grad():
        scaled.weight.mul_(torch.tensor([1.0, 8.0, 64.0, 512.0]).reshape(1, 4, 1, 1))
    q = convert(prepare(scaled, recipe_for(layer, weight="int8:channel"))).model.weights["weight"].quantized()
    expected = scaled.weight.detach().abs().amax((0, 2, 3)) / 127.5
    assert torch.equal(q.scales[0].reshape(-1), expected)


def test_groups_of_a_convolution_lie_along_what_goes_into_one_output() -> None:
    layer = nn.Conv2d(8, 5, 3)
    packed = convert(prepare(layer, recipe_for(layer, weight="int4:g24"))).model.weights["weight"]
    assert packed.shape == (5, 72)
    assert torch.equal(
        packed.quantized().dequantize(),
        zp.quantize(layer.weight.detach().flatten(1), "int4:g24").dequantize(),
    )


@pytest.mark.parametrize("name", ["conv2d", "transposed 2d", "linear", "embedding", "bag", "gru cell"])
def test_converted_layers_are_exported_and_compiled_whole(name: str) -> None:
    layer, args = made(name)
    model = convert(prepare(layer, recipe_for(layer, weight="int4:g32"))).model
    with torch.no_grad():
        expected = model(*args)
        assert same(torch.export.export(model, args).module()(*args), expected)
        assert same(torch.compile(model, backend="eager", fullgraph=True)(*args), expected)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_converted_recurrent_layers_are_exported(name: str) -> None:
    """Dynamo itself takes no recurrent layers of torch (2.13), and breaks the graph there."""
    layer, args = made(name)
    model = convert(prepare(layer, recipe_for(layer, weight="int4:g32"))).model
    assert same(torch.export.export(model, args).module()(*args), model(*args))


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "embedding", "bag", "lstm", "gru cell", "transposed 2d"]
)
def test_inputs_go_by_name_too(name: str) -> None:
    layer, (x, *rest) = made(name)
    prepared = prepare(layer, recipe_for(layer, weight="int8:channel"))
    for model in (prepared, convert(prepared).model):
        assert same(model(input=x, **dict(zip(("hx",), rest, strict=False))), model(x, *rest))


@pytest.mark.parametrize("number", [-1, 9])
def test_a_number_that_is_no_row_is_refused_as_torch_refuses_it(number: int) -> None:
    layer = nn.Embedding(9, 40)
    converted = convert(prepare(layer, recipe_for(layer, weight="int8:channel"))).model
    for table in (layer, converted):
        with pytest.raises(IndexError, match="index out of range"):
            table(torch.tensor([number]))


def test_a_layer_takes_the_weights_that_it_has_in_their_size() -> None:
    weight = PackedWeight(zp.quantize(torch.ones(4, 18), "int8:channel"))
    conv = nn.Conv2d(2, 4, 3)
    assert QuantizedLayer(conv, {"weight": weight})(torch.ones(1, 2, 3, 3)).shape == (1, 4, 1, 1)
    with pytest.raises(
        UnsupportedError, match=r"^weights \(with 'wieght'\) must be those of a Conv2d: weight$"
    ):
        QuantizedLayer(conv, {"wieght": weight})
    with pytest.raises(UnsupportedError, match=r"^weights \(with 'weight'\) must be those of a ReLU: none$"):
        QuantizedLayer(nn.ReLU(), {"weight": weight})
    with pytest.raises(
        ShapeError, match=r"^weights\['weight'\] \(shape \(4, 18\)\) must be .* shape \(4, 8\) for"
    ):
        QuantizedLayer(nn.Conv2d(2, 4, 2), {"weight": weight})


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("conv2d", "Conv2d in floats, with weight dequantized as a whole for each call"),
        ("gru cell", "GRUCell in floats, with weight_ih and weight_hh dequantized as a whole for each call"),
    ],
)
def test_a_layer_says_that_it_dequantizes_its_weights_and_does(
    name: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, args = made(name)
    model = convert(prepare(layer, recipe_for(layer, weight="int8:channel"))).model
    assert model.explain() == reported
    tiles, plain = [], PackedWeight.tile

    def tile(weight: PackedWeight, start: int, stop: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tiles.append((start, stop, weight.shape[0]))
        return plain(weight, start, stop, dtype)

    monkeypatch.setattr(PackedWeight, "tile", tile)
    for _ in range(2):
        model(*args)
    assert len(tiles) == 2 * len(model.weights)
    assert all(start == 0 and stop == rows for start, stop, rows in tiles)


def test_nothing_of_a_converted_layer_asks_for_gradients() -> None:
    for name in LAYERS:
        layer, args = made(name)
        model = convert(prepare(layer, recipe_for(layer, weight="int8:channel"))).model
        assert not any(parameter.requires_grad for parameter in model.parameters()), name
        assert not any(tensor.requires_grad for tensor in tensors(model(*args))), name
        assert all(parameter.requires_grad for parameter in layer.parameters())


def test_modules_without_weights_are_quantized_where_a_rule_names_their_type() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU())
    rules = (
        Rule(types=("LayerNorm",), gives=Assignment.of(input="int8:channel-1 static")),
        Rule(types=("ReLU",), gives=Assignment.of(output="uint4:tensor static")),
    )
    x = torch.randn(5, 6)
    calibration = calibrate(model, Recipe(rules=rules), [x])
    assert sorted(calibration.params) == ["1.input", "2.output"]
    prepared = prepare(model, Recipe(rules=rules), calibration=calibration)
    with torch.no_grad():
        normed = model[1](zp.fake_quantize(model[0](x), calibration.params["1.input"]))
        expected = zp.fake_quantize(torch.relu(normed), calibration.params["2.output"])
        assert torch.equal(prepared(x), expected)
        conversion = convert(prepared)
        assert torch.equal(conversion.model(x), expected)
    assert isinstance(conversion.model[1], QuantizedLayer)
    assert str(conversion).splitlines()[1] == "1 (LayerNorm): input int8:channel-1 static"


def test_embeddings_look_up_packed_rows_only() -> None:
    model = nn.Sequential(nn.Embedding(9, 8))
    conversion = quantize_model(model, Recipe(rules=(Rule(gives=Assignment.of(weight="int8:token")),)))
    assert isinstance(conversion.model[0], QuantizedEmbedding)
    bag = nn.Sequential(nn.EmbeddingBag(9, 8))
    conversion = quantize_model(bag, Recipe(rules=(Rule(gives=Assignment.of(weight="int8:token")),)))
    assert isinstance(conversion.model[0], QuantizedEmbeddingBag)
    assert isinstance(conversion.model[0].weight, PackedWeight)
