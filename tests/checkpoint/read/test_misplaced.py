"""A path that is no checkpoint is refused with what it most likely is, and what to pass instead."""

import json
from pathlib import Path

import pytest
from tests.checkpoint.interrupted import plan_of, stop_after
from tests.checkpoint.written import refused
from tests.cli.checkpoints import write_llama


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused("meta-llama/Llama-3.1-8B")
    assert said.endswith("hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B")
    assert refused(tmp_path / "absent").endswith("hf download ORG/NAME --local-dir DIR")


def test_a_configuration_is_answered_with_its_directory(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    for name in ("config.json", "tokenizer.json"):
        said = f"'{model / name}' is not a file of weights; pass the directory that holds it, '{model}'"
        assert refused(model / name) == said


def test_a_directory_of_gguf_files_is_not_sent_to_unpickling(tmp_path: Path) -> None:
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        said = refused(tmp_path)
        assert ("holds several GGUF files" if "Q8" in name else "it is truncated") in said
        assert "pickle" not in said


def test_a_diffusers_pipeline_is_answered_with_its_parts(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (tmp_path / "scheduler").mkdir()
    write_llama(tmp_path / "transformer")
    said = refused(tmp_path)
    assert "is a diffusers pipeline, whose parts are checkpoints of their own" in said
    assert said.endswith(", such as 'transformer', or the pipeline to zeropoint quantize")


def test_an_output_that_is_not_finished_is_called_so(tmp_path: Path) -> None:
    stop_after(plan_of(write_llama(tmp_path / "model")), tmp_path / "out", 3)
    said = refused(tmp_path / "out")
    assert "is the output of a zeropoint run that has not finished; run the same command again" in said


def test_a_directory_above_a_checkpoint_is_answered_with_its_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    assert refused(tmp_path).endswith("or one .safetensors, .gguf or .onnx file, such as 'model'")
