"""Quantized checkpoints in another file layout: every value stays what it was, or the layer is refused."""

from pathlib import Path

import gguf
import pytest
import torch
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import CONFIG, ONE, digests, quantize, save, tensors_of, weight
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, conversion_plan
from zeropoint.checkpoint.plan.file import PlanFile, write_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.output_tensors import tile_shape
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run import units
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.fp8_block import Fp8Block
from zeropoint.codecs.protocol import Codec, LayerScheme
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.schemes import ZeroPoint
from zeropoint.tensor import QuantizedTensor

pytestmark = pytest.mark.rotating

LAYER = "model.layers.0"
SHAPES = {
    f"{LAYER}.self_attn.q_proj.weight": (256, 256),
    f"{LAYER}.self_attn.k_proj.weight": (128, 256),
    f"{LAYER}.self_attn.v_proj.weight": (128, 256),
    f"{LAYER}.mlp.up_proj.weight": (384, 256),
}
KEPT = "model.norm.weight"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four linear layers and a norm."""
    tensors = {
        name: weight(*shape, seed=n, dtype=torch.bfloat16) ** 3
        for n, (name, shape) in enumerate(SHAPES.items())
    }
    tensors[KEPT] = weight(256, dtype=torch.bfloat16)
    config = {**CONFIG, "torch_dtype": "bfloat16"}
    return save(tmp_path_factory.mktemp("floats") / "model", tensors, config)


def quantized(floats: Path, out: Path, to: str, layout: str) -> Path:
    quantize(floats, out, to, codec=get_codec(layout), limits=ONE)
    return out


def plan_of(source: Path, layout: str, to: str | None = None, **options: object) -> CheckpointPlan:
    limits = options.pop("limits", ONE)
    return conversion_plan(open_source(source), to, get_codec(layout), limits=limits, **options)


def decoded(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint as float32 values, by the reader of its own layout."""
    run(conversion_plan(open_source(folder), "float32", get_codec("compressed-tensors"), limits=ONE), out)
    return tensors_of(out)


PAIRS = [
    ("gptq", "int4:g128", "compressed-tensors"),
    ("gptq", "int4:g64:asym", "compressed-tensors"),
    ("gptq", "int8:g128", "compressed-tensors"),
    ("gptq", "int4:g128", "awq"),
    ("gptq", "int4:g128:asym", "awq"),
    ("gptq", "int4:g128", "gguf"),
    ("gptq", "int8:channel", "gguf"),
    ("awq", "int4:g128:asym", "compressed-tensors"),
    ("awq", "int4:g128:asym", "hqq"),
    ("gptq", "int8:g128", "hqq"),
    ("awq", "int4:g64:asym", "gptq"),
    ("compressed-tensors", "w4a16", "gptq"),
    ("compressed-tensors", "w4a16", "awq"),
    ("compressed-tensors", "w4a16", "gguf"),
    ("compressed-tensors", "int4:g32:asym", "gptq"),
    ("compressed-tensors", "mxfp4a16", "gguf"),
    ("compressed-tensors", "fp8_block", "fp8-block"),
    ("fp8-block", "fp8_block", "compressed-tensors"),
    ("gguf", "q8_0", "compressed-tensors"),
    ("gguf", "q8_0", "gptq"),
    ("gguf", "q4_0", "compressed-tensors"),
    ("gguf", "q4_0", "awq"),
    ("gguf", "q4_0", "mlx"),
    ("gguf", "q4_0", "hqq"),
    ("gguf", "q5_0", "torchao"),
    ("gguf", "mxfp4_e2m1", "compressed-tensors"),
    ("gptq", "int4:g64:scale=signed", "gguf"),
    ("gptq", "int4:g64:scale=signed", "mlx"),
    ("awq", "int4:g64:asym", "quark"),
    ("gptq", "int8:g64:asym", "quark"),
    ("quark", "uint4:g64:asym", "awq"),
    ("modelopt", "fp8_dynamic", "compressed-tensors"),
    ("modelopt", "mxfp8", "compressed-tensors"),
    ("bitsandbytes", "nf4", "bitsandbytes"),
    ("awq", "int4:g64:asym", "mlx"),
    ("gptq", "int4:g128", "mlx"),
    ("compressed-tensors", "mxfp4a16", "mlx"),
    ("mlx", "mxfp4_e2m1", "gguf"),
    ("mlx", "mlx_int4:g32", "mlx"),
]
"""A layout, a scheme, and another layout that holds its values."""


@pytest.mark.parametrize(("layout", "to", "other"), PAIRS)
def test_every_value_is_what_it_was_and_the_way_back_has_it_too(
    layout: str, to: str, other: str, floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", to, layout)
    before = digests(source)
    result = run(plan_of(source, other), tmp_path / "out")
    assert result.error.largest == 0
    assert "all of 4 converted layers decode to the values that they had" in result.summary
    assert digests(source) == before
    found, expected = decoded(tmp_path / "out", tmp_path / "b"), decoded(source, tmp_path / "a")
    assert found.keys() == expected.keys() == {*SHAPES, KEPT}
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    verified = zp.verify_checkpoint(tmp_path / "out", source)
    assert verified.ok
    assert {layer.error.largest for layer in verified.layers if layer.error is not None} == {0.0}


def test_mxfp4_becomes_nvfp4_with_one_tensor_scale_for_layers_that_engines_run_as_one(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "mxfp4a16", "compressed-tensors")
    run(plan_of(source, "compressed-tensors", "nvfp4a16"), tmp_path / "out")
    found, expected = decoded(tmp_path / "out", tmp_path / "b"), decoded(source, tmp_path / "a")
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    stored = tensors_of(tmp_path / "out")
    scales = [stored[f"{LAYER}.self_attn.{x}_proj.weight_global_scale"] for x in "qkv"]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [
        ("compressed-tensors", "weight_scale"),
        ("gptq", "scales"),
        ("quark", "weight_scale"),
        ("torchao", "_weight_scale"),
    ],
)
def test_negative_scales_of_q4_0_stay_in_layouts_that_have_them(
    layout: str, suffix: str, floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "q4_0", "gguf")
    plan = plan_of(source, layout)
    assert all(placed.layer.weight.zero_point is ZeroPoint.NONE for placed in plan.weights)
    run(plan, tmp_path / "out")
    stored = tensors_of(tmp_path / "out")
    assert bool((stored[f"{LAYER}.mlp.up_proj.{suffix}"] < 0).any())
    zeros = [tensor for name, tensor in stored.items() if name.endswith("zero_point")]
    assert not any(bool(tensor.any()) for tensor in zeros)  # Quark and torchao store zeros
    found, expected = decoded(tmp_path / "out", tmp_path / "b"), decoded(source, tmp_path / "a")
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_a_negative_scale_of_codes_without_a_mirror_is_named(floats: Path, tmp_path: Path) -> None:
    source = quantized(floats, tmp_path / "source", "int8:g64:scale=signed", "gptq")
    with pytest.raises(UnsupportedError, match=r"of block .* is negative, unlike the scales of int8:g32"):
        run(plan_of(source, "gguf"), tmp_path / "out")


def test_rows_of_heads_lie_as_llama_cpp_has_them_and_the_way_back_undoes_it(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "model", "llama")
    source = quantized(
        tmp_path / "model", tmp_path / "source", "int4:g32:scale=float16", "compressed-tensors"
    )
    assert run(plan_of(source, "gguf"), tmp_path / "gguf").error.largest == 0
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    run(plan_of(tmp_path / "gguf", "compressed-tensors"), tmp_path / "back")
    found, expected = decoded(tmp_path / "back", tmp_path / "b"), decoded(source, tmp_path / "a")
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    query, there = expected["model.layers.0.self_attn.q_proj.weight"], stored["blk.0.attn_q.weight"]
    reordered = query.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(there.data, there.tensor_type)), reordered)


CUT = [
    ("gptq", "int4:g64:asym", "compressed-tensors", None),
    ("compressed-tensors", "w4a16", "gptq", None),
    ("compressed-tensors", "int4:g32:asym", "awq", "int4:g32:asym"),
    ("compressed-tensors", "int8:channel", "gptq", "int8:g32"),
    ("fp8-block", "fp8_block", "compressed-tensors", None),
    ("compressed-tensors", "fp8_block", "fp8-block", None),
    ("awq", "int4:g64:asym", "gptq", None),
    ("gguf", "q4_0", "awq", None),
    ("compressed-tensors", "mxfp4a16", "compressed-tensors", "nvfp4a16"),
    ("gguf", "q4_0", "compressed-tensors", None),
]
"""Conversions that cut weights in several ways: rows, columns, blocks of rows, words of zero points."""


@pytest.mark.parametrize(("layout", "to", "other", "scheme"), CUT)
def test_neither_threads_nor_memory_change_a_byte(
    layout: str, to: str, other: str, scheme: str | None, floats: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = quantized(floats, tmp_path / "source", to, layout)
    run(plan_of(source, other, scheme), tmp_path / "a")
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 1024)
    monkeypatch.setattr(units, "UNIT_BYTES", 512)
    small = plan_of(source, other, scheme, limits=Limits(workers=3, tile_values=256))
    assert any(tile_shape(weight, small.limits)[0] < weight.shape[0] for weight in small.weights)
    run(small, tmp_path / "b")
    a, b = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert {n: d for n, d in a.items() if "manifest" not in n} == {
        n: d for n, d in b.items() if "manifest" not in n
    }


ANEW = [
    ("bitsandbytes", "nf4", "compressed-tensors", "w8a16"),
    ("awq", "int4:g64:asym", "gguf", "q4_1"),
    ("compressed-tensors", "int4:g32:scale=float32", "gguf", "q4_0"),
    ("compressed-tensors", "int8:channel", "gptq", "int4:g32"),
    ("compressed-tensors", "mxfp4a16", "compressed-tensors", "nvfp4a16"),
    ("modelopt", "nvfp4a16", "compressed-tensors", "nvfp4a16"),
    ("modelopt", "fp8_dynamic", "compressed-tensors", "float8_e4m3fn:tensor"),
]
"""Conversions that change values, each block of them by itself."""


@pytest.mark.parametrize(("layout", "to", "other", "scheme"), ANEW)
def test_what_is_quantized_anew_does_not_depend_on_tiles(
    layout: str, to: str, other: str, scheme: str, floats: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = quantized(floats, tmp_path / "source", to, layout)
    run(plan_of(source, other, scheme, requantize=True), tmp_path / "a")
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 1024)
    run(
        plan_of(source, other, scheme, requantize=True, limits=Limits(workers=3, tile_values=256)),
        tmp_path / "b",
    )
    a, b = tensors_bytes(tmp_path / "a"), tensors_bytes(tmp_path / "b")
    assert a == b


def tensors_bytes(folder: Path) -> dict[str, str]:
    return {name: found for name, found in digests(folder).items() if "manifest" not in name}


@pytest.mark.parametrize("layout", ["gptq", "gguf"])
def test_what_a_codec_writes_wrong_is_read_back_and_refused(
    layout: str, floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method gives the right codes, and the file would hold others: one bit of one code."""
    source = quantized(floats, tmp_path / "source", "int4:g32:scale=float16", "compressed-tensors")
    kind = type(get_codec(layout))
    encode = kind.encode

    def wrong(self: Codec, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        lines = encode(self, layer, q)
        codes = next(iter(lines.values())).clone()
        codes.view(torch.uint8).view(-1)[-1] ^= 1
        return {**lines, next(iter(lines)): codes}

    monkeypatch.setattr(kind, "encode", wrong)
    with pytest.raises(UnsupportedError, match=r"_proj\.weight.* does not hold its values: 1 of \d+ values"):
        run(plan_of(source, layout), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_stopped_anywhere_resumes_to_the_same_bytes(floats: Path, tmp_path: Path) -> None:
    source = quantized(floats, tmp_path / "source", "int4:g64:asym", "awq")
    result = run(plan_of(source, "compressed-tensors"), tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    assert result.units > 4
    for count in range(1, result.units):
        out = tmp_path / f"out{count}"
        stop_after(plan_of(source, "compressed-tensors"), out, count)
        run(plan_of(source, "compressed-tensors"), out)
        assert digests(out) == expected


def test_a_plan_in_a_file_is_made_again(floats: Path, tmp_path: Path) -> None:
    source = quantized(floats, tmp_path / "source", "int4:g128:asym", "awq")
    plan = plan_of(source, "compressed-tensors")
    write_plan(plan, tmp_path / "plan.json")
    again = PlanFile.read(tmp_path / "plan.json").remake(open_source(source), limits=ONE)
    run(plan, tmp_path / "a")
    run(again, tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_layer_without_an_equal_is_refused_by_name_before_anything_is_read(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "nf4", "bitsandbytes")
    with pytest.raises(UnsupportedError) as caught:
        plan_of(source, "gptq")
    assert str(caught.value).startswith(
        f"4 layers cannot be converted to gptq, such as '{LAYER}.mlp.up_proj.weight' "
        "(nf4:g64:dialect=bitsandbytes): scheme "
    )
    assert str(caught.value).endswith("; pass to=SCHEME, and allow_requantize=True where values change")


def test_what_schemes_and_shapes_forbid_is_refused_in_the_plan(floats: Path, tmp_path: Path) -> None:
    source = quantized(floats, tmp_path / "source", "int4:g32", "gptq")
    with pytest.raises(UnsupportedError, match=r"int4:g64.* has one scale where it has several: blocks of g"):
        plan_of(source, "compressed-tensors", "int4:g64")
    with pytest.raises(UnsupportedError, match=r"the parameters of float4_e2m1fn.* do not follow"):
        plan_of(source, "compressed-tensors", "nvfp4a16")
    assert plan_of(source, "compressed-tensors", "int4:g64", requantize=True).weights


def test_numbers_that_do_not_fit_are_refused_with_the_tensor_and_nothing_is_left(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "nvfp4a16", "modelopt")
    with pytest.raises(UnsupportedError, match=r"_proj\.weight.* does not hold the values of .* differ"):
        run(plan_of(source, "compressed-tensors"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_quantized_anew_where_that_is_allowed_and_its_error_is_reported(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "nvfp4a16", "modelopt")
    result = run(plan_of(source, "compressed-tensors", requantize=True), tmp_path / "a")
    # Codes and scales of blocks are kept; the reciprocal of the tensor's scale is rounded.
    assert 0 < result.error.relative < 1e-6
    assert "none of 4 converted layers decodes to the values that it had" in result.summary
    other = quantized(floats, tmp_path / "nf4", "nf4", "bitsandbytes")
    result = run(plan_of(other, "compressed-tensors", "w8a16", requantize=True), tmp_path / "b")
    assert 1e-4 < result.error.relative < 0.02


def test_codes_that_another_layout_cannot_keep_are_named_with_the_command_that_decodes_them(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "int4:g32:scale=float16", "compressed-tensors")
    both = "zeropoint quantize with dequantize_first=True and dequantize_kept=True writes them as floats"
    with pytest.raises(CheckpointError, match=both):
        plan_of(source, "gptq", ignore=("*up_proj",))
    options = {"format": "gptq", "ignore": "*up_proj", "dequantize_first": True, "dequantize_kept": True}
    zp.quantize_checkpoint(source, tmp_path / "out", "int4:g32", **options)
    assert f"{LAYER}.mlp.up_proj.weight" in tensors_of(tmp_path / "out")


def test_floats_are_no_codes(floats: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no codes to convert; use zeropoint quantize"):
        plan_of(floats, "gptq")


def test_inputs_that_a_layout_has_not_are_named_and_its_own_preset_brings_others(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "mxfp8", "compressed-tensors")
    with pytest.raises(UnsupportedError, match="does not go with weights in MXFP8; use float8_e4m3fn:g32:"):
        plan_of(source, "modelopt")
    assert run(plan_of(source, "modelopt", "mxfp8"), tmp_path / "out").error.largest == 0


def test_inputs_that_do_not_come_in_whole_groups_stay_floats_and_codes_stay_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{LAYER}.mlp.{name}_proj.weight": weight(*shape) for name, shape in
               (("up", (200, 256)), ("down", (256, 200)))}  # fmt: skip
    floats = save(tmp_path / "floats", tensors)
    with monkeypatch.context() as patch:  # what others write
        patch.setattr(Fp8Block, "refusal", Codec.refusal)
        source = quantized(floats, tmp_path / "source", "float8_e4m3fn:block128x128", "fp8-block")
    plan = plan_of(source, "compressed-tensors")
    assert {w.module.rpartition(".")[2]: w.layer.input is not None for w in plan.weights} == {
        "up_proj": True, "down_proj": False,
    }  # fmt: skip
    reason = "last axis 200 is not a multiple of the group of inputs, 128"
    assert [d.entry.name for d in plan.decisions if reason in d.reason] == [f"{LAYER}.mlp.down_proj.weight"]
    assert run(plan, tmp_path / "out").error.largest == 0


def test_layers_that_are_ignored_keep_their_codes_where_the_configuration_can_say_so(
    floats: Path, tmp_path: Path
) -> None:
    source = quantized(floats, tmp_path / "source", "mxfp4a16", "compressed-tensors")
    plan = plan_of(source, "compressed-tensors", "nvfp4a16", ignore=("*.mlp.*",))
    run(plan, tmp_path / "out")
    stored, old = tensors_of(tmp_path / "out"), tensors_of(source)
    kept = f"{LAYER}.mlp.up_proj.weight_packed"
    assert torch.equal(stored[kept], old[kept])
    assert f"{LAYER}.self_attn.q_proj.weight_global_scale" in stored
    with pytest.raises(CheckpointError, match="would keep their compressed-tensors codes"):
        plan_of(source, "gguf", ignore=("*.mlp.*",))


def test_the_verb_is_one_line(floats: Path, tmp_path: Path) -> None:
    source = quantized(floats, tmp_path / "source", "int4:g128", "gptq")
    printed = repr(zp.convert_checkpoint(source, tmp_path / "out", "compressed-tensors"))
    assert "all of 4 converted layers decode to the values that they had" in printed
    result = zp.convert_checkpoint(source, tmp_path / "floats", to="bfloat16")
    assert len(result.plan.restored) == 4
    with pytest.raises(CheckpointError, match="1 layers would keep their gptq codes"):
        zp.convert_checkpoint(source, tmp_path / "some", "compressed-tensors", ignore="*.mlp.*")
