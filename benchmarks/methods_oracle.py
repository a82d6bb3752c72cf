"""One model of the oracle for `methods.py`: `python benchmarks/methods_oracle.py MODEL OUT SCHEME ALPHA`.

The GPTQ of tests/oracles/independent_gptq.py (alpha 0) or GPTAQ replaces the weights of a Llama in
transformers, on the windows of calibration in its folder; scales are those that zeropoint's `mse_weighted`
finds on the float weights with the mean squares of inputs. Results are written as float32. It prints
{"peak_mb": ..., "solve_s": ...}: the seconds without loading and writing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from methods_row import peak_mb
from safetensors.torch import load_file
from tests.oracles.independent_gptq import Scales, quantize_llama
from transformers import AutoModelForCausalLM

import zeropoint as zp
from zeropoint.formats.rounding import Special
from zeropoint.layout.blocks import spread_blocks
from zeropoint.params.effective import effective_scale
from zeropoint.schemes.scheme import RangeRule, ZeroPoint


def weighted_scales(scheme: str) -> Scales:
    """Return the search of `mse_weighted` under a scheme of scales alone, as the oracle takes it."""
    parsed = zp.Scheme.parse(scheme)
    if parsed.offsets or parsed.zero_point is not ZeroPoint.NONE or parsed.center is not None:
        raise SystemExit(f"the oracle rounds to multiples of one scale, and {scheme} has more")
    numbers = [parsed.element.number(code) for code in range(parsed.element.code_count)]
    found = sorted(float(number) for number in numbers if not isinstance(number, Special))
    levels = torch.tensor(found[1:] if parsed.range_rule is RangeRule.NARROW else found)

    def scales(weight: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = zp.quantize(weight, scheme, method="mse_weighted", inputs=squares.sqrt()[None])
        scale = effective_scale(q.scheme, q.params.stored, q.shape, q.dtype)
        assert scale is not None
        return spread_blocks(scale, q.scheme.granularity, q.shape).expand(q.shape), levels

    return scales


def main(model: str, out: str, scheme: str, alpha: str) -> dict[str, float]:
    """Write the model; return what is printed."""
    ids = load_file(Path(model) / "calib.safetensors")["input_ids"]
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    start = time.perf_counter()
    quantize_llama(made, ids, weighted_scales(scheme), float(alpha))
    seconds = time.perf_counter() - start
    made.save_pretrained(out)
    return {"peak_mb": peak_mb(), "solve_s": round(seconds, 1)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
