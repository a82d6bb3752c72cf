"""The files are those of llm-compressor 0.14, tensor by tensor; the hashes were made by tests/oracles."""

import json
from pathlib import Path

import pytest
from tests.checkpoint.written import quantize
from tests.oracles import llmcompressor_golden

from zeropoint.checkpoint.verify.verification import verify

pytestmark = pytest.mark.rotating

GOLDEN = json.loads(llmcompressor_golden.GOLDEN.read_text())["cases"]


@pytest.mark.parametrize(("preset", "dtype", "moe"), llmcompressor_golden.CASES)
def test_every_tensor_is_that_of_llm_compressor(
    preset: str, dtype: str, moe: bool, sources: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    source = sources[dtype, moe]
    quantize(source, tmp_path / "out", preset.lower())
    golden = GOLDEN[llmcompressor_golden.case_name(preset, dtype, moe)]
    assert llmcompressor_golden.tensors_of(tmp_path / "out") == golden["tensors"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == golden["total_size"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"] == golden["quantization_config"]["config_groups"]
    assert config["format"] == golden["quantization_config"]["format"]


@pytest.mark.parametrize(("preset", "dtype", "moe"), llmcompressor_golden.CASES)
def test_what_was_written_is_proven_against_the_source(
    preset: str, dtype: str, moe: bool, sources: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    source = sources[dtype, moe]
    result = quantize(source, tmp_path / "out", preset.lower())
    verification = verify(tmp_path / "out", source)
    assert verification.problems == ()
    assert verification.error == result.error
    assert len(verification.layers) == len(result.outcomes)
