"""GPTQ and AWQ files compared with GPTQModel: words of its packer, values of its layers, models it loads.

GPTQModel 7.7 is in an environment of its own (tests/oracles/more_peers.sh); without it, these tests skip.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.written import dequantized
from tests.oracles import tiny_llama
from tests.peers import transformers
from torch import nn

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.codecs.awq import CODEC as AWQ
from zeropoint.codecs.gptq import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.tensor_fields import WeightPart

# Its dependencies warn of each other's releases.
pytestmark = pytest.mark.filterwarnings("ignore")
BITS = (2, 3, 4, 8)
ROWS, COLUMNS, GROUP = 96, 256, 32


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # GPTQModel writes its logs where it is


def layer_of(bits: int, *, asym: bool) -> LayerScheme:
    return layer_scheme(f"int{bits}:g{GROUP}{':asym' if asym else ''}", CODEC)


def packed(q: zp.QuantizedTensor, groups: torch.Tensor) -> Any:
    """Return GPTQModel's layer with the codes of ``q``, whose columns it finds in ``groups``."""
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    half = 1 << (q.scheme.bits - 1)
    symmetric = q.zero_point is None
    zeros = torch.full(q.scales[0].shape, half) if symmetric else q.zero_point.int() + half
    found = linear(
        bits=q.scheme.bits, group_size=GROUP, sym=symmetric, desc_act=True, in_features=COLUMNS,
        out_features=ROWS, bias=False,
    )  # fmt: skip
    weight = nn.Linear(COLUMNS, ROWS, bias=False)
    scales = q.scales[0].float()
    steps = q.codes.float() - (0 if symmetric else q.zero_point.float()[:, groups])
    weight.weight.data = steps * scales[:, groups]
    found.pack_original(weight, scales, zeros.float(), groups.int())
    return found


def first_version(layer: Any) -> torch.Tensor:
    """Return the words of zero points that GPTQModel saves under ``checkpoint_format: gptq``."""
    model = pytest.importorskip("gptqmodel.utils.model")
    config = pytest.importorskip("gptqmodel.quantization.config")
    stored = layer.qzeros.clone()
    settings = config.QuantizeConfig(bits=layer.bits, group_size=GROUP)
    model.convert_gptq_v2_to_v1_format_module(layer, settings)
    words, layer.qzeros = layer.qzeros, stored
    return words


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_the_words_are_those_of_its_packer(bits: int, asym: bool) -> None:
    layer, x = layer_of(bits, asym=asym), torch.randn(ROWS, COLUMNS)
    q = zp.quantize(x, layer.weight)
    ours = CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)
    theirs = packed(q, torch.arange(COLUMNS) // GROUP)
    wanted = {**theirs.state_dict(), "qzeros": theirs.qzeros if asym else first_version(theirs)}
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        assert tensor.dtype is wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.crossed
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_act_order_decodes_to_the_values_of_its_layer(bits: int, asym: bool, version: str) -> None:
    layer, x = layer_of(bits, asym=asym), torch.randn(ROWS, COLUMNS).abs()
    theirs = packed(zp.quantize(x, layer.weight), torch.randperm(COLUMNS) // GROUP)
    tensors = theirs.state_dict()
    if version == "gptq":
        tensors["qzeros"] = first_version(theirs)
    codec = type(CODEC)(version=version, ordered=True)
    stored = LayerScheme(codec=codec, name=layer.name, weight=layer.weight)
    ours = codec.decode(stored, tensors, WeightPart(0, (ROWS, COLUMNS), torch.float16))
    theirs.post_init()
    assert torch.equal(ours.dequantize(), theirs.dequantize_weight().t())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_words_of_awq_are_those_of_its_packer(dtype: str) -> None:
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq").AwqTorchLinear
    layer = layer_scheme(f"int4:g{GROUP}:asym:scale={dtype}", AWQ)
    q = zp.quantize(torch.randn(ROWS, COLUMNS).to(getattr(torch, dtype)), layer.weight)
    assert q.zero_point is not None
    theirs = linear(
        bits=4,
        group_size=GROUP,
        sym=False,
        desc_act=False,
        in_features=COLUMNS,
        out_features=ROWS,
        bias=False,
    )
    weight = nn.Linear(COLUMNS, ROWS, bias=False)
    weight.weight.data = q.dequantize(torch.float32)
    theirs.pack(weight, q.scales[0], q.zero_point.float() + 8)
    for name, tensor in AWQ.encode(layer, q).items():
        wanted = theirs.state_dict()[name]
        assert tensor.dtype is wanted.dtype
        assert torch.equal(tensor, wanted), name


def same_layers(model: nn.Module, wanted: dict[str, torch.Tensor]) -> int:
    """Return how many layers of a model that GPTQModel made decode to ``wanted``."""
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "dequantize_weight")}
    for name, module in layers.items():
        assert torch.equal(module.dequantize_weight().t(), wanted[f"{name}.weight"]), name
    return len(layers)


RECIPE = """
default: int4:g32
rules:
- {name: "*.0.self_attn.o_proj", keep: true}
- {name: "*.down_proj", weight: "int8:g64"}
- {name: "re:.*[qkv]_proj", weight: "int3:g32"}
- {type: Head, weight: "int8:g32"}
"""


@pytest.mark.slow
def test_it_loads_a_mixture_with_a_head_and_a_layer_that_is_kept(tmp_path: Path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel")
    tiny_llama.save(tmp_path / "in")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = RecipeText.read(tmp_path / "recipe.yaml")
    # Without force it is refused: transformers reads no dynamic, and vLLM no three bits.
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", recipe, format="gptq", force=True)
    loaded = gptqmodel.GPTQModel.load(
        str(tmp_path / "out"), device="cpu", backend=gptqmodel.BACKEND.TORCH, dtype=torch.float16
    )
    assert same_layers(loaded.model, dequantized(tmp_path / "out", tmp_path / "floats", "F16")) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [("gptq", "int4:g32"), ("gptq", "int4:g32:asym"), ("gptq", "int8:g64"), ("awq", "int4:g32:asym")],
)
def test_transformers_loads_one_scheme_by_way_of_it(name: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    tiny_llama.save(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", text, format=name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float16, device_map="cpu"
    )
    wanted = dequantized(tmp_path / "out", tmp_path / "floats", "F16")
    assert same_layers(loaded, wanted) == 14
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float16)
    tokens = torch.arange(16)[None]
    off = (loaded(tokens).logits - plain(tokens).logits).abs().max()
    assert off < 2e-3  # products in float16, in another order
    assert off < plain(tokens).logits.abs().max() / 100


SETTINGS = {
    "act-order": {"bits": 4, "desc_act": True, "sym": True},
    "asymmetric": {"bits": 4, "desc_act": False, "sym": False},
    "second version": {"bits": 3, "desc_act": False, "sym": False, "format": "gptq_v2"},
    "rules": {
        "bits": 4, "desc_act": True, "sym": True,
        "dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, r"-:.*\.o_proj": {}},
    },
    "awq": {"bits": 4, "sym": False, "quant_method": "awq", "format": "gemm"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_what_it_quantizes_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # it wants more threads than a small machine has
    gptqmodel = pytest.importorskip("gptqmodel")
    tiny_llama.save(tmp_path / "in")
    settings = gptqmodel.QuantizeConfig(group_size=GROUP, **SETTINGS[name])
    model = gptqmodel.GPTQModel.load(str(tmp_path / "in"), settings)
    text = [{"input_ids": [i % 250] * 32, "attention_mask": [1] * 32} for i in range(32)]
    model.quantize(text, batch_size=1)
    model.save(str(tmp_path / "theirs"))
    loaded = gptqmodel.GPTQModel.load(
        str(tmp_path / "theirs"), device="cpu", backend=gptqmodel.BACKEND.TORCH, dtype=torch.float16
    )
    assert zp.verify_checkpoint(tmp_path / "theirs").problems == ()
    wanted = dequantized(tmp_path / "theirs", tmp_path / "floats", "F16")
    if name == "awq":  # whose layers tell their weights to kernels alone
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float16)
        tokens = torch.arange(16)[None]
        assert (loaded.model(tokens).logits - plain(tokens).logits).abs().max() < 2e-3
    else:
        assert same_layers(loaded.model, wanted) == (12 if name == "rules" else 14)
