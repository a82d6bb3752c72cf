from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import CONFIG, LINEAR, quantize, save, weight
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.read.problems import Problem
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import Verification, verify
from zeropoint.errors import CheckpointError

MODULE = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(
        tmp_path / "in", {LINEAR: weight(64, 128), "lm_head.weight": weight(8, 128), "a.bias": weight(9)}
    )


def damaged(source: Path, out: Path, to: str, change: Callable[[Tensors], None]) -> Verification:
    """Quantize, change the tensors that were written, and verify, as if another tool had written them."""
    quantize(source, out, to)
    path = out / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    for name in ("model.safetensors.index.json", "zeropoint_manifest.json"):
        (out / name).unlink()
    return verify(out, source)


@pytest.mark.parametrize(
    "to", ["w4a16", "w4a16_asym", "w8a8", "fp8_block", "mxfp4", "mxfp8", "nvfp4a16", "int3:g64"]
)
def test_an_untouched_checkpoint_has_no_problems(to: str, source: Path, tmp_path: Path) -> None:
    result = quantize(source, tmp_path / "out", to)
    verification = verify(tmp_path / "out", source)
    assert verification.ok
    assert verification.error == result.error
    assert verification.kept == 2
    (proof,) = verification.layers
    assert proof.of_bound is not None
    assert 0 < proof.of_bound <= 1
    verification.require()


def test_tiny_groups_of_float16_are_within_the_bound_of_their_zero_points(tmp_path: Path) -> None:
    """Their scales are float16 numbers of few bits: rounded down, they cut off more than half a step."""
    noise = torch.rand(256, 1024, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tiny = noise * torch.linspace(1.4e-6, 2.0e-6, 256)[:, None]
    source = save(tmp_path / "in", {LINEAR: tiny.half()})
    quantize(source, tmp_path / "out", "w4a16_asym")
    verification = verify(tmp_path / "out", source)
    assert verification.ok
    (proof,) = verification.layers
    assert proof.of_bound is not None
    assert 0.5 < proof.of_bound <= 1


def test_without_an_original_everything_is_decoded_and_nothing_compared(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "nvfp4a16")
    verification = verify(tmp_path / "out")
    assert verification.ok
    assert verification.error is None
    assert verification.values == 64 * 128


def _flip_code(t: Tensors) -> None:
    t[f"{MODULE}.weight_packed"][63, 3] ^= 0x4


def _scale(value: float) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        t[f"{MODULE}.weight_scale"][7, 0] = value

    return change


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        del t[name]

    return change


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        t[name] = tensor

    return change


@pytest.mark.parametrize(
    ("to", "change", "rule"),
    [
        ("w4a16", _flip_code, "times the proven bound"),
        ("w4a16", _scale(0.0), "must be finite and not 0"),
        ("w4a16", _scale(-1.0), "times the proven bound"),
        ("w4a16", _scale(float("nan")), "must be finite and not 0"),
        ("w4a16", _scale(float("inf")), "must be finite and not 0"),
        ("w4a16", _scale(3.0e38), "non-finite|times the proven bound"),
        ("nvfp4a16", _scale(float("nan")), "must be finite and positive"),
        ("nvfp4a16", _scale(-2.0), "a scale is negative"),
        ("mxfp4", lambda t: t[f"{MODULE}.weight_scale"].fill_(255), "must be finite and positive"),
        ("nvfp4a16", lambda t: t[f"{MODULE}.weight_global_scale"].fill_(0), "must be finite and positive"),
        ("w4a16", _drop(f"{MODULE}.weight_scale"), "weight_scale is missing"),
        ("w4a16", _drop(f"{MODULE}.weight_shape"), "weight_shape is missing"),
        ("w4a16", _drop(f"{MODULE}.weight_packed"), "weight_packed is missing"),
        ("w4a16", _put(f"{MODULE}.weight_scale", torch.ones(63, 1)), "but must be F32 of shape"),
        ("w4a16", _put(f"{MODULE}.weight_shape", torch.tensor([64, 127])), "weight_shape says"),
        ("w4a16", _put(f"{MODULE}.weight_zero_point", torch.ones(2)), "has no place in pack-quantized"),
        ("w4a16", _put("a.bias", torch.ones(9)), "'a.bias': its bytes are not those of the original"),
        ("w4a16", _put("a.bias", torch.ones(8)), "but the original has F32 of shape"),
        ("w4a16", _put("b.bias", torch.ones(8)), "'b.bias': the original has no such tensor"),
        ("w4a16", _drop("a.bias"), "'a.bias': it is missing"),
        ("w4a16", _put("c.weight", torch.ones(8, 8)), "'c': neither quantized nor ignored"),
        ("w4a16", _put("lm_head.weight_scale", torch.ones(8, 1)), "'lm_head': it is quantized, but the"),
    ],
)  # fmt: skip
def test_damage_is_found(
    to: str, change: Callable[[Tensors], None], rule: str, source: Path, tmp_path: Path
) -> None:
    verification = damaged(source, tmp_path / "out", to, change)
    assert not verification.ok
    with pytest.raises(CheckpointError, match=rule):
        verification.require()


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    tensors = {f"m.{n}.weight": weight(8, 32, seed=n) for n in range(4)}
    source = save(tmp_path / "in", tensors)

    def change(t: Tensors) -> None:
        t["m.1.weight_scale"][3] = float("nan")
        t["m.2.weight_packed"].fill_(0)
        del t["m.3.weight_scale"]

    verification = damaged(source, tmp_path / "out", "int8:channel", change)
    assert {problem.where for problem in verification.problems} == {"m.1", "m.2", "m.3"}


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = {"m.experts.gate_up_proj": weight(3, 24, 32), "m.experts.down_proj": weight(3, 32, 12)}
    source = save(tmp_path / "in", tensors)

    def change(t: Tensors) -> None:
        for name in [name for name in t if name.startswith("m.experts.1.up_proj")]:
            del t[name]

    verification = damaged(source, tmp_path / "out", "int8:channel", change)
    assert verification.problems == (Problem(where="m.experts.1.up_proj", what="this expert is missing"),)


def test_an_index_that_contradicts_the_single_file_is_a_problem(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "w4a16")
    path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["a.bias"] = "other.safetensors"
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    problems = verify(tmp_path / "out").problems
    assert any(p.where == "a.bias" and "does not say where it is" in p.what for p in problems)
    assert any(p.where == path.name and "total_size" in p.what for p in problems)
    path.write_text("[]")
    assert any(
        p.where == path.name and "is not an index" in p.what for p in verify(tmp_path / "out").problems
    )


def test_another_original_is_recognized(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "w4a16")
    tensors = {LINEAR: weight(64, 128, seed=1), "lm_head.weight": weight(8, 128), "a.bias": weight(9)}
    other = save(tmp_path / "other", tensors)
    assert any("times the proven bound" in p.what for p in verify(tmp_path / "out", other).problems)


def test_a_model_that_is_not_quantized_cannot_be_verified(source: Path) -> None:
    with pytest.raises(
        CheckpointError, match="is not quantized: its configuration has no quantization_config"
    ):
        verify(source)


def test_tiles_and_threads_do_not_change_the_proof(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    quantize(source, tmp_path / "out", "w4a16_asym")
    runs = [
        verify(tmp_path / "out", source, limits=Limits(workers=w, tile_values=v))
        for w, v in ((1, 1 << 20), (4, 9000))
    ]
    assert [p.error for p in runs[0].layers] == [p.error for p in runs[1].layers]
    assert [p.of_bound for p in runs[0].layers] == [p.of_bound for p in runs[1].layers]


def test_inspect_summarizes_a_model_that_is_not_quantized(tmp_path: Path) -> None:
    found = inspect_checkpoint(synthetic_llama.write(tmp_path))
    assert found.quantization is None
    assert found.schemes == ()
    assert found.bits_per_value == 16
    (dtype,) = found.dtypes
    assert (dtype.dtype, dtype.tensors, dtype.nbytes) == ("BF16", len(found.tensors), found.nbytes)


def test_inspect_names_schemes_and_counts_bits(tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    result = quantize(source, tmp_path / "out", "nvfp4a16")
    found = inspect_checkpoint(tmp_path / "out")
    (scheme,) = found.schemes
    assert found.quantization == "compressed-tensors"
    assert scheme.layout == "nvfp4-pack-quantized"
    assert scheme.layers == 14
    assert scheme.bits_per_value == result.plan.bits_per_value
    assert found.values == inspect_checkpoint(source).values
    assert set(found.ignore) == {"model.embed_tokens", "lm_head"}
    assert found.problems == ()


def test_inspect_names_the_method_that_chose_the_codes(tmp_path: Path) -> None:
    kinds = ("up", "gate", "down")
    weights = {f"model.layers.0.mlp.{kind}_proj.weight": weight(128, 128) for kind in kinds}
    rules = "rules:\n  - {name: '*.down_proj', weight: int8:g128, method: nearest}\n"
    recipe = RecipeText(text=f"default: w8a16\nmethod: mse\n{rules}", name="recipe")
    run(make_plan(open_source(save(tmp_path / "in", weights, CONFIG)), recipe), tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    assert {(summary.method, summary.layers) for summary in found.schemes} == {("mse", 2), ("nearest", 1)}
    assert len({summary.scheme for summary in found.schemes}) == 1
    (tmp_path / "out" / MANIFEST).unlink()
    assert {summary.method for summary in inspect_checkpoint(tmp_path / "out").schemes} == {None}


def test_inspect_says_that_a_manifest_is_damaged(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "w8a16")
    manifest = tmp_path / "out" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"weights"', '"weigths"'))
    found = inspect_checkpoint(tmp_path / "out")
    assert [summary.method for summary in found.schemes] == [None]
    assert [text.partition(":")[0] for text in found.problems] == [repr(MANIFEST)]


def test_inspect_names_a_method_that_it_cannot_read(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "vptq", "bits": 4}}
    found = inspect_checkpoint(save(tmp_path, {"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}, config))
    assert found.quantization == "vptq"
    assert (found.packed_by, found.bits) == ("VPTQ (quant_method is 'vptq')", 4)
    assert found.schemes == ()
    assert any("quant_method is 'vptq'" in text for text in found.problems)


def test_words_of_codes_that_are_not_read_are_not_counted_as_numbers(tmp_path: Path) -> None:
    packed = {"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    config = CONFIG | {"quantization_config": {"quant_method": "spqr"}}
    said = inspect_checkpoint(save(tmp_path / "said", packed, config))
    assert (said.values, said.bits_per_value, said.bits) == (None, None, None)
    mixed = save(tmp_path / "mixed", packed, CONFIG)
    (mixed / "quantize_config.json").write_text('{"bits": 4}')
    assert inspect_checkpoint(mixed).packed_by == "GPTQ (AutoGPTQ) (quantize_config.json)"
    assert inspect_checkpoint(mixed).values is None
    odd = CONFIG | {"quantization_config": {"quant_method": "spqr", "bits": "4; rm"}}
    assert inspect_checkpoint(save(tmp_path / "odd", packed, odd)).bits is None
    plain = inspect_checkpoint(save(tmp_path / "plain", packed, CONFIG))
    assert plain.values is None
    assert plain.summary[1].startswith("quantized, but no configuration says how")
