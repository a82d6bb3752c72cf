"""Quantizing what is quantized already: as if others had dequantized it first, byte for byte."""

import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.quantized_inputs import BLOCKS, dequantized_by_others, fp8_layer, save_like, to_fp8
from tests.checkpoint.written import (
    CONFIG,
    ONE,
    digests,
    digests_of_outputs,
    quantize,
    save,
    tensors_of,
    weight,
)
from tests.oracles import synthetic_llama
from tests.peers import Peer
from tests.tensors import same_bytes

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.recipe import KEEP, RecipeText
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.executor import Job, Results, local
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.checkpoint.run.units import Units
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, NonFiniteError

pytestmark = pytest.mark.rotating

compressors = Peer("compressed_tensors.compressors")
converters = Peer("compressed_tensors.entrypoints.convert")

FIRST, EVERY = Selection(dequantize=DequantizePolicy.FIRST), Selection(dequantize=DequantizePolicy.EVERY)
UP, DOWN, Q = (
    f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
)


def requantize(
    source: Path, out: Path, to: str | RecipeText, selection: Selection = FIRST, limits: Limits = ONE
) -> RunResult:
    return run(make_plan(open_source(source), to, selection=selection, limits=limits), out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in three shards, which part q_proj from v_proj."""
    return synthetic_llama.write(tmp_path_factory.mktemp("llama") / "in")


@pytest.fixture(scope="module")
def fp8(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with random fp8 blocks in its layers."""
    return to_fp8(llama, tmp_path_factory.mktemp("fp8") / "in")


@pytest.mark.parametrize("to", ["w4a16", "mxfp4", "nvfp4a16", "fp8_dynamic", "int4:g32:asym"])
def test_fp8_blocks_come_out_as_if_others_had_dequantized_them_first(
    to: str, fp8: Path, tmp_path: Path
) -> None:
    floats = save_like(tmp_path / "floats", fp8, dequantized_by_others(fp8))
    quantize(floats, tmp_path / "expected", to)
    requantize(fp8, tmp_path / "out", to)
    assert digests_of_outputs(tmp_path / "out") == digests_of_outputs(tmp_path / "expected")


@pytest.mark.parametrize("first", ["w8a8", "int4:g32:asym", "nvfp4a16", "mxfp8"])
def test_compressed_tensors_come_out_as_if_others_had_dequantized_them_first(
    first: str, llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "first", first)
    floats = save_like(tmp_path / "floats", tmp_path / "first", dequantized_by_others(tmp_path / "first"))
    quantize(floats, tmp_path / "expected", "w4a16")
    requantize(tmp_path / "first", tmp_path / "out", "w4a16")
    found, expected = (digests_of_outputs(tmp_path / name) for name in ("out", "expected"))
    # They differ in space alone, since one text was written by json.
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "expected")]
    assert configs[0] == configs[1]
    assert found | {"config.json": ""} == expected | {"config.json": ""}


@pytest.mark.parametrize("limits", [Limits(workers=1, tile_values=1), Limits(workers=3, tile_values=3000)])
def test_tiles_and_threads_change_no_byte(limits: Limits, fp8: Path, tmp_path: Path) -> None:
    for to, selection in (("nvfp4a16", FIRST), (KEEP, EVERY)):
        name = "floats" if to is KEEP else "codes"
        requantize(fp8, tmp_path / f"{name}-one", to, selection)
        requantize(fp8, tmp_path / f"{name}-other", to, selection, limits)
        assert digests(tmp_path / f"{name}-one") == digests(tmp_path / f"{name}-other")


def test_fused_experts_in_fp8_are_split_after_they_are_decoded(tmp_path: Path) -> None:
    # 192 rows of gate and of up: the blocks of 128 rows lie across the border between the two.
    names = [f"model.layers.0.mlp.experts.{kind}_proj" for kind in ("gate_up", "down")]
    tensors = fp8_layer(names[0], (3, 384, 128)) | fp8_layer(names[1], (3, 128, 192), seed=1)
    source = save(tmp_path / "in", tensors, CONFIG | {"quantization_config": BLOCKS})
    floats = {
        name: (
            tensors[name].float()
            * tensors[f"{name}_scale_inv"]
            .repeat_interleave(128, 1)
            .repeat_interleave(128, 2)[:, : tensors[name].shape[1], : tensors[name].shape[2]]
        ).bfloat16()
        for name in names
    }
    quantize(save(tmp_path / "floats", floats), tmp_path / "expected", "mxfp4")
    requantize(source, tmp_path / "out", "mxfp4")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "expected").keys()
    expected = tensors_of(tmp_path / "expected")
    assert all(same_bytes(tensor, expected[name]) for name, tensor in tensors_of(tmp_path / "out").items())
    requantize(source, tmp_path / "restored", KEEP, EVERY)
    restored = tensors_of(tmp_path / "restored")
    assert restored.keys() == floats.keys()
    assert all(same_bytes(restored[name], values) for name, values in floats.items())


def test_layers_that_are_not_selected_keep_their_codes_and_are_described_as_before(
    llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "first", "w8a8")
    ignored = Selection(dequantize=DequantizePolicy.FIRST, ignore=("*.self_attn.*",))
    requantize(tmp_path / "first", tmp_path / "out", "w4a16", ignored)
    before, after = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "out")
    kept = {name for name in before if "self_attn" in name or "proj" not in name}
    assert {name for name in after if "mlp" not in name} == kept
    assert all(same_bytes(after[name], before[name]) for name in kept)
    judge = converters.CompressedTensorsDequantizer(tmp_path / "out")
    expected = dequantized_by_others(tmp_path / "first")
    found = judge.process(dict(after))
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], values) for name, values in expected.items() if "mlp" not in name)
    old, new = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("first", "out")
    )
    groups = {name: {**group, "targets": None} for name, group in new["config_groups"].items()}
    assert groups["W8A8"] == {**old["config_groups"]["W8A8"], "targets": None}
    assert groups.keys() == {"W8A8", "W4A16"}
    assert new["ignore"] == old["ignore"]
    assert new["format"] == "mixed-precision"


def test_transformers_loads_old_codes_next_to_new_ones(llama: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    quantize(llama, tmp_path / "first", "w8a8")
    ignored = Selection(dequantize=DequantizePolicy.FIRST, ignore=("*.self_attn.*",))
    requantize(tmp_path / "first", tmp_path / "out", "w4a16", ignored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
        )
    assert not any(info.values())
    schemes = set()
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            schemes.add(str(module.quantization_scheme.format))
            compressors.decompress_module(module)
    assert len(schemes) == 2
    expected = dequantized_by_others(tmp_path / "out")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert all(same_bytes(weights[name].bfloat16(), values) for name, values in expected.items())


def test_what_an_older_configuration_says_of_the_cache_and_of_absent_modules_stays(tmp_path: Path) -> None:
    first = save(tmp_path / "in", {UP: weight(64, 128), Q: weight(64, 128), "model.norm.weight": weight(8)})
    quantize(first, tmp_path / "first", "w8a16")
    path = tmp_path / "first" / "config.json"
    config = json.loads(path.read_text())
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] |= {"kv_cache_scheme": cache, "ignore": ["re:.*vision.*", "re:.*up_proj$x"]}
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(tensors | extra, tmp_path / "first" / "model.safetensors")
    (tmp_path / "first" / "model.safetensors.index.json").unlink()
    requantize(tmp_path / "first", tmp_path / "out", "w4a16")
    merged = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert merged["kv_cache_scheme"] == cache
    assert set(merged["ignore"]) == {"lm_head", "re:.*vision.*", "re:.*up_proj$x"}
    assert "model.layers.0.self_attn.k_scale" in tensors_of(tmp_path / "out")


def test_fp8_layers_that_would_stay_are_refused_or_written_as_floats(fp8: Path, tmp_path: Path) -> None:
    selection = Selection(dequantize=DequantizePolicy.FIRST, ignore=("*.self_attn.*",))
    rule = "8 layers would keep their fp8 codes, such as .*; pass dequantize_kept=True to write them as"
    with pytest.raises(CheckpointError, match=rule):
        requantize(fp8, tmp_path / "out", "mxfp4", selection)
    every = Selection(dequantize=DequantizePolicy.EVERY, ignore=("*.self_attn.*",))
    requantize(fp8, tmp_path / "out", "mxfp4", every)
    found, expected = tensors_of(tmp_path / "out"), dequantized_by_others(fp8)
    floats = {name for name in expected if "mlp" not in name}
    assert {name for name in found if "mlp" not in name} == floats
    assert all(same_bytes(found[name], expected[name]) for name in floats)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_recipe_that_keeps_everything_writes_the_floats_that_others_find(
    dtype: torch.dtype, fp8: Path, tmp_path: Path
) -> None:
    floats = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    requantize(fp8, tmp_path / "out", KEEP, Selection(dequantize=DequantizePolicy.EVERY, floats=floats))
    found, expected = tensors_of(tmp_path / "out"), dequantized_by_others(fp8, dtype=dtype)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], values) for name, values in expected.items())
    text = (fp8 / "config.json").read_text()
    end = text.index(',\n  "quantization_config"')
    assert (tmp_path / "out" / "config.json").read_text() == text[:end] + "\n}"


def test_a_checkpoint_without_a_configuration_of_the_model_is_dequantized_too(tmp_path: Path) -> None:
    quantize(save(tmp_path / "in", {UP: weight(64, 128)}, None), tmp_path / "first", "w8a16")
    assert (tmp_path / "first" / "quantization_config.json").exists()
    requantize(tmp_path / "first", tmp_path / "out", KEEP, EVERY)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "model.safetensors.index.json", MANIFEST,
    }  # fmt: skip
    assert tensors_of(tmp_path / "out")[UP].dtype == torch.bfloat16


def test_scales_of_quantized_inputs_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    extra = {UP.replace("weight", "input_scale"): torch.ones(1)}
    config = CONFIG | {"quantization_config": BLOCKS}
    source = save(tmp_path / "in", fp8_layer(UP, (128, 128)) | extra, config)
    result = requantize(source, tmp_path / "out", "mxfp4")
    assert not any(name.endswith("input_scale") for name in tensors_of(tmp_path / "out"))
    assert any(note.startswith("1 scales of quantized inputs are left out") for note in result.plan.notes)


@pytest.mark.parametrize("to", ["mxfp4", KEEP])
def test_codes_that_represent_nan_are_named(to: str | RecipeText, tmp_path: Path) -> None:
    tensors = fp8_layer(UP, (128, 128))
    tensors[UP].view(torch.uint8)[5, 7] = 0x7F
    source = save(tmp_path / "in", tensors, CONFIG | {"quantization_config": BLOCKS})
    with pytest.raises(
        NonFiniteError, match=f"tensor '{UP}' .*non-finite values?, first at row 5, column 7 .nan.;"
    ):
        requantize(source, tmp_path / "out", to, EVERY)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(("to", "selection"), [("w4a16", FIRST), ("nvfp4a16", FIRST)])
def test_verify_compares_with_what_the_codes_of_the_source_represent(
    to: str, selection: Selection, fp8: Path, tmp_path: Path
) -> None:
    requantize(fp8, tmp_path / "out", to, selection)
    verification = verify(tmp_path / "out", fp8, limits=ONE)
    assert verification.ok, verification.problems
    assert len(verification.layers) == 14
    assert all(proof.of_bound is not None and 0 < proof.of_bound <= 1 for proof in verification.layers)


def test_verify_takes_codes_that_stayed_and_floats_for_what_they_are(
    llama: Path, fp8: Path, tmp_path: Path
) -> None:
    ignore = ("*.self_attn.*",)
    quantize(llama, tmp_path / "first", "w8a8")
    some = Selection(dequantize=DequantizePolicy.FIRST, ignore=ignore)
    requantize(tmp_path / "first", tmp_path / "out", "w8a16", some)
    staying = verify(tmp_path / "out", tmp_path / "first", limits=ONE)
    assert staying.ok, staying.problems
    kept = {p.layer.module for p in staying.layers if p.of_bound == 0}
    assert kept == {p.layer.module for p in staying.layers if "self_attn" in p.layer.module}
    requantize(fp8, tmp_path / "mixed", "mxfp4", Selection(dequantize=DequantizePolicy.EVERY, ignore=ignore))
    requantize(fp8, tmp_path / "floats", KEEP, Selection(dequantize=DequantizePolicy.EVERY, floats="F16"))
    for name, layers in (("mixed", 6), ("floats", 0)):
        verification = verify(tmp_path / name, fp8, limits=ONE)
        assert verification.ok, verification.problems
        assert len(verification.layers) == layers


@pytest.mark.parametrize("floats", [False, True])
def test_verify_finds_a_bit_that_flipped_in_what_was_dequantized_or_stayed(
    floats: bool, llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "first", "w8a8")
    some = Selection(
        dequantize=DequantizePolicy.EVERY if floats else DequantizePolicy.FIRST, ignore=("*.self_attn.*",)
    )
    requantize(tmp_path / "first", tmp_path / "out", "w4a16", some)
    path = next(p for p in sorted((tmp_path / "out").glob("*.safetensors")) if Q in load_file(p))
    tensors = load_file(path)
    tensors[Q].view(torch.int16 if floats else torch.int8)[3, 4] ^= 64
    save_file(tensors, path)
    (tmp_path / "out" / MANIFEST).unlink()
    problems = [str(problem) for problem in verify(tmp_path / "out", tmp_path / "first", limits=ONE).problems]
    assert len(problems) == 1
    what = (
        "differs from the dequantized original from row 0 on" if floats else "rows from 0 on are off by up to"
    )
    assert what in problems[0]
    assert Q.removesuffix(".weight") in problems[0]


@pytest.mark.parametrize(("to", "selection"), [("nvfp4a16", FIRST), (KEEP, EVERY)])
def test_a_run_that_was_ended_after_any_unit_resumes_with_the_same_bytes(
    to: str | RecipeText, selection: Selection, fp8: Path, tmp_path: Path
) -> None:
    plan = make_plan(open_source(fp8), to, selection=selection, limits=ONE)
    run(plan, tmp_path / "whole")
    units = len(Units(plan))
    resumed = []
    for count in range(1, units, 7):

        def ends(job: Job, count: int = count) -> Results:
            yield from itertools.islice(local(job), count)
            raise KeyboardInterrupt

        out = tmp_path / str(count)
        with pytest.raises(KeyboardInterrupt):
            run(plan, out, executor=ends)
        resumed.append(run(plan, out).resumed)
        assert digests(out) == digests(tmp_path / "whole")
    assert resumed[0] < resumed[-1] < units


def test_a_run_is_not_resumed_with_floats_of_another_dtype(fp8: Path, tmp_path: Path) -> None:
    def ends(job: Job) -> Results:
        yield from itertools.islice(local(job), 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            make_plan(open_source(fp8), "mxfp4", selection=FIRST, limits=ONE), tmp_path / "out", executor=ends
        )
    other = Selection(dequantize=DequantizePolicy.FIRST, floats="F32")
    with pytest.raises(CheckpointError, match="differs in 'dequantize': it has 'first', now 'first F32'"):
        requantize(fp8, tmp_path / "out", "mxfp4", other)


def test_a_plain_checkpoint_has_nothing_to_dequantize(llama: Path) -> None:
    with pytest.raises(
        CheckpointError, match="in' holds no codes to dequantize; pass a quantized checkpoint"
    ):
        make_plan(open_source(llama), KEEP, selection=EVERY, limits=ONE)
