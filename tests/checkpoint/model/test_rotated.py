"""Checkpoints that are rotated and quantized by one command: equal to two, resumed, verified, loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.model.test_solved_weights import Stopping, ids, stopping
from tests.checkpoint.run.test_rotate import BAD, TINY, apart, changed, logits, write
from tests.checkpoint.written import ONE, digests, tensors_of
from tests.peers import transformers as tf

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.plan.rotated import ROTATED
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify

pytestmark = pytest.mark.rotating

__all__ = ["stopping"]

BIASED, TIED, EXPERTS = "llama with biases", "qwen2 with a tied head", "mixtral"
METHOD = "rotate64@7"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of bfloat16 with biases, with a tied head and with experts."""
    found = {}
    for name in (BIASED, TIED, EXPERTS):
        found[name] = tmp_path_factory.mktemp("model")
        config: Any = TINY[name]()
        config.hidden_size, config.head_dim, config.intermediate_size = 128, 32, 128
        write(found[name], config, torch.bfloat16)
    return found


@pytest.fixture(scope="module")
def tied(models: dict[str, Path]) -> Path:
    return models[TIED]


def tokens() -> torch.Tensor:
    return ids() % 160


def quantize(source: Path, out: Path, method: str, to: str = "int4:g32", **options: Any) -> zp.RunResult:
    return zp.quantize_checkpoint(source, out, to, method=method, force=True, **options)


def plan_of(source: Path, method: str, limits: Limits = ONE) -> CheckpointPlan:
    return make_plan(open_source(source), RecipeText.of("int4:g32").by(method), limits=limits)


def weights_in(folder: Path) -> dict[str, str]:
    found = digests(folder)
    return {name: digest for name, digest in found.items() if name.endswith((".safetensors", ".gguf"))}


DATA: dict[str, Any] = {"calibration": tokens()}
GGUF: dict[str, Any] = {"format": "gguf"}
CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (TIED, "int4:g32", "nearest", {"include": "lm_head"}),
    (BIASED, "int4:g32", "mse", {}),
    (EXPERTS, "int4:g32", "mse", {}),
    (TIED, "int4:g32", "gptq", DATA),
    (BIASED, "int4:g32", "awq+shift+gptq", DATA),
    (TIED, "nvfp4", "mse_weighted", DATA),
    (BIASED, "w8a8_static", "smooth+gptq", DATA),
    (BIASED, "w4a16", "mse", {"format": "gptq"}),
    (BIASED, "q8_0", "nearest", GGUF),
    (TIED, "q4_1", "ggml", GGUF),
    (EXPERTS, "q8_0", "nearest", GGUF),
    (BIASED, "q4_0", "ggml", GGUF | DATA),
    (TIED, "q8_0", "awq+gptq", GGUF | DATA),
    (BIASED, "mostly_q4_1", "ggml", GGUF),
)


@pytest.mark.parametrize(("name", "to", "method", "options"), CASES)
def test_the_weights_are_those_of_two_commands(
    models: dict[str, Path], tmp_path: Path, name: str, to: str, method: str, options: dict[str, Any]
) -> None:
    source = models[name]
    given = {"ignore": "*gate" if name == EXPERTS else (), **options}
    zp.rotate_checkpoint(source, tmp_path / "rotated", seed=7, block=64)
    quantize(tmp_path / "rotated", tmp_path / "two", method, to, **given)
    quantize(source, tmp_path / "one", f"{METHOD}+{method}", to, **given)
    assert weights_in(tmp_path / "one") == weights_in(tmp_path / "two") != {}
    proven = zp.verify_checkpoint(tmp_path / "one", source)
    assert proven.ok, proven
    assert proven.error is not None
    assert proven.error.relative < 0.2


def test_shards_and_a_copy_of_a_tied_head_stay_where_they_are(tied: Path, tmp_path: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(tied)
    model.save_pretrained(tmp_path / "in", max_shard_size="150KB")
    shards = sorted((tmp_path / "in").glob("*.safetensors"))
    last = load_file(shards[-1])
    save_file({**last, "lm_head.weight": torch.ones(160, 128).bfloat16()}, shards[-1], {"format": "pt"})
    index = json.loads((tmp_path / "in/model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = shards[-1].name
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "rotated")
    quantize(tmp_path / "rotated", tmp_path / "two", "mse")
    quantize(tmp_path / "in", tmp_path / "one", "rotate+mse")
    assert weights_in(tmp_path / "one") == weights_in(tmp_path / "two")
    assert len(weights_in(tmp_path / "one")) == len(shards) > 1
    assert zp.verify_checkpoint(tmp_path / "one", tmp_path / "in").ok


def test_transformers_loads_the_result_with_a_head_of_its_own(tied: Path, tmp_path: Path) -> None:
    result = quantize(tied, tmp_path / "out", "rotate+mse", "int8:g32")
    assert sum("lm_head was tied to the embedding and is written apart" in note for note in result.notes) == 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert apart(logits(tied), logits(tmp_path / "out")) < 0.05
    old, new = tensors_of(tied), tensors_of(tmp_path / "out")
    assert apart(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"]) > 0.1
    assert all(bool((t == 1).all()) for name, t in new.items() if name.endswith("norm.weight"))


def test_the_plan_and_the_report_say_it(tied: Path, tmp_path: Path) -> None:
    plan = zp.plan_checkpoint(tied, "int4:g32", method="rotate64@7+mse")
    document = plan.to_dict()
    assert document["rotation"] == "rotate64@7"
    assert ROTATED in document["files"]
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["model.embed_tokens.weight"]["reason"] == "an embedding, rotated"
    assert tensors["model.norm.weight"]["reason"] == "1-D, not a matrix, folded into what reads it"
    assert tensors["model.layers.0.mlp.up_proj.weight"]["method"] == "rotate64@7+mse"
    assert "rotated in 2 blocks of 64" in document["notes"][0]
    zp.plan_checkpoint(tied, "int4:g32", method="rotate64@7+mse", out=tmp_path / "plan.json")
    by_plan = zp.quantize_checkpoint(tied, tmp_path / "out", plan=tmp_path / "plan.json", force=True)
    assert by_plan.to_dict()["rotation"] == "rotate64@7"
    manifest = json.loads((tmp_path / "out/zeropoint_manifest.json").read_text())
    assert {record["method"] for record in manifest["weights"].values()} == {"rotate64@7+mse"}
    assert json.loads((tmp_path / "out" / ROTATED).read_text())["rotation"] == "rotate64@7"


def test_one_rule_with_the_step_rotates_the_whole_model(tied: Path, tmp_path: Path) -> None:
    recipe = "default: int4:g32\nmethod: mse\nrules:\n- {name: '*.down_proj', weight: 'int8:g32', method: %s}"
    result = zp.quantize_checkpoint(tied, tmp_path / "one", recipe=recipe % "rotate+nearest", force=True)
    said = "rotate rotates the whole model, so that weights under mse are rotated, too"
    assert said in result.notes
    zp.rotate_checkpoint(tied, tmp_path / "rotated")
    zp.quantize_checkpoint(tmp_path / "rotated", tmp_path / "two", recipe=recipe % "nearest", force=True)
    assert weights_in(tmp_path / "one") == weights_in(tmp_path / "two")
    assert zp.verify_checkpoint(tmp_path / "one", tied).ok


def test_two_rotations_of_one_model_are_refused(tied: Path, tmp_path: Path) -> None:
    recipe = "default: int4:g32\nmethod: rotate+mse\nrules:\n- {name: '*.down_proj', weight: 'int8:g32', %s}"
    with pytest.raises(zp.RecipeError, match=r"rotate@1\+mse and rotate\+mse rotate the model in two ways"):
        zp.quantize_checkpoint(tied, tmp_path / "out", recipe=recipe % "method: rotate@1+mse", force=True)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize(
    "limits", [ONE, Limits(workers=2, tile_values=300), Limits(workers=3, tile_values=1 << 20)]
)
def test_a_run_without_data_resumes_to_the_same_bytes_however_it_goes(
    tied: Path, tmp_path: Path, limits: Limits
) -> None:
    run(plan_of(tied, "rotate32+mse"), tmp_path / "golden")
    plan = plan_of(tied, "rotate32+mse", limits)
    for count in (2, 7):
        stop_after(plan, tmp_path / "out", count)
    run(plan, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "golden")
    assert verify(tmp_path / "out", tied, limits=limits).ok


def test_a_solved_run_that_is_interrupted_resumes_to_the_same_bytes(
    tied: Path, tmp_path: Path, stopping: Stopping
) -> None:
    quantize(tied, tmp_path / "whole", "rotate+awq+shift+gptq", **DATA)
    with stopping(9):
        quantize(tied, tmp_path / "out", "rotate+awq+shift+gptq", **DATA)
    with pytest.raises(zp.CheckpointError, match="differs in 'recipe'"):
        quantize(tied, tmp_path / "out", "rotate@1+awq+shift+gptq", **DATA)
    quantize(tied, tmp_path / "out", "rotate+awq+shift+gptq", **DATA)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.1.self_attn.v_proj.bias", "model.layers.0.mlp.down_proj.weight_packed",
    ],
)  # fmt: skip
def test_a_changed_byte_is_found_by_the_original_alone(tied: Path, tmp_path: Path, name: str) -> None:
    quantize(tied, tmp_path / "out", "rotate+nearest")
    file = tmp_path / "out/model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[8 + length + begin + 1] ^= 0x44
    file.write_bytes(data)
    (tmp_path / "out/zeropoint_manifest.json").unlink()
    problems = zp.verify_checkpoint(tmp_path / "out", tied).problems
    assert [problem.where for problem in problems] == [name.removesuffix(".weight_packed")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "does not say how the model is rotated"),
        ('{"zeropoint_rotated": 1, "rotation": "spun"}', "its rotation 'spun' is unknown"),
        ('{"zeropoint_rotated": 1, "rotation": "rotate3"}', r"size \(=3\) of a rotation must be a power"),
        ("{", "is damaged"),
    ],
)
def test_a_file_that_is_damaged_is_refused(tied: Path, tmp_path: Path, text: str, says: str) -> None:
    quantize(tied, tmp_path / "out", "rotate+nearest")
    (tmp_path / "out" / ROTATED).write_text(text)
    with pytest.raises(zp.CheckpointError, match=says):
        zp.verify_checkpoint(tmp_path / "out", tied)


def test_without_the_file_the_result_is_another_model(tied: Path, tmp_path: Path) -> None:
    quantize(tied, tmp_path / "out", "rotate+nearest")
    (tmp_path / "out" / ROTATED).unlink()
    problems = {problem.where for problem in zp.verify_checkpoint(tmp_path / "out", tied).problems}
    assert {ROTATED, "config.json", "lm_head.weight", "model.norm.weight"} <= problems


def test_what_is_rotated_already_is_not_rotated_again(tied: Path, tmp_path: Path) -> None:
    quantize(tied, tmp_path / "out", "rotate+nearest", "int8:g32")
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats")
    with pytest.raises(zp.CheckpointError, match=r"is rotated already, as its zeropoint_rotated\.json says"):
        quantize(tmp_path / "floats", tmp_path / "again", "rotate+mse")
    with pytest.raises(zp.CheckpointError, match="is rotated already"):
        zp.rotate_checkpoint(tmp_path / "floats", tmp_path / "again")
    quantize(tmp_path / "floats", tmp_path / "again", "mse")
    assert zp.verify_checkpoint(tmp_path / "again", tmp_path / "floats").ok


@pytest.mark.parametrize("what", BAD)
def test_a_checkpoint_is_refused_as_by_the_command(what: str, tmp_path: Path) -> None:
    change, message = BAD[what]
    write(tmp_path / "in", TINY["llama"]())
    with pytest.raises(zp.ZeropointError, match=re.escape(message)):
        quantize(changed(tmp_path / "in", change), tmp_path / "out", "rotate+mse", "int4:g16")
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a block that does not divide": ({"method": "rotate256+mse"}, r"block \(=256\) must be a power of two"),
    "codes": (
        {"method": "rotate+mse", "dequantize_first": True, "quantized": True}, "a rotation takes floats",
    ),
    "a step alone": ({"method": "rotate"}, r"write rotate\+mse"),
    "a block that is none": ({"method": "rotate3+mse"}, r"step 'rotate3': size \(=3\)"),
    "a seed that is none": ({"method": f"rotate@{1 << 64}+mse"}, r"below 2 \*\* 64"),
    "another order": (
        {"method": "awq+rotate+mse"}, r"what later steps and the codes see.*write rotate\+awq\+mse",
    ),
    "two of them": ({"method": "rotate+rotate@1+mse"}, "do the same; leave one out"),
    "one of them twice": ({"method": "rotate+rotate+mse"}, "stands there twice"),
    "an end of converted codes": ({"method": "rotate+lossless"}, "rounds by 'lossless'"),
    "an end of models": ({"method": "rotate+hadamard"}, "rounds by 'hadamard'"),
    "a budget": (
        {"method": "rotate+mse", "to": None, "budget": "5bpw"}, "rotates the model, and a search tries",
    ),
    "importance": (
        {"method": "rotate+mse_weighted", "imatrix": "none.dat"}, "imatrix= is about inputs of the model",
    ),
    "no data": ({"method": "rotate+gptq"}, "needs the gram of its inputs"),
    "data that nothing takes": ({"method": "rotate+mse", **DATA}, "no method of this plan takes calibration"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused(tied: Path, tmp_path: Path, what: str) -> None:
    options, says = REFUSED[what]
    source = tied
    if options.get("quantized"):
        source = tmp_path / "source"
        quantize(tied, source, "nearest")
    given = {"force": True, "to": "int4:g32", **{k: v for k, v in options.items() if k != "quantized"}}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(zp.ZeropointError, match=says):
        zp.quantize_checkpoint(source, tmp_path / "out", **given)
    assert sorted(tmp_path.iterdir()) == before


def test_statistics_of_the_model_as_it_is_are_refused(tied: Path, tmp_path: Path) -> None:
    zp.gather_statistics(tied, tmp_path / "s.safetensors", tokens(), gram=True)
    for method in ("rotate+gptq", "rotate+mse_weighted"):
        with pytest.raises(zp.CalibrationError, match="statistics= is about inputs of the model as it is"):
            quantize(tied, tmp_path / "out", method, statistics=tmp_path / "s.safetensors")


def test_memory_that_is_too_little_for_a_block_of_rows_is_refused(tied: Path) -> None:
    with pytest.raises(zp.CheckpointError, match="is too little for 128 rows of 128 columns"):
        plan_of(tied, "rotate+nearest", Limits(workers=1, max_memory=BASE_MEMORY + 20_000))


def in_memory(method: str) -> dict[str, Callable[[], object]]:
    model, data = torch.nn.Sequential(torch.nn.Linear(64, 64)), [torch.randn(4, 64) for _ in range(2)]
    rule = zp.recipes.Rule(gives=zp.recipes.Assignment.of(weight="int4:g32", method=method))
    return {
        "quantize": lambda: zp.quantize(torch.randn(4, 64), "int4:g32", method=method),
        "quantize_model": lambda: zp.quantize_model(model, "int4:g32", method=method),
        "with batches": lambda: zp.quantize_model(model, "int4:g32", method=method, calibration=data),
        "calibrate": lambda: zp.calibrate(model, zp.recipes.Recipe(default=rule), data),
    }


@pytest.mark.parametrize("method", ["rotate+mse", "rotate+gptq", "rotate+awq+mse_weighted"])
@pytest.mark.parametrize("door", ["quantize", "quantize_model", "with batches", "calibrate"])
def test_tensors_and_models_in_memory_are_refused(method: str, door: str) -> None:
    with pytest.raises(zp.ZeropointError, match=r"rotates a model as a whole.*zp\.rotate_checkpoint"):
        in_memory(method)[door]()
