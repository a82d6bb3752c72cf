"""Store what fouroversix makes of a few tensors: run by hand, not by tests, where the package is installed.

    python tests/oracles/fouroversix_golden.py

The package is a source distribution whose extension needs CUDA; its PyTorch backend does not:

    SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix==1.0.5

The result is tests/golden/fouroversix.json: for each case the input, the codes, the scales of blocks and the
largest magnitude, as text of hexadecimal digits.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import version
from pathlib import Path

import torch

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fouroversix.json"
SHAPE = (16, 64)
RULES = {"nvfp4": "static_6", "nvfp4:scale=four_over_six": "mse"}


def inputs() -> dict[str, torch.Tensor]:
    """Return tensors by name: ordinary, of heavy tails, of a grid with ties, of mostly zeros, of few bits."""
    stream = torch.Generator().manual_seed(46)
    normal = torch.randn(SHAPE, generator=stream)
    uniform = torch.rand(SHAPE, generator=stream)
    whole = torch.randint(-12, 13, SHAPE, generator=stream)
    return {
        "normal": normal,
        "bfloat16": (normal * 0.02).bfloat16(),
        "heavy": normal / uniform.clamp(min=1e-2),
        "grid": whole / 2,
        "sparse": torch.where(uniform < 0.1, normal, 0.0),
        "zeros": torch.zeros(SHAPE),
    }


def theirs(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes (rows, columns / 2), scales (rows, columns / 16), both uint8, and amax of the package."""
    reference = importlib.import_module("fouroversix.quantize.pytorch.reference")
    names = importlib.import_module("fouroversix.utils")
    codes, scales, amax = reference.quantize_to_fp4(
        x, fp4_format=names.DataType.nvfp4, scale_rule=names.ScaleRule(rule), use_blackwell_scale_layout=False
    )
    return codes, scales.view(torch.uint8).view(len(x), -1), amax


def _hex(x: torch.Tensor) -> str:
    return x.contiguous().view(torch.uint8).numpy().tobytes().hex()


def main() -> None:
    """Write the file."""
    found = []
    for scheme, rule in RULES.items():
        for name, x in inputs().items():
            codes, scales, amax = theirs(x, rule)
            found.append({
                "scheme": scheme, "input": name, "dtype": str(x.dtype).removeprefix("torch."),
                "x": _hex(x), "codes": _hex(codes), "scales": _hex(scales), "amax": float(amax),
            })  # fmt: skip
    GOLDEN.write_text(json.dumps({"fouroversix": version("fouroversix"), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
