"""Attention in four layers computes what torch's one module computes, and can be quantized layer by layer."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.models import QuantizedLinear, SplitAttention, calibrate, convert, prepare, quantize_model
from zeropoint.models.unfuse import unfused
from zeropoint.recipes import Assignment, Recipe, Rule, model_preset

# Of a dozen products in float32, of numbers of order 1.
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def same(whole: nn.MultiheadAttention, *args: torch.Tensor, **named: Any) -> bool:
    expected, weights = whole(*args, **named)
    found, mine = SplitAttention(whole)(*args, **named)
    pairs = [(found, expected)] if mine is None else [(found, expected), (mine, weights)]
    return (mine is None) == (weights is None) and all(torch.allclose(a, b, **CLOSE) for a, b in pairs)


@pytest.mark.crossed
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 7}])
def test_it_computes_what_torch_computes(bias: bool, batch_first: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first, **more).eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5)
    q = torch.randn(2, 4, 12)
    k, v = torch.randn(2, 6, more.get("kdim", 12)), torch.randn(2, 6, more.get("vdim", 12))
    args = [q, k, v] if batch_first else [x.transpose(0, 1) for x in (q, k, v)]
    padding = torch.tensor([[0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
    attend = torch.rand(4, 6) > 0.7
    attend[:, 0] = False
    each = torch.randn(6, 4, 6)
    masks = itertools.product((None, padding), (None, attend, each), (True, False))
    for key_padding_mask, attn_mask, need_weights in masks:
        pad = key_padding_mask
        if pad is not None and attn_mask is not None and attn_mask.is_floating_point():
            pad = torch.zeros(pad.shape).masked_fill(pad, -torch.inf)
        for average in (True, False):
            assert same(
                whole, *args, key_padding_mask=pad, attn_mask=attn_mask, need_weights=need_weights,
                average_attn_weights=average,
            )  # fmt: skip
    assert same(whole, *(x[0] if batch_first else x[:, 0] for x in args), attn_mask=attend)


def test_a_causal_hint_needs_its_mask() -> None:
    whole, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 1, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert same(whole, x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    with pytest.raises(UnsupportedError, match="is_causal describes attn_mask, which is None"):
        SplitAttention(whole)(x, x, x, is_causal=True)


def test_options_go_by_place_or_name_and_others_are_refused() -> None:
    whole, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 1, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert same(whole, x, x, x, None, True, mask, False)
    for rest, named in (((), {"mask": mask}), ((None, True, None, True, False, 1), {})):
        with pytest.raises(TypeError, match="must be among key_padding_mask, need_weights, attn_mask"):
            SplitAttention(whole)(x, x, x, *rest, **named)


def test_dropout_acts_while_it_trains_only() -> None:
    whole, x = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(5, 1, 8)
    split = SplitAttention(whole)
    assert split.training
    torch.manual_seed(0)
    first = split(x, x, x)[0]
    assert not torch.equal(first, split(x, x, x)[0])
    split.eval()
    assert torch.equal(split(x, x, x, need_weights=False)[0], split(x, x, x, need_weights=False)[0])


def test_projections_are_layers_with_names_that_rules_match() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2), "fc": nn.Linear(16, 4)})
    rules = (
        Rule(name="attn.out_proj", gives=None, reason="it is small"),
        Rule(name="attn.?_proj", gives=Assignment.of(weight="int4:g16")),
    )
    conversion = quantize_model(model, Recipe(rules=rules, default=Rule(gives=model_preset("w8a16"))))
    assert [str(layer.gives) for layer in conversion.layers] == [
        *["weight int4:g16"] * 3, "None", f"weight {zp.Scheme.parse('w8a16')}",
    ]  # fmt: skip
    attention = conversion.model["attn"]
    assert isinstance(attention, SplitAttention)
    assert isinstance(attention.q_proj, QuantizedLinear)
    thirds = model["attn"].in_proj_weight.detach().chunk(3)
    for name, third in zip(("q_proj", "k_proj", "v_proj"), thirds, strict=True):
        packed = attention.get_submodule(name).weight
        assert torch.equal(packed.quantized().dequantize(), zp.quantize(third, "int4:g16").dequantize())


def test_attention_of_which_nothing_is_quantized_is_kept() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2), "fc": nn.Linear(16, 4)})
    whole = model["attn"]
    rules = (Rule(name="fc", gives=model_preset("w8a16")),)
    for result in (quantize_model(model, Recipe(rules=rules)).model, prepare(model, Recipe(rules=rules))):
        assert type(result["attn"]) is nn.MultiheadAttention
    with unfused(model):
        assert isinstance(model["attn"], SplitAttention)
    assert model["attn"] is whole


def test_attention_is_put_back_after_a_failure() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    whole = layer.self_attn
    with pytest.raises(ZeroDivisionError), unfused(layer):
        1 / 0  # noqa: B018
    assert layer.self_attn is whole
    assert layer.activation_relu_or_gelu


def test_a_single_attention_is_a_model_too() -> None:
    whole, x = nn.MultiheadAttention(16, 2).eval(), torch.randn(5, 1, 16)
    conversion = quantize_model(whole, "w8a16")
    with torch.no_grad():
        torch.testing.assert_close(conversion.model(x, x, x)[0], whole(x, x, x)[0], rtol=0.1, atol=0.02)
    with pytest.raises(UnsupportedError, match="nothing is wanted"):
        quantize_model(whole, Recipe(default=Rule(gives=None, reason="nothing is wanted")))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("rule", ["*", "*linear1", "*self_attn*"])
def test_encoders_take_no_short_way_past_quantized_layers(rule: str, grad: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    recipe = Recipe(
        rules=(
            Rule(
                name=rule, types=("Linear",), gives=Assignment.of(weight="int4:channel", input="int8:token")
            ),
        )
    )
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5).bool()
    padding[1, 3:] = True
    expected = encoder.train(False)(x, src_key_padding_mask=padding)
    prepared = prepare(encoder, recipe)
    conversion = convert(prepared)
    assert encoder.use_nested_tensor
    assert encoder.layers[0].activation_relu_or_gelu
    with torch.set_grad_enabled(grad):
        first = prepared(x, src_key_padding_mask=padding)
        second = conversion.model(x, src_key_padding_mask=padding)
        kept = ~padding
        norm = expected[kept].norm()
        drift = float(((first - expected)[kept].norm() / norm).detach())
        assert 0.005 < drift < 0.3
        # Sums of floats and of integer codes round apart, and an input on an edge falls to the next code:
        # a few steps of 8 bits, where a layer that is passed by would show as the drift itself.
        assert float(((first - second)[kept].norm() / norm).detach()) < drift / 20


def test_static_inputs_of_projections_are_calibrated() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5).bool()
    padding[1, 3:] = True
    batch = {"src": x, "src_key_padding_mask": padding}
    calibration = calibrate(encoder, "w8a8_static", [batch])
    names = [f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    assert sorted(calibration.params) == sorted(
        f"{name}.input" for name in (*names, "layers.0.linear1", "layers.0.linear2")
    )
    expected = zp.choose_params(x, "uint8:tensor:asym").scales[0]
    assert torch.equal(calibration.params[f"{names[0]}.input"].scales[0].reshape(()), expected.reshape(()))
    assert type(encoder.layers[0].self_attn) is nn.MultiheadAttention
    conversion = quantize_model(encoder, "w8a8_static", calibration=calibration)
    found, plain = conversion.model(**batch), encoder(**batch)
    drift = (found - plain)[~padding].norm() / plain[~padding].norm()
    assert float(drift.detach()) < 0.05


def test_an_attention_that_stands_twice_is_opened_once() -> None:
    whole = nn.MultiheadAttention(8, 2)
    model = nn.ModuleList([whole, whole])
    conversion = quantize_model(model, "w8a16")
    assert conversion.model[0] is conversion.model[1]
    assert len(conversion.layers) == 4
