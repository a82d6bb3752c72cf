"""vLLM itself, on a CPU: its logits are those of the weights that zeropoint decodes.

Rows of benchmarks/vllm_runs.py, which runs vLLM in processes of their own. benchmarks/engines.sh makes the
environment.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="made by benchmarks/engines.sh .engines-vllm"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_runs.py"
RUN = {
    "qwen3 compressed-tensors w4a16_asym": 2.0,
    "qwen3 compressed-tensors mixed": None,  # inputs of w8a8 are rounded, too
    "qwen3 gptq w4a16": 2.0,
    "qwen3 compressed-tensors w4a16 with the head": 2.0,
    "qwen3_moe compressed-tensors experts apart": 2.0,
    "qwen3 bitsandbytes nf4": 2.0,
    "qwen3 gguf q4_k_m": 2.0,
}
"""Rows that run: the largest `rms` over `rounding`, where weights alone are quantized."""
LOADED = "qwen3 compressed-tensors nvfp4a16"
"""One for which vLLM has no kernel."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, str(SCRIPT), str(folder / "figures.json"), "--work", str(folder / "work")]
    subprocess.run([*command, "--exact", "--only", *RUN, LOADED], check=True, timeout=1500)
    return {row["key"]: row for row in json.loads((folder / "figures.json").read_text())["rows"]}


@pytest.mark.parametrize("key", RUN)
def test_logits_are_those_of_the_decoded_weights(figures: dict[str, dict[str, Any]], key: str) -> None:
    row, times = figures[key], RUN[key]
    assert "refused" not in row
    assert row["rms"] < (0.05 * row["spread"] if times is None else times * row["rounding"])


def test_what_has_no_kernel_is_loaded_bit_for_bit(figures: dict[str, dict[str, Any]]) -> None:
    row = figures[LOADED]
    assert "not supported" in row["refused"]
    weights = row["weights"]
    assert (weights["equal"], weights["differ"], weights["unfilled"]) == (weights["tensors"], {}, [])
    assert weights["tensors"] > 40
