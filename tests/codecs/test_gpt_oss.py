"""Files of gpt-oss: what transformers makes of them, a model that it loads, and files that are wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import dequantized, save
from tests.peers import Peer, transformers

import zeropoint as zp
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import require_loadable
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run import units
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.gpt_oss import CODEC
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, UnsupportedError

mxfp4 = Peer("transformers.integrations.mxfp4")


X = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{X}.gate_up_proj", f"{X}.down_proj"
CONFIG: dict[str, Any] = {"model_type": "gpt_oss", "dtype": "bfloat16"}
EXPERTS, HIDDEN, INNER = 3, 64, 96
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Tensors = dict[str, torch.Tensor]


def floats() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        GATE_UP: (EXPERTS, HIDDEN, 2 * INNER), f"{GATE_UP}_bias": (EXPERTS, 2 * INNER),
        DOWN: (EXPERTS, INNER, HIDDEN), f"{DOWN}_bias": (EXPERTS, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def codes() -> Tensors:
    """Return the experts of somebody else, with every code and scales from 2^-127 to 2^120."""
    generator = torch.Generator().manual_seed(4)
    found: Tensors = {}
    for name, rows, columns in ((GATE_UP, 2 * INNER, HIDDEN), (DOWN, HIDDEN, INNER)):
        shape = (EXPERTS, rows, columns // 32)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.randint(0, 248, shape, generator=generator, dtype=torch.uint8)
    return found


def theirs(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return save(folder, tensors, config | {"quantization_config": section})


def quantized(source: Path, out: Path, to: str = "mxfp4", limits: Limits | None = None) -> Tensors:
    run(make_plan(open_source(source), to, codec=CODEC, limits=limits), out)
    return load_file(out / "model.safetensors")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def nearest(x: float) -> int:
    """Return the code of a number, ties away from zero, as downcast_to_mxfp_torch rounds it."""
    magnitude = max(range(8), key=lambda code: (-abs(VALUES[code] - abs(x)), VALUES[code]))
    return magnitude | (8 if math.copysign(1.0, x) < 0 else 0)


def test_codes_and_scales_are_those_of_triton_kernels(tmp_path: Path) -> None:
    x = floats()
    x[GATE_UP][0, :32, 0] = torch.tensor([6.0, 2.5, -2.5, 0.25, -0.75, 5.0, 1.25, 3.5] * 4)
    found = quantized(save(tmp_path / "in", x, CONFIG), tmp_path / "out")
    for name in (GATE_UP, DOWN):
        blocks = x[name].transpose(1, 2).reshape(-1, 32).tolist()
        scales = [math.frexp(max(map(abs, block)) / 6) for block in blocks]
        exponents = [exponent - (fraction == 0.5) for fraction, exponent in scales]
        assert found[f"{name}_scales"].flatten().tolist() == [e + 127 for e in exponents]
        wanted = [[nearest(v / 2.0**e) for v in block] for block, e in zip(blocks, exponents, strict=True)]
        fields = found[f"{name}_blocks"].view(-1, 16)
        assert torch.stack([fields & 15, fields >> 4], 2).view(-1, 32).tolist() == wanted


def test_the_tensors_and_the_configuration_are_those_of_gpt_oss(tmp_path: Path) -> None:
    x = floats()
    found = quantized(save(tmp_path / "in", x, CONFIG), tmp_path / "out")
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items() if t.dtype == torch.uint8} == {
        f"{GATE_UP}_blocks": ((3, 192, 2, 16), torch.uint8), f"{GATE_UP}_scales": ((3, 192, 2), torch.uint8),
        f"{DOWN}_blocks": ((3, 64, 3, 16), torch.uint8), f"{DOWN}_scales": ((3, 64, 3), torch.uint8),
    }  # fmt: skip
    kept = {name: t for name, t in found.items() if t.dtype != torch.uint8}
    assert kept.keys() == x.keys() - {GATE_UP, DOWN}
    assert all(torch.equal(t, x[name]) for name, t in kept.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"],
    }  # fmt: skip
    checked = zp.verify_checkpoint(tmp_path / "out", tmp_path / "in")
    assert (checked.problems, checked.values) == ((), 3 * EXPERTS * HIDDEN * INNER)
    assert [s.layout for s in zp.inspect_checkpoint(tmp_path / "out").schemes] == ["mxfp4"]


def test_dequantizing_gives_the_floats_of_transformers_bit_for_bit(tmp_path: Path) -> None:
    stored = codes()
    assert not zp.verify_checkpoint(theirs(tmp_path / "in", stored)).problems
    found = dequantized(tmp_path / "in", tmp_path / "out")
    for name in (GATE_UP, DOWN):
        wanted = mxfp4.convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(bits(found[name]), bits(wanted))
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems


def test_tiles_of_any_size_give_the_same_bytes(tmp_path: Path) -> None:
    source = save(tmp_path / "in", floats(), CONFIG)
    whole = quantized(source, tmp_path / "a")
    parts = quantized(source, tmp_path / "b", limits=Limits(tile_values=700, workers=2))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_other_layouts_keep_these_experts_and_say_why(tmp_path: Path) -> None:
    plan = make_plan(open_source(save(tmp_path / "in", floats(), CONFIG)), "w8a8")
    assert any("fused experts with a bias, which loaders do not take apart" in note for note in plan.notes)
    assert [weight.module for weight in plan.weights] == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_result_and_computes_what_the_decoded_one_does(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_local_experts=3, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
        layer_types=["full_attention"],
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "in")
    quantized(tmp_path / "in", tmp_path / "out")
    dequantized(tmp_path / "out", tmp_path / "back")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, other = (load(tmp_path / name, dtype=torch.bfloat16) for name in ("out", "back"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = ours(tokens).logits
        assert torch.equal(logits, other(tokens).logits)
        assert not torch.equal(logits, model(tokens).logits)


def test_the_experts_of_transformers_lie_as_the_table_says() -> None:
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts
    config = transformers.GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=3)
    module = experts(config)
    assert tuple(module.gate_up_proj.shape) == (3, 64, 192)
    assert tuple(module.gate_up_proj_bias.shape) == (3, 192)
    y = torch.arange(8.0)[None]
    gate, up = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
    assert torch.equal(module._apply_gate(y), (up + 1) * gate * torch.sigmoid(gate * 1.702))


def changed(**changes: torch.Tensor | None) -> Tensors:
    """Return somebody's experts with other tensors of gate_up_proj."""
    wanted = {f"{GATE_UP}_{part}": tensor for part, tensor in changes.items()}
    return {name: tensor for name, tensor in (codes() | wanted).items() if tensor is not None}


WRONG: tuple[tuple[Callable[[], Tensors], str], ...] = (
    (lambda: changed(scales=None), "_scales is missing, which the layer needs"),
    (lambda: changed(blocks=None), "_blocks is missing"),
    (lambda: changed(scales=torch.ones(3, 192, 2)), "blocks and scales are U8 and F32, but must be U8"),
    (lambda: changed(scales=torch.ones(3, 192, 3, dtype=torch.uint8)), r"have shapes .*, but must have \(ex"),
    (lambda: changed(blocks=torch.ones(3, 192, 32, dtype=torch.uint8)), r"have shapes .*, but must have"),
    (lambda: changed(scales=torch.full((3, 192, 2), 255, dtype=torch.uint8)), "must be finite and"),
)  # fmt: skip


@pytest.mark.parametrize(("tensors", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    tensors: Callable[[], Tensors], rule: str, tmp_path: Path
) -> None:
    found = zp.verify_checkpoint(theirs(tmp_path / "in", tensors())).problems
    assert {problem.where for problem in found} == {GATE_UP}
    with pytest.raises(AssertionError, match=rule):
        raise AssertionError(found[0].what)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    folder = theirs(tmp_path / "in", codes(), {"model_type": "llama"})
    with pytest.raises(UnsupportedError, match="model_type is 'llama', but quant_method 'mxfp4' is read of"):
        zp.verify_checkpoint(folder)


def test_some_experts_of_a_layer_alone_are_refused(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "in", floats(), CONFIG))
    with pytest.raises(CheckpointError, match=r"some experts of 'model\.layers\.0\.mlp\.experts' are kept"):
        make_plan(source, "mxfp4", codec=CODEC, selection=Selection(ignore=(DOWN,)))


@pytest.mark.parametrize("text", ["nvfp4a16", "mxfp8a16", "float4_e2m1fn:g16:scale=rceil", "int4:g32"])
def test_a_scheme_that_has_no_place_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="is not what gpt-oss stores"):
        layer_scheme(text, CODEC)


def test_matrices_and_partial_groups_are_refused() -> None:
    layer = layer_scheme("mxfp4", CODEC)
    assert CODEC.refusal(layer, (64, 64)) == "has 2 axes, and the layout stores fused experts"
    assert CODEC.refusal(layer, (3, 64, 48)) == "last axis 48 is not a multiple of the group, 32"


def with_biases() -> Tensors:
    """Return the experts of somebody else with biases, and a layer of floats."""
    return codes() | {name: x for name, x in floats().items() if name not in (GATE_UP, DOWN)}


def convert(source: Path, out: Path, layout: str, limits: Limits, to: str | None = None) -> Tensors:
    run(conversion_plan(open_source(source), to, get_codec(layout), limits=limits), out)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("limits", [Limits(workers=1), Limits(workers=3, tile_values=64)], ids=str)
def test_converted_experts_are_single_matrices_with_the_same_codes_scales_and_biases(
    limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits.workers > 1:
        monkeypatch.setattr(output_tensors, "UNIT_VALUES", 512)
        monkeypatch.setattr(units, "UNIT_BYTES", 64)
    stored = with_biases()
    source = theirs(tmp_path / "in", stored)
    found = convert(source, tmp_path / "out", "compressed-tensors", limits)
    wanted = {name: x for name, x in stored.items() if "experts" not in name}
    for expert in range(EXPERTS):
        for kind, every, first in (("gate", GATE_UP, 0), ("up", GATE_UP, 1), ("down", DOWN, 0)):
            step = 2 if every == GATE_UP else 1
            name = f"{GATE_UP.rpartition('.')[0]}.{expert}.{kind}_proj"
            rows = slice(first, None, step)
            wanted[f"{name}.weight_packed"] = stored[f"{every}_blocks"][expert, rows].flatten(1)
            wanted[f"{name}.weight_scale"] = stored[f"{every}_scales"][expert, rows]
            wanted[f"{name}.bias"] = stored[f"{every}_bias"][expert, rows]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in wanted.items())
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    back = convert(tmp_path / "out", tmp_path / "floats", "compressed-tensors", limits, "bfloat16")
    whole = mxfp4.convert_moe_packed_tensors(stored[f"{DOWN}_blocks"], stored[f"{DOWN}_scales"])
    name = f"{GATE_UP.rpartition('.')[0]}.1.down_proj.weight"
    assert torch.equal(bits(back[name]), bits(whole[1].t().contiguous()))


def test_a_bias_that_was_changed_after_it_was_split_is_found(tmp_path: Path) -> None:
    source = theirs(tmp_path / "in", with_biases())
    found = convert(source, tmp_path / "out", "compressed-tensors", Limits(workers=1))
    name = f"{GATE_UP.rpartition('.')[0]}.2.up_proj.bias"
    for other in ({name: found[name] + 1}, {}):
        tensors = {key: x for key, x in found.items() if key != name} | other
        save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
        assert name in {problem.where for problem in zp.verify_checkpoint(tmp_path / "out", source).problems}


def test_no_engine_is_said_to_load_these_experts_one_by_one(tmp_path: Path) -> None:
    source = open_source(theirs(tmp_path / "in", with_biases()))
    plan = conversion_plan(source, None, get_codec("compressed-tensors"))
    with pytest.raises(CheckpointError, match="takes the experts of this family as one tensor"):
        require_loadable(plan)
