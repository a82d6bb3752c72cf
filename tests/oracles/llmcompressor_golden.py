"""Hash what llm-compressor writes for the synthetic Llama, and store the hashes: run by hand, not by tests.

    python tests/oracles/llmcompressor_golden.py [--venv FOLDER]

llm-compressor pins its dependencies, so it lives in a virtual environment of its own, which is created when
``--venv`` does not exist. The result is tests/golden/llmcompressor.json: for each case the versions, the
quantization_config, and the dtype, shape and SHA-256 of every tensor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve()
GOLDEN = HERE.parents[1] / "golden" / "llmcompressor.json"
REQUIREMENTS = ("llmcompressor==0.14.0",)
PRESETS = (
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "MXFP4A16",
    "MXFP8", "MXFP8A16", "NVFP4A16",
)  # fmt: skip
IGNORE = ("lm_head", "re:.*embed_tokens$", "re:.*mlp.gate$")
CASES = (
    *((preset, "bfloat16", False) for preset in PRESETS),
    *((preset, dtype, False) for dtype in ("float32", "float16") for preset in PRESETS[:6]),
    *(
        (preset, dtype, False)
        for dtype in ("float32", "float16")
        for preset in ("MXFP4A16", "MXFP8A16", "NVFP4A16")
    ),
    *((preset, "bfloat16", True) for preset in ("W4A16", "FP8_BLOCK", "MXFP4", "NVFP4A16")),
)


def case_name(preset: str, dtype: str, moe: bool) -> str:
    """Return the key of a case in the golden file."""
    return f"{preset} {dtype}{' moe' if moe else ''}"


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and SHA-256 of the bytes of a tensor, in one line."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = "x".join(str(length) for length in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {hashlib.sha256(data).hexdigest()}"


def tensors_of(folder: Path) -> dict[str, str]:
    """Return the digest of every tensor in the safetensors files of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update({name: digest(tensor) for name, tensor in load_file(path).items()})
    return dict(sorted(found.items()))


def collect() -> dict[str, object]:
    """Run llm-compressor on every case; this part needs its environment."""
    import compressed_tensors
    import llmcompressor

    sys.path.insert(0, str(HERE.parent))
    import synthetic_llama

    cases = {}
    for preset, dtype, moe in CASES:
        with tempfile.TemporaryDirectory() as folder:
            source = synthetic_llama.write(Path(folder) / "source", dtype=getattr(torch, dtype), moe=moe)
            out = Path(folder) / "out"
            llmcompressor.model_free_ptq(
                str(source), str(out), scheme=preset, ignore=list(IGNORE), device="cpu"
            )
            config = json.loads((out / "config.json").read_text())["quantization_config"]
            index = json.loads((out / "model.safetensors.index.json").read_text())
            cases[case_name(preset, dtype, moe)] = {
                "quantization_config": config,
                "total_size": index["metadata"]["total_size"],
                "tensors": tensors_of(out),
            }
    versions = {
        "llmcompressor": llmcompressor.__version__,
        "compressed_tensors": compressed_tensors.__version__,
    }
    return {"versions": {**versions, "torch": torch.__version__}, "cases": cases}


def main() -> None:
    """Create the environment where needed, and write the golden file from inside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=HERE.parents[2] / ".oracle-venv")
    parser.add_argument("--inside", action="store_true", help="this is the oracle's environment")
    options = parser.parse_args()
    if options.inside:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(collect(), indent=1, sort_keys=True) + "\n")
        return
    python = options.venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", options.venv], check=True)
        subprocess.run([python, "-m", "pip", "install", *REQUIREMENTS], check=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([python, HERE, "--inside"], check=True, env=environment)


if __name__ == "__main__":
    main()
