"""One model quantized by a peer, for `methods.py`: `PYTHON benchmarks/methods_peer.py PEER MODEL OUT SCHEME`.

PYTHON is the interpreter of an environment of `benchmarks/method_peers.sh`, in which zeropoint is not
installed. The peer calibrates on `calib.safetensors` in MODEL, the windows that zeropoint takes. OUT gets
the files that the peer itself writes, or, where these hold no plain codes, a model of floats with the values
that its codes mean. It prints {"peak_mb": ..., "solve_s": ..., "floats": whether they are} as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

Run = Callable[[Path, Path, str], bool]
"""Writes a model of a folder to another one, under a scheme; returns whether it is one of floats."""
_INTEGERS = re.compile(r"int(\d):g(\d+)")


def integers(scheme: str) -> tuple[int, int]:
    """Return bits and group of a scheme of symmetric integers; other schemes end the program."""
    found = _INTEGERS.fullmatch(scheme)
    if found is None:
        raise SystemExit(f"peers are compared on schemes such as int4:g64, not {scheme}")
    return int(found[1]), int(found[2])


def windows_of(folder: Path) -> torch.Tensor:
    """Return the token ids of calibration, (windows, length)."""
    return load_file(folder / "calib.safetensors")["input_ids"]


def float_model(folder: Path) -> Any:
    """Return the float model in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def llm_compressor(*, awq: bool) -> Run:
    """Return a function that runs llm-compressor's GPTQ, or its AWQ before rounding to nearest."""

    def run(folder: Path, out: Path, scheme: str) -> bool:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from llmcompressor.modifiers.transform import AWQModifier

        torch.Tensor.pin_memory = lambda x, *_: x  # which AWQ calls without a GPU, too, and torch refuses
        bits, group = integers(scheme)
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group
        )
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
        ids, model = windows_of(folder), float_model(folder)
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        rounding = QuantizationModifier if awq else GPTQModifier
        recipe = [AWQModifier()] if awq else []
        recipe.append(rounding(config_groups=groups, ignore=["lm_head"]))
        oneshot(
            model=model, dataset=data, recipe=recipe, num_calibration_samples=len(ids),
            max_seq_length=ids.shape[1], shuffle_calibration_samples=False, tokenizer=str(folder),
        )  # fmt: skip
        model.save_pretrained(out, save_compressed=True)
        return False

    return run


def modelopt(folder: Path, out: Path, scheme: str) -> bool:
    """Run ModelOpt's search of AWQ, and save the values of its codes."""
    import modelopt.torch.quantization as mtq

    bits, group = integers(scheme)
    ids, model = windows_of(folder), float_model(folder)
    config = _with(mtq.INT4_AWQ_CFG, {-1: group, "num_bits": bits})

    @torch.no_grad()
    def forward(made: Any) -> None:
        for window in ids:
            made(input_ids=window[None])

    model = mtq.quantize(model, config, forward)
    with torch.no_grad():
        for module in model.modules():
            quantizer = getattr(module, "weight_quantizer", None)
            if quantizer is None or not quantizer.is_enabled:
                continue
            module.weight.copy_(quantizer(module.weight))
            before = getattr(module.input_quantizer, "_pre_quant_scale", None)
            if before is not None:
                module.weight.mul_(before.reshape(1, -1))
    names = dict(float_model(folder).named_parameters())
    plain = float_model(folder)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name in names}, strict=False)
    plain.save_pretrained(out)
    return True


def _with(config: Any, values: dict[Any, int]) -> Any:
    """Return a copy of a configuration in which numbers under some keys are others."""
    if isinstance(config, dict):
        return {
            key: values[key] if key in values and isinstance(own, int) else _with(own, values)
            for key, own in config.items()
        }
    return [_with(own, values) for own in config] if isinstance(config, list) else config


def auto_round(steps: int) -> Run:
    """Return a function that runs AutoRound, with so many steps of tuning for each block."""

    def run(folder: Path, out: Path, scheme: str) -> bool:
        from auto_round import AutoRound

        bits, group = integers(scheme)
        ids = windows_of(folder)
        data = [
            {"input_ids": window[None], "attention_mask": torch.ones_like(window)[None]} for window in ids
        ]
        made = AutoRound(
            float_model(folder), AutoTokenizer.from_pretrained(folder), bits=bits, group_size=group, sym=True,
            iters=steps, nsamples=len(ids), seqlen=ids.shape[1], dataset=data, batch_size=4, device_map="cpu",
            amp=False,
        )  # fmt: skip
        made.quantize()
        made.model.float().save_pretrained(out)
        return True

    return run


def gptqmodel(folder: Path, out: Path, scheme: str) -> bool:
    """Run GPTQModel, with the two threads that it needs and does not take on two cores."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    bits, group = integers(scheme)
    made = GPTQModel.load(str(folder), QuantizeConfig(bits=bits, group_size=group, sym=True), device="cpu")
    data = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in windows_of(folder)]
    made.quantize(data, batch_size=1, backend=BACKEND.TORCH)
    made.save(str(out))
    return False


PEERS: dict[str, tuple[str, Run]] = {
    "llm-compressor GPTQ": (".peers-methods", llm_compressor(awq=False)),
    "llm-compressor AWQ": (".peers-methods", llm_compressor(awq=True)),
    "ModelOpt AWQ": (".peers-methods", modelopt),
    "auto-round untuned": (".peers-autoround", auto_round(0)),
    "GPTQModel": (".peers-gptqmodel", gptqmodel),
    "auto-round 50 steps": (".peers-autoround", auto_round(50)),
}
"""Peers by the names of rows: the environment, and what writes a model there."""


def peak_mb() -> int:
    """Return the most memory that this process held so far, in 10^6 bytes; 0 where the system hides it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return round(int(found[1]) * 1024 / 1e6) if found else 0


def main(peer: str, model: str, out: str, scheme: str) -> dict[str, Any]:
    """Write the model; return what is printed."""
    start = time.perf_counter()
    floats = PEERS[peer][1](Path(model), Path(out), scheme)
    return {"peak_mb": peak_mb(), "solve_s": round(time.perf_counter() - start, 1), "floats": floats}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
