"""``compare`` across layouts, against values that other code computes; nothing is skipped in silence."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.quantized_inputs import dequantized_by_others, save_like, to_fp8
from tests.checkpoint.written import CONFIG, LINEAR, quantize, save, tensors_of, weight
from tests.cli.checkpoints import write_llama

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.compare import Comparison, compare
from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.registry import CODECS
from zeropoint.errors import CheckpointError

Tensors = Mapping[str, torch.Tensor]
KEPT = "model.norm.weight"


def compared(folder: Path, a: Tensors, b: Tensors) -> Comparison:
    """Compare two checkpoints of floats that hold these tensors, and one that both share."""
    shared = {KEPT: torch.ones(4)}
    return compare(save(folder / "a", {**shared, **a}), save(folder / "b", {**shared, **b}))


def unequal(found: Comparison) -> dict[str, int]:
    """Return how many values differ, by tensor."""
    return {each.pair.name: each.equality.unequal for each in found.tensors if not each.equality.of_bits}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("compare") / "llama", layers=1)


GPT_OSS = CONFIG | {"model_type": "gpt_oss"}
BOTH = "m.experts.gate_up_proj", "m.experts.down_proj"


def gpt_oss() -> dict[str, torch.Tensor]:
    """Return fused experts with axes (experts, in, out), the outputs of gate and up in turns."""
    biases = {f"{BOTH[0]}_bias": torch.zeros(3, 192), f"{BOTH[1]}_bias": torch.zeros(3, 64)}
    return {BOTH[0]: weight(3, 64, 192), BOTH[1]: weight(3, 96, 64, seed=1), **biases}


WHOLE = [n for n, codec in CODECS.items() if codec.container != "onnx" and not codec.model_format.prefix]
"""Layouts of whole models in tensors by name."""


@pytest.mark.parametrize("name", WHOLE)
def test_each_layout_equals_its_own_floats_and_differs_from_its_source_by_the_measured_error(
    name: str, llama: Path, tmp_path: Path
) -> None:
    codec = CODECS[name]
    first = next(iter(preset_layers(codec)))
    source = save(tmp_path / "experts", gpt_oss(), GPT_OSS) if codec.fused_experts else llama
    result = quantize(source, tmp_path / "q", first.name, codec=codec)
    floats = Selection(dequantize=DequantizePolicy.EVERY, floats="F32")
    run(make_plan(open_source(tmp_path / "q"), KEEP, selection=floats), tmp_path / "floats")
    found = compare(tmp_path / "q", tmp_path / "floats")
    assert (found.problems, unequal(found)) == ((), {})
    assert len(found.tensors) == len(open_source(source).entries)
    assert found.summary[1] == "all values are equal bit for bit"
    far = compare(source, tmp_path / "q")
    layers = [each for each in far.tensors if each.equality.unequal]
    assert {each.pair.held_by[1].partition(" (")[2].rstrip(")") for each in layers} == {
        layer.layout for layer in result.plan.layers
    }
    for each in layers:
        outcome = next(o for o in result.outcomes if o.weight.source.name == each.pair.name)
        # A run measures what is left when the value is rounded to the weight's dtype; here it stays float32.
        assert each.error.relative == pytest.approx(outcome.error.relative, rel=0.05)


def test_codes_of_others_equal_what_others_decode(llama: Path, tmp_path: Path) -> None:
    fp8 = to_fp8(llama, tmp_path / "fp8")
    theirs = dequantized_by_others(fp8, dtype=torch.float32)
    found = compare(fp8, save_like(tmp_path / "floats", fp8, theirs))
    assert (found.problems, unequal(found)) == ((), {})


def test_the_error_is_that_of_the_decoded_values(tmp_path: Path) -> None:
    a, b = weight(64, 96), weight(64, 96, seed=1)
    found = compared(tmp_path, {LINEAR: a}, {LINEAR: b})
    (each,) = [each for each in found.tensors if each.pair.name == LINEAR]
    off = b.double() - a.double()
    assert each.error.relative == pytest.approx(float(off.norm() / a.double().norm()), rel=1e-14)
    assert each.error.sqnr_db == pytest.approx(float(20 * torch.log10(a.double().norm() / off.norm())))
    assert each.error.largest == float(off.abs().max())
    # The tensor that both have alike is left out.
    assert found.error == each.error


def test_neither_threads_nor_memory_nor_tiles_change_a_digit(llama: Path, tmp_path: Path) -> None:
    for codec, to in (("gptq", "w4a16_asym"), ("gguf", "q4_k")):
        quantize(llama, tmp_path / codec, to, codec=CODECS[codec])
    found = [
        compare(tmp_path / "gptq", tmp_path / "gguf", limits=Limits(workers=workers, tile_values=values))
        for workers, values in ((1, 1 << 21), (2, 1), (3, 5000))
    ]
    whole = [(each.pair.name, each.equality, each.error) for each in found[0].tensors]
    for other in found[1:]:
        assert [(each.pair.name, each.equality, each.error) for each in other.tensors] == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_kept_tensors_are_equal_across_dtypes_where_their_values_are(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    x = torch.arange(-8, 8).view(4, 4).to(torch.bfloat16)
    found = compared(tmp_path, {"x": x, "n": torch.tensor(3)}, {"x": x.to(dtype), "n": torch.tensor([3])[0]})
    assert (found.problems, unequal(found), len(found.tensors)) == ((), {}, 3)
    assert found.tensors[1:] == tuple(found.tensors)[1:]
    y = x.to(dtype)
    y[2, 1] += 1
    assert unequal(compared(tmp_path / "y", {"x": x}, {"x": y})) == {"x": 1}


def test_a_float64_is_not_rounded_before_it_is_compared(tmp_path: Path) -> None:
    one = torch.ones(2, dtype=torch.float64)
    assert unequal(compared(tmp_path, {"x": one}, {"x": one + 2.0**-52})) == {"x": 2}


def test_zeros_of_another_sign_are_equal_values_but_not_bits(tmp_path: Path) -> None:
    found = compared(tmp_path, {"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([-0.0, 1.0])})
    assert not found.equality.of_bits
    assert found.equality.unequal == 0
    assert found.summary == (
        "2 tensors compared (6 values)",
        "all values are equal but for the sign of 1 zero",
    )


def test_empty_tensors_and_scalars_are_compared(tmp_path: Path) -> None:
    tensors = {"e": torch.empty(0, 3), "f": torch.empty(3, 0), "s": torch.tensor(2.0)}
    found = compared(tmp_path, tensors, {**tensors, "s": torch.tensor(2.5)})
    assert found.ok
    assert unequal(found) == {"s": 1}


@pytest.mark.parametrize(
    ("a", "b", "where", "what"),
    [
        ({"x": torch.ones(2)}, {}, "x", "only A has it"),
        ({}, {"y": torch.ones(2)}, "y", "only B has it"),
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(3, 2)}, "x",
         "F32 of shape [2, 3] in A, but F32 of shape [3, 2] in B"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2, dtype=torch.int64)}, "x",
         "F32 of shape [2] in A, but I64 of shape [2] in B, whose values are not compared"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, {"x": torch.ones(2, dtype=torch.complex64)}, "x",
         "C64 of shape [2] in A, but C64 of shape [2] in B, whose values are not compared"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_named(
    a: Tensors, b: Tensors, where: str, what: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, a, b)
    assert [(p.where, p.what) for p in found.problems] == [(where, what)]
    assert not found.ok
    assert found.summary[0] == "1 tensor compared (4 values), 1 problem"


def experts(*, fused: bool) -> dict[str, torch.Tensor]:
    """Return three experts, as two tensors or as nine."""
    gate_up, down = weight(3, 32, 8), weight(3, 8, 16, seed=1)
    if fused:
        return {"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}
    parts = {"gate_proj": gate_up[:, :16], "up_proj": gate_up[:, 16:], "down_proj": down}
    return {
        f"m.experts.{expert}.{name}.weight": part[expert].clone()
        for expert in range(3)
        for name, part in parts.items()
    }


@pytest.mark.parametrize("first", [True, False])
def test_fused_experts_are_compared_with_one_tensor_an_expert(first: bool, tmp_path: Path) -> None:
    b = experts(fused=not first)
    found = compared(tmp_path, experts(fused=first), b)
    assert (found.problems, unequal(found), len(found.tensors)) == ((), {}, 10)
    assert "m.experts.1.up_proj.weight" in {each.pair.name for each in found.tensors}
    next(iter(b.values())).view(-1)[-1] += 1  # of the last expert's up where they are fused
    name = "m.experts.0.gate_proj.weight" if first else "m.experts.2.up_proj.weight"
    assert unequal(compared(tmp_path / "c", experts(fused=first), b)) == {name: 1}


def test_transposed_experts_are_compared_as_their_family_has_them(tmp_path: Path) -> None:
    fused = gpt_oss()
    split = {f"m.experts.{e}.down_proj.weight": fused[BOTH[1]][e].t().contiguous() for e in range(3)}
    for at, part in enumerate(("gate_proj", "up_proj")):
        matrices = fused[BOTH[0]][:, :, at::2].transpose(1, 2)
        split |= {f"m.experts.{e}.{part}.weight": matrices[e].contiguous() for e in range(3)}
    a = save(tmp_path / "a", fused, GPT_OSS)
    b = save(tmp_path / "b", split | {name: fused[name] for name in fused.keys() - BOTH}, None)
    found = compare(a, b)
    assert (found.problems, unequal(found), len(found.tensors)) == ((), {}, 11)
    split["m.experts.2.up_proj.weight"][5, 7] += 1
    found = compare(a, save(tmp_path / "c", split, GPT_OSS))
    assert unequal(found) == {"m.experts.2.up_proj.weight": 1}
    alone = compare(a, a / "model.safetensors")
    assert (alone.problems, unequal(alone)) == ((), {})


@pytest.mark.parametrize("fused_first", [True, False])
def test_biases_of_experts_are_compared_with_one_tensor_an_expert(fused_first: bool, tmp_path: Path) -> None:
    fused = gpt_oss()
    fused |= {name: weight(*fused[name].shape, seed=3) for name in fused if name.endswith("_bias")}
    split = {name: fused[name] for name in BOTH}
    up, down = (fused[f"{name}_bias"] for name in BOTH)
    for e in range(3):
        split[f"m.experts.{e}.gate_proj.bias"] = up[e, 0::2].contiguous()
        split[f"m.experts.{e}.up_proj.bias"] = up[e, 1::2].contiguous()
        split[f"m.experts.{e}.down_proj.bias"] = down[e].contiguous()
    sides = [save(tmp_path / "a", fused, GPT_OSS), save(tmp_path / "b", split, GPT_OSS)]
    found = compare(*sides if fused_first else reversed(sides))
    assert (found.problems, unequal(found), len(found.tensors)) == ((), {}, 11)
    split["m.experts.2.up_proj.bias"][5] += 1
    del split["m.experts.0.down_proj.bias"]
    sides[1] = save(tmp_path / "c", split, GPT_OSS)
    found = compare(*sides if fused_first else reversed(sides))
    assert unequal(found) == {"m.experts.2.up_proj.bias": 1}
    only = f"only {'AB'[not fused_first]} has it"
    assert [str(p) for p in found.problems] == [f"'m.experts.0.down_proj.bias': {only}"]


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    split = experts(fused=False)
    del split["m.experts.1.up_proj.weight"]
    for at, (a, b) in enumerate([(experts(fused=True), split), (split, experts(fused=True))]):
        found = compared(tmp_path / str(at), a, b)
        assert [str(p) for p in found.problems] == [f"'m.experts.1.up_proj': only {'AB'[at]} has it"]
        assert len(found.tensors) == 9


def test_experts_in_another_order_of_axes_are_no_pairs(tmp_path: Path) -> None:
    fused = {"m.experts.gate_up_proj": weight(3, 8, 24), "m.experts.down_proj": weight(3, 16, 8)}
    found = compared(tmp_path, fused, experts(fused=False))
    assert {p.where for p in found.problems} == {*fused, *experts(fused=False)}


def test_scales_of_inputs_are_a_note(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "q", "fp8_block")
    path = tmp_path / "q" / "model.safetensors"
    tensors = tensors_of(tmp_path / "q") | {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "q" / "model.safetensors.index.json").unlink()
    found = compare(llama, tmp_path / "q")
    assert found.ok
    said = "only B has 1 scale of inputs, outputs or caches, such as 'model.layers.0.self_attn.k_scale'"
    assert said in found.notes


def test_a_head_that_is_its_embedding_is_a_note(tmp_path: Path) -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    embedding = {"model.embed_tokens.weight": weight(8, 4)}
    a = save(tmp_path / "a", {**embedding, "lm_head.weight": weight(8, 4)}, tied)
    found = compare(a, save(tmp_path / "b", embedding, tied))
    assert found.ok
    assert found.notes == ("only A has 'lm_head.weight', a copy of 'model.embed_tokens.weight'",)
    other = save(tmp_path / "c", {**embedding, "lm_head.weight": weight(8, 4, seed=1)}, tied)
    assert [p.where for p in compare(other, tmp_path / "b").problems] == ["lm_head.weight"]


def test_configurations_of_different_models_have_a_line_for_each_key(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {LINEAR: weight(4, 4)}, CONFIG | {"rope_theta": 1e4, "head_dim": 64})
    b = save(tmp_path / "b", {LINEAR: weight(4, 4)}, CONFIG | {"rope_theta": 5e5, "use_cache": True, "x": 1})
    assert compare(a, b).notes == (
        "config.json: 'rope_theta' is 10000.0 in A and 500000.0 in B",
        "config.json: only one side has 'head_dim', 'x'",
    )


def test_a_layer_that_is_damaged_is_named_and_the_rest_compared(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "q", "w4a16")
    tensors = tensors_of(tmp_path / "q")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "q" / "model.safetensors.index.json").unlink()
    found = compare(llama, tmp_path / "q")
    (problem,) = found.problems
    assert problem.where == "model.layers.0.mlp.up_proj"
    assert problem.what.startswith("it cannot be read in B: weight_scale is missing")
    assert len(found.tensors) == 9


def test_values_that_are_not_finite_are_infinitely_far(tmp_path: Path) -> None:
    found = compared(tmp_path, {"x": torch.ones(2)}, {"x": torch.tensor([1.0, math.nan])})
    assert found.error.sqnr_db == -math.inf
    assert unequal(found) == {"x": 1}


def test_one_checkpoint_twice_is_refused(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"A and B are one checkpoint, '.*llama'; pass two"):
        compare(llama, llama / ".." / "llama")


def test_two_models_are_refused(llama: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", {"encoder.weight": weight(4, 4)})
    with pytest.raises(
        CheckpointError, match=r"no tensor of .* can be compared, such as .*only A has it; pass"
    ):
        compare(llama, other)
    larger = {name: torch.cat([tensor, tensor]) for name, tensor in tensors_of(llama).items()}
    with pytest.raises(
        CheckpointError, match=r"of shape \[64, 128\] in A, but BF16 of shape \[128, 128\] in B"
    ):
        compare(llama, save(tmp_path / "larger", larger))


def test_a_layout_that_is_not_read_is_refused(llama: Path, tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "vptq"}}
    other = save(tmp_path / "vptq", {LINEAR: weight(4, 4)}, config)
    with pytest.raises(CheckpointError, match=r"is quantized by VPTQ .*, whose layout is not read here"):
        compare(llama, other)


def test_a_file_alone_is_compared_and_its_note_says_which_side(llama: Path) -> None:
    found = zp.compare_checkpoints(llama / "model.safetensors", llama)
    assert found.equality.of_bits
    assert [note[:3] for note in found.notes] == ["A: "]


def test_what_is_written_meanwhile_is_noticed(llama: Path, tmp_path: Path) -> None:
    a = save(tmp_path / "a", {LINEAR: weight(8, 8)})
    b = save(tmp_path / "b", {LINEAR: weight(8, 8)})

    def write(done: int, total: int, name: str) -> None:
        (b / "config.json").write_text(json.dumps(CONFIG | {"x": done}))

    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        compare(a, b, on_progress=write)
