"""A pipeline of diffusers in one call: parts are quantized, the autoencoder and other files are copied."""

import json
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import save, weight
from tests.cli.conftest import Call
from tests.oracles import tiny_models

import zeropoint as zp

INDEX = {
    "_class_name": "FluxPipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "LlamaForCausalLM"], "tokenizer": ["transformers", "LlamaTokenizer"],
    "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
    "safety_checker": [None, None],
}  # fmt: skip
BLOCK, OUTER = "transformer_blocks.0.attn.to_q.weight", "proj_out.weight"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "pipe"
    (folder / "scheduler").mkdir(parents=True)
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    part = {BLOCK: weight(64, 128), OUTER: weight(64, 128)}
    save(folder / "transformer", part, {"_class_name": "FluxTransformer2DModel"})
    kept = {"decoder.mid_block.attentions.0.to_q.weight": weight(64, 128)}
    save(folder / "vae", kept, {"_class_name": "AutoencoderKL"})
    tiny_models.llama().to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parts_are_quantized_and_all_else_is_copied(pipeline: Path, tmp_path: Path) -> None:
    before, out = contents(pipeline), tmp_path / "out"
    found = zp.quantize_pipeline(pipeline, out, "int8wo", format="torchao")
    assert sorted(found) == ["text_encoder", "transformer"]
    assert contents(pipeline) == before
    after = contents(out)
    same = [name for name in before if name.partition("/")[0] not in found]
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert [weight.module for weight in found["transformer"].plan.weights] == [BLOCK.removesuffix(".weight")]
    for part in found:
        assert zp.verify_checkpoint(out / part, pipeline / part).ok
    zp.quantize_pipeline(pipeline, out, "int8wo", format="torchao")
    assert contents(out) == after


def test_an_output_without_its_index_is_completed_and_strange_files_stay(
    pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "vae").mkdir(parents=True)
    (out / "vae" / "config.json").write_text("mine")
    with pytest.raises(zp.CheckpointError, match=r"config\.json' exists and is another file; move it away"):
        zp.quantize_pipeline(pipeline, out, "int8wo", format="torchao")
    assert not (out / "model_index.json").exists()
    zp.quantize_pipeline(pipeline, out, "int8wo", format="torchao", overwrite=True)
    assert (out / "model_index.json").read_bytes() == (pipeline / "model_index.json").read_bytes()


def test_what_is_no_pipeline_or_no_place_for_one_is_refused(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(zp.CheckpointError, match="lies in the pipeline; name a folder outside"):
        zp.quantize_pipeline(pipeline, pipeline / "out", "int8wo")
    with pytest.raises(zp.CheckpointError, match="is no pipeline of diffusers"):
        zp.quantize_pipeline(tmp_path, tmp_path / "out", "int8wo")
    with pytest.raises(zp.OptionError, match="is of one checkpoint; pass a part of the pipeline"):
        zp.quantize_pipeline(pipeline, tmp_path / "out", plan="plan.json")
    (pipeline / "model_index.json").write_text("[1]")
    with pytest.raises(zp.CheckpointError, match=r"is no index of a pipeline.*download it again"):
        zp.quantize_pipeline(pipeline, tmp_path / "out", "int8wo")


def test_the_command_writes_a_pipeline(call: Call, pipeline: Path, tmp_path: Path) -> None:
    found = call("quantize", pipeline, tmp_path / "out", "--to", "int8wo", "--format", "torchao", "--json")
    runs = json.loads(found.out)["runs"]
    assert [Path(run["output"]).name for run in runs] == ["text_encoder", "transformer"]
    assert (tmp_path / "out" / "model_index.json").is_file()


def test_the_table_says_which_parts_diffusers_does_not_load(
    call: Call, pipeline: Path, tmp_path: Path
) -> None:
    said = [
        call("quantize", pipeline, tmp_path / to, "--to", to, "--format", layout).out
        for to, layout in (("w8a16", "compressed-tensors"), ("int8wo", "torchao"))
    ]
    assert "transformer: note: diffusers: does not load it, since " in said[0]
    assert "does not load it" not in said[1]
