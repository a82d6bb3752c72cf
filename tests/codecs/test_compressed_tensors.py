import json
import re

import pytest
import torch
from tests.checkpoint.written import weight
from tests.oracles import llmcompressor_golden
from tests.tensors import encoded, same_bytes

import zeropoint as zp
from zeropoint.codecs.compressed_tensors import CODEC, layer_scheme
from zeropoint.codecs.compressed_tensors.config import (
    Group,
    input_arguments,
    matches,
    quantization_config,
    read_config,
    read_input,
)
from zeropoint.codecs.compressed_tensors.layout import (
    Layout,
    layout_of,
    unfit,
)
from zeropoint.codecs.containers.safetensors import FILE_DTYPES
from zeropoint.codecs.layer_schemes import named_layer
from zeropoint.codecs.tensor_fields import WeightPart
from zeropoint.errors import CheckpointError, FormatError, SchemeError, UnsupportedError, ZeropointError
from zeropoint.recipes import Activation
from zeropoint.schemes import Scheme

PRESETS = [name for name, preset in CODEC.presets.items() if not preset.static]
OTHERS = [
    "int2:g32", "int3:g64", "int5:g32", "int6:channel", "int7:g32", "int8:tensor", "int3:g32:asym",
    "int8:channel:asym", "int4:g128:scale=float32", "int4:g128:narrow", "float8_e4m3fn:tensor",
    "float8_e4m3fn:block64x32", "mxfp4:scale=floor",
]  # fmt: skip
NVFP4 = "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor"
SHAPES = [(40, 256), (1, 128), (33, 384)]
GOLDEN = json.loads(llmcompressor_golden.GOLDEN.read_text())["cases"]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", [*PRESETS, *OTHERS])
def test_decoding_what_was_encoded_gives_the_same_tensor(
    text: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = layer_scheme(text)
    q = zp.quantize(weight(*shape, dtype=dtype), layer.weight)
    tensors = encoded(layer, q)
    specs = CODEC.tensors(layer, shape, dtype)
    assert {s.suffix: (s.dtype, s.shape) for s in specs} == {
        name: (FILE_DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()
    }
    back = CODEC.decode(layer, tensors, WeightPart(0, shape, dtype))
    assert same_bytes(back.data, q.data)
    assert back.params == q.params
    assert same_bytes(back.dequantize(), q.dequantize())


def test_zero_points_that_fill_one_word_are_read_back() -> None:
    layer = layer_scheme("int4:g32:asym")
    q = zp.quantize(weight(8, 160), layer.weight)
    tensors = encoded(layer, q)
    assert tensors["weight_zero_point"].shape == (1, 5)
    back = CODEC.decode(layer, tensors, WeightPart(0, (8, 160), torch.float32))
    assert same_bytes(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("text", [*PRESETS, *OTHERS])
def test_parts_encode_to_the_lines_of_the_whole(text: str) -> None:
    layer = layer_scheme(text)
    x = weight(300, 256)
    whole = zp.quantize(x, layer.weight)
    tensors = encoded(layer, whole)
    step = CODEC.alignment(layer, (300, 256))
    step *= 1 if step > 1 else 7
    specs = {s.suffix: s for s in CODEC.tensors(layer, (300, 256), torch.float32)}
    for start in range(0, 300, step):
        part = _rows(whole, start, min(300, start + step))
        for name, lines in CODEC.encode(layer, part).items():
            first = start // specs[name].per * specs[name].lines
            assert same_bytes(lines, tensors[name][first : first + len(lines)])
    constants = CODEC.constants(layer, whole.params, (300, 256))
    assert constants.keys() == {name for name, spec in specs.items() if spec.axis is None}


def _rows(q: zp.QuantizedTensor, first: int, last: int) -> zp.QuantizedTensor:
    shape = (last - first, q.shape[1])

    def cut(t: torch.Tensor, rows: int) -> torch.Tensor:
        return t if t.shape[0] == 1 else t[first // rows : -(-last // rows)]

    rows = q.scheme.granularity.block_shape(q.shape)[0]
    params = zp.QuantizationParams(
        scheme=q.scheme, shape=shape, dtype=q.dtype,
        scales=(cut(q.scales[0], rows), *q.scales[1:]),
        zero_point=None if q.zero_point is None else cut(q.zero_point, rows),
    )  # fmt: skip
    return zp.QuantizedTensor(data=q.data[first:last], params=params, shape=shape, dtype=q.dtype)


@pytest.mark.parametrize("preset", [name for name in PRESETS if f"{name.upper()} bfloat16" in GOLDEN])
def test_the_configuration_is_that_of_llm_compressor(preset: str) -> None:
    golden = GOLDEN[f"{preset.upper()} bfloat16"]["quantization_config"]
    layer = layer_scheme(preset)
    found = quantization_config([Group(layer=layer)], golden["ignore"])
    # A word of transformers alone, for weights that it should decode while it loads.
    assert found.pop("dequantize", False) is (layer.input is None)
    assert found == golden


def test_nothing_is_decoded_on_loading_where_transformers_would_lose_something() -> None:
    one, other = (Group(layer=layer_scheme(name)) for name in ("w4a16", "w8a16"))
    inputs = Group(layer=layer_scheme("w8a8"))
    cache = {"num_bits": 8, "type": "float"}
    for groups, kv_cache in (((one, other), None), ((inputs,), None), ((one,), cache)):
        assert "dequantize" not in quantization_config(groups, [], kv_cache=kv_cache)


@pytest.mark.parametrize("text", [*PRESETS, *OTHERS])
def test_the_configuration_reads_back_as_the_scheme(text: str) -> None:
    layer = layer_scheme(text)
    (group,), ignore = read_config(quantization_config([Group(layer=layer)], ["lm_head"]), CODEC)
    assert group.layer.layout == layer.layout
    assert ignore == ("lm_head",)
    read, written = group.layer.weight, layer.weight
    # How values were chosen (scale rule, range, scale dtype) is not in the file; what decodes them is.
    assert (read.element, read.granularity, read.zero_point) == (
        written.element,
        written.granularity,
        written.zero_point,
    )


@pytest.mark.parametrize("text", ["w4a16", "int4:g64", "fp8_dynamic", "w8a8", "fp8_block", "nvfp4a16"])
def test_fields_that_a_configuration_leaves_out_have_their_usual_values(text: str) -> None:
    """compressed-tensors 0.20 writes no empty field."""
    layer = layer_scheme(text)
    whole = quantization_config([Group(layer=layer)], ["lm_head"])
    config = {key: value for key, value in whole.items() if value not in (None, {}, [])}
    (group,) = config["config_groups"].values()
    for key in ("weights", "input_activations"):
        usual = {"symmetric": True, "dynamic": False}
        given = (group.pop(key) or {}).items()
        found = {name: v for name, v in given if v not in (None, {}) and usual.get(name) != v}
        group |= {key: found} if found else {}
    del group["output_activations"]
    (read,), _ = read_config(config, CODEC)
    assert read.layer.layout == layer.layout
    assert read.layer.weight.granularity == layer.weight.granularity
    assert (read.layer.input is None) == (layer.input is None)


def test_several_groups_make_a_mixed_precision_model() -> None:
    groups = [
        Group(layer=layer_scheme("w4a16"), targets=("re:.*down_proj$",)),
        Group(layer=layer_scheme("fp8_dynamic")),
    ]
    config = quantization_config(groups, [])
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == [
        "pack-quantized",
        "float-quantized",
    ]
    assert read_config(config, CODEC)[0][0].targets == ("re:.*down_proj$",)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("uint4:g128", "unsigned codes"),
        ("int12:channel", "int2..int8"),
        ("nf4", "elements that no layout stores"),
        ("float8_e5m2:channel", "elements that no layout stores"),
        ("mxfp6_e3m2", "elements that no layout stores"),
        ("int4:block16x16", "two-dimensional blocks"),
        ("int8:tensor:asym", "one zero point for the tensor"),
        ("int4:g128:asym=real", "real zero points"),
        ("int4:channel1", "no place in compressed-tensors"),
        ("int4:g32:scale=floor", "one level of linear scales"),
        ("float4_e2m1fn:g128", "mxfp4 and nvfp4"),
        ("float4_e2m1fn:g64:scale=even", "one e8m0 scale for each group of 32"),
        (NVFP4 + ":dialect=zeropoint", "keeps its tensor scale"),
        ("float8_e4m3fn:cast", "has no scales"),
    ],
)  # fmt: skip
def test_a_scheme_without_a_layout_is_refused_with_the_reason(text: str, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(rule)):
        layer_scheme(text)


def test_inputs_with_scales_from_data_are_held_and_outputs_are_not() -> None:
    assert str(layer_scheme("fp8").input) == "float8_e4m3fn:tensor static"
    assert layer_scheme("nvfp4").layout == "nvfp4-pack-quantized"
    with pytest.raises(UnsupportedError, match="files hold none of outputs; use w8a8, or"):
        layer_scheme("int8_power_of_two")


def test_a_bare_scheme_takes_the_dialect_and_the_input_scales() -> None:
    assert str(layer_scheme("int4:g128").weight) == "int4:g128:scale=input:dialect=compressed-tensors"
    assert layer_scheme("int4:g128").weight == layer_scheme("w4a16").weight
    assert str(layer_scheme("int4:g128:scale=float32:dialect=torch").weight) == "int4:g128:dialect=torch"
    assert layer_scheme("w4a16:g64").weight == layer_scheme("int4:g64").weight


def test_signed_scales_keep_a_dialect_that_defines_them() -> None:
    assert str(Scheme.parse("q4_0:scale=signed")) == "int4:g32:scale=signed/float16:dialect=ggml"
    assert layer_scheme("q4_0:scale=signed").weight == Scheme.parse("q4_0:scale=signed")


def test_signed_scales_have_no_dialect_of_inputs_and_the_format_of_the_default() -> None:
    for text in ("int4:g64:scale=signed", "w4a16:g64:scale=signed"):
        assert str(layer_scheme(text).weight) == "int4:g64:scale=signed/input"
    with pytest.raises(SchemeError, match="rounds intermediates to the input's dtype"):
        layer_scheme("int4:g64:scale=signed:dialect=compressed-tensors")


def test_a_name_that_is_neither_preset_nor_format_is_answered_with_the_closest() -> None:
    with pytest.raises(FormatError, match="'w4a61' is neither a preset nor a format; did you mean w4a16"):
        layer_scheme("w4a61")
    with pytest.raises(SchemeError, match="did you mean round"):
        layer_scheme("int4:g128:rund=floor")


@pytest.mark.parametrize(
    ("text", "shape", "rule"),
    [
        ("w4a16", (8, 192), "192 is not a multiple of the group, 128"),
        ("mxfp4", (8, 48), "not a multiple of the group, 32"),
        ("nvfp4a16", (8, 24), "not a multiple of the group, 16"),
        ("w8a8", (8, 0), "is empty"),
        ("w8a8", (2, 8, 8), "3 axes"),
    ],
)
def test_a_shape_that_the_layout_cannot_hold_has_its_reason(
    text: str, shape: tuple[int, ...], rule: str
) -> None:
    layer = layer_scheme(text)
    assert rule in str(unfit(layer.weight, Layout(layer.layout), shape))


def test_quantized_inputs_choose_the_layout() -> None:
    int8, token = Scheme.parse("int8:channel"), Scheme.parse("int8:token")
    assert layout_of(int8) is Layout.PACK
    assert layout_of(int8, token) is Layout.INT
    with pytest.raises(UnsupportedError, match="needs symmetric weights"):
        layout_of(Scheme.parse("int4:channel:asym"), token)


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("quant_method",), "gptq", "quant_method is 'gptq', but only compressed-tensors and fp8 are read"),
        (("config_groups", "W4A16"), 3, "config_groups"),
        (("config_groups", "W4A16", "weights", "num_bits"), 16, "with 16 bits cannot be read"),
        (("config_groups", "W4A16", "weights", "type"), "float", "mxfp4 and nvfp4|does not fit"),
    ],
)
def test_a_malformed_configuration_is_refused(path: tuple[str, ...], value: object, rule: str) -> None:
    config = json.loads(json.dumps(quantization_config([Group(layer=layer_scheme("w4a16"))], [])))
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ZeropointError, match=rule):
        read_config(config, CODEC)


def test_targets_are_classes_names_and_expressions_from_the_start() -> None:
    assert matches("a.b", ["Linear"], linear=True)
    assert not matches("a.b", ["Linear"])
    assert matches("a.b", ["a.b"])
    assert not matches("a.b", ["b"])
    assert matches("a.b", ["re:.*b$"])
    assert not matches("a.b", ["re:b$"])


@pytest.mark.parametrize("text", ["int4:g32", "int2:channel", "int5:tensor"])
def test_narrow_weights_with_quantized_inputs_stand_in_whole_bytes(text: str) -> None:
    layer = named_layer(CODEC, Scheme.parse(text), Activation.of("int8:token"))
    q = zp.quantize(weight(8, 64), layer.weight)
    tensors = encoded(layer, q)
    assert (Layout(layer.layout), tensors["weight"].dtype) == (Layout.INT, torch.int8)
    again = CODEC.decode(layer, tensors, WeightPart(0, (8, 64), torch.float32))
    assert torch.equal(again.data, q.data)
    tensors["weight"][3, 5] = 1 << (layer.weight.bits - 1)
    with pytest.raises(CheckpointError, match=r"weight holds codes from .* the file is damaged"):
        CODEC.decode(layer, tensors, WeightPart(0, (8, 64), torch.float32))


@pytest.mark.parametrize(
    ("given", "read", "arguments"),
    [
        ("int8:token", "int8:token:dialect=compressed-tensors dynamic", ("int", "token", True)),
        ("uint8:tensor:asym", "int8:tensor:asym:dialect=compressed-tensors static", ("int", "tensor", False)),
        (
            "float8_e4m3fn:tensor static",
            "float8_e4m3fn:tensor:dialect=compressed-tensors static",
            ("float", "tensor", False),
        ),
        (
            "float8_e4m3fn:g32:scale=even",
            "float8_e4m3fn:g32:scale=even:dialect=compressed-tensors dynamic",
            ("float", "group", True),
        ),
    ],
)
def test_inputs_are_named_and_read(given: str, read: str, arguments: tuple[object, ...]) -> None:
    found = input_arguments(Activation.parse(given))
    assert (found["type"], found["strategy"], found["dynamic"]) == arguments
    assert str(read_input(found)) == read


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("int4:token", "has codes that no engine takes"), ("nf4:g32", "has codes that no engine takes"),
        ("uint8:tensor static", "uint8 with asym"), ("int8:tensor:narrow", "leave out narrow"),
        ("int8:token:round=floor", "leave out round"),
        ("float8_e4m3fn:g32:scale=floor", "use scale=even"),
        ("int8:channel1 static", "more than one linear scale from data|no place in"),
    ],
)  # fmt: skip
def test_inputs_that_engines_do_not_have_are_refused(given: str, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        named_layer(CODEC, Scheme.parse("int8:channel"), Activation.parse(given))
