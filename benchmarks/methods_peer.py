"""One model quantized by a peer, for `methods.py`: `PYTHON benchmarks/methods_peer.py PEER MODEL OUT SCHEME`.

PYTHON is the interpreter of an environment of `benchmarks/method_peers.sh`, in which zeropoint is not
installed. The peer calibrates on `calib.safetensors` in MODEL, the windows that zeropoint takes. It prints
{"peak_mb": ..., "solve_s": ..., "written": what OUT holds, a name of :class:`Written`} as JSON.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
LOGITS = "log_probabilities.safetensors"
"""File of :attr:`Written.LOGITS`."""
_INTEGERS = re.compile(r"int(\d):(?:g(\d+)|channel)(\+int8:token)?")


class Written(enum.StrEnum):
    """What a peer leaves in OUT."""

    CODES = "codes"
    """The files that the peer itself writes."""
    FLOATS = "floats"
    """A model of floats with the values that the codes mean, where its own files hold no plain codes."""
    LOGITS = "logits"
    """Log-probabilities of the text that is scored, where the result runs in the peer's engine alone."""


Run = Callable[[Path, Path, str], Written]
"""Writes the model of a folder, under a scheme, to another folder."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A scheme of weights as peers spell it.

    kind: ``int``, or a preset (``nvfp4``, ``mxfp4``). group: None for one scale of a row. inputs: whether
    inputs are rounded to int8, a scale for each token.
    """

    kind: str
    bits: int = 4
    group: int | None = None
    inputs: bool = False

    @staticmethod
    def of(scheme: str, *, kinds: tuple[str, ...] = ("int",), inputs: bool = False) -> Asked:
        """Parse a scheme; the program ends for one that the peer is not compared on."""
        found = _INTEGERS.fullmatch(scheme)
        if scheme.removesuffix("a16") in kinds:
            return Asked(kind=scheme.removesuffix("a16"), group=16 if "nv" in scheme else 32)
        if found is None or (found[3] and not inputs):
            raise SystemExit(f"this peer is not compared on {scheme}")
        return Asked(
            kind="int", bits=int(found[1]), group=int(found[2]) if found[2] else None, inputs=bool(found[3])
        )


def windows_of(folder: Path) -> torch.Tensor:
    """Token ids of calibration, (windows, length)."""
    return load_file(folder / "calib.safetensors")["input_ids"]


def float_model(folder: Path) -> Any:
    """Load the float model in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def llm_compressor(*, awq: bool) -> Run:
    """Build the row of llm-compressor's GPTQ, or of its AWQ before rounding to nearest.

    With quantized inputs SmoothQuant runs first, at the strength of its examples.
    """

    def run(folder: Path, out: Path, scheme: str) -> Written:
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationScheme,
            preset_name_to_scheme,
        )
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier

        torch.Tensor.pin_memory = lambda x, *_: x  # which AWQ calls without a GPU, too, and torch refuses
        asked = Asked.of(scheme, kinds=("nvfp4", "mxfp4"), inputs=True)
        if asked.kind == "int":
            own = {"num_bits": asked.bits, "type": "int", "symmetric": True}
            strategy = (
                {"strategy": "group", "group_size": asked.group} if asked.group else {"strategy": "channel"}
            )
            inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
            group = QuantizationScheme(
                targets=["Linear"],
                weights=QuantizationArgs(**own, **strategy),
                input_activations=QuantizationArgs(**inputs) if asked.inputs else None,
            )
        else:
            group = preset_name_to_scheme(f"{asked.kind.upper()}A16", ["Linear"])
        ids, model = windows_of(folder), float_model(folder)
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        rounding = QuantizationModifier if awq else GPTQModifier
        recipe: list[Any] = [SmoothQuantModifier(smoothing_strength=0.8)] if asked.inputs else []
        recipe += [AWQModifier()] if awq else []
        recipe.append(rounding(config_groups={"group_0": group}, ignore=["lm_head"]))
        oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            num_calibration_samples=len(ids),
            max_seq_length=ids.shape[1],
            shuffle_calibration_samples=False,
            tokenizer=str(folder),
        )
        model.save_pretrained(out, save_compressed=True)
        return Written.CODES

    return run


def modelopt(folder: Path, out: Path, scheme: str) -> Written:
    """Run ModelOpt's search with data, AWQ or local Hessians, and save the values of its codes."""
    import modelopt.torch.quantization as mtq

    asked = Asked.of(scheme, kinds=("nvfp4", "mxfp4"))
    ids, model = windows_of(folder), float_model(folder)
    configs = {"int": mtq.INT4_AWQ_CFG, "mxfp4": mtq.MXFP4_DEFAULT_CFG}
    config = configs.get(asked.kind, mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG)
    if asked.kind == "int":
        config = _with(config, {-1: asked.group, "num_bits": asked.bits})

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
    return _save_weights(model, folder, out)


def _save_weights(model: Any, folder: Path, out: Path) -> Written:
    """Save the weights of a changed model under the names of the float one."""
    plain = float_model(folder)
    names = dict(plain.named_parameters())
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name in names}, strict=False)
    plain.save_pretrained(out)
    return Written.FLOATS


def _with(config: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of a configuration in which numbers under some keys are others."""
    if isinstance(config, dict):
        return {
            key: values[key] if key in values and isinstance(own, int) else _with(own, values)
            for key, own in config.items()
        }
    return [_with(own, values) for own in config] if isinstance(config, list) else config


def auto_round(steps: int) -> Run:
    """Build the row of AutoRound with so many steps of tuning for each block."""

    def run(folder: Path, out: Path, scheme: str) -> Written:
        from auto_round import AutoRound

        asked = Asked.of(scheme, kinds=("nvfp4", "mxfp4"), inputs=True)
        ids = windows_of(folder)
        data = [
            {"input_ids": window[None], "attention_mask": torch.ones_like(window)[None]} for window in ids
        ]
        more: dict[str, Any] = {"int": {}, "nvfp4": {"data_type": "nv_fp"}, "mxfp4": {"data_type": "mx_fp"}}[
            asked.kind
        ]
        if asked.inputs:
            more = {"act_bits": 8, "act_group_size": -1, "act_sym": True, "act_dynamic": True}
        made = AutoRound(
            float_model(folder),
            AutoTokenizer.from_pretrained(folder),
            bits=asked.bits,
            group_size=asked.group or -1,
            sym=True,
            iters=steps,
            nsamples=len(ids),
            seqlen=ids.shape[1],
            dataset=data,
            batch_size=4,
            device_map="cpu",
            amp=False,
            **more,
        )
        made.quantize()
        return _save_weights(made.model.float(), folder, out)

    return run


def gptqmodel(folder: Path, out: Path, scheme: str) -> Written:
    """Run GPTQModel, with the two threads that it needs and does not take on two cores."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    asked = Asked.of(scheme)
    config = QuantizeConfig(bits=asked.bits, group_size=asked.group or -1, sym=True)
    made = GPTQModel.load(str(folder), config, device="cpu")
    data = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in windows_of(folder)]
    made.quantize(data, batch_size=1, backend=BACKEND.TORCH)
    made.save(str(out))
    return Written.CODES


def brevitas(folder: Path, out: Path, scheme: str) -> Written:
    """Run Brevitas' Qronos on scales of least squared error, as its examples of language models do."""
    from brevitas import nn as quantized
    from brevitas.graph.quantize import layerwise_quantize
    from brevitas_examples.common.generative.quantize import WEIGHT_QUANT_MAP
    from brevitas_examples.llm.llm_quant import gpxq

    asked = Asked.of(scheme)
    gpxq.send_to_device = lambda x, _: x  # which asks for CUDA
    own = WEIGHT_QUANT_MAP["int"]["float_scale"]["mse"]["per_group" if asked.group else "per_channel"]["sym"]
    quantizer = own.let(bit_width=asked.bits, **({"group_size": asked.group} if asked.group else {}))
    model = float_model(folder)
    layers = {torch.nn.Linear: (quantized.QuantLinear, {"weight_quant": quantizer})}
    model = layerwise_quantize(model, layers, name_blacklist=["lm_head"])
    data = [{"input_ids": window[None]} for window in windows_of(folder)]
    with torch.no_grad():
        model(**data[0])
        gpxq.apply_qronos(model, data, block_name="model.layers")
        for module in model.modules():
            if isinstance(module, quantized.QuantLinear):
                module.weight.copy_(module.quant_weight().value)
    return _save_weights(model, folder, out)


@torch.no_grad()
def nncf(folder: Path, out: Path, scheme: str) -> Written:
    """Run NNCF's AWQ, scale estimation and GPTQ on the OpenVINO graph, and OpenVINO in float32."""
    import nncf as tool
    import openvino

    asked = Asked.of(scheme)
    modes = {4: tool.CompressWeightsMode.INT4_SYM, 8: tool.CompressWeightsMode.INT8_SYM}
    ids, model = windows_of(folder), float_model(folder)
    model.config.use_cache = False
    graph = openvino.convert_model(model, example_input={"input_ids": ids[:1]})
    model = None
    made = tool.compress_weights(
        graph,
        mode=modes[asked.bits],
        group_size=asked.group,
        ratio=1.0,
        all_layers=False,
        dataset=tool.Dataset([window[None].numpy() for window in ids], lambda x: {"input_ids": x}),
        subset_size=len(ids),
        awq=True,
        scale_estimation=True,
        gptq=True,
        ignored_scope=tool.IgnoredScope(patterns=[".*lm_head.*", ".*embed_tokens.*"], validate=False),
    )
    hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    engine = openvino.Core().compile_model(made, "CPU", hints)
    text = load_file(folder / "eval.safetensors")["input_ids"][: 8 * 512].reshape(8, 512)
    logits = [torch.from_numpy(engine({"input_ids": window[None].numpy()})[0])[0, 255:-1] for window in text]
    out.mkdir(parents=True, exist_ok=True)
    save_file({"log_p": torch.cat([x.float().log_softmax(-1) for x in logits])}, out / LOGITS)
    return Written.LOGITS


@torch.no_grad()
def mean_squares(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Mean squares of the inputs of each layer, by the name of its tensor in GGUF."""
    import gguf

    model, found = float_model(folder), dict[str, torch.Tensor]()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)

    def watch(name: str) -> Callable[..., None]:
        def add(_: Any, given: tuple[torch.Tensor]) -> None:
            found[name] = found.get(name, 0) + given[0].double().square().flatten(0, -2).sum(0)

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    ids = windows_of(folder)
    for window in ids:
        model(input_ids=window[None])
    for name, sums in found.items():
        yield f"{names.get_name(name)}.weight", (sums / ids.numel()).float()


def llama_cpp(folder: Path, out: Path, scheme: str) -> Written:
    """Run llama.cpp's quantizer with an importance matrix of the windows on its converter's file."""
    import llama_cpp as tool

    out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE.parent))
    from tests.oracles.converted import convert

    floats = out / "floats.gguf"
    convert(folder, floats)
    kind = scheme.removeprefix("gguf:").upper()
    params = tool.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(tool, f"LLAMA_FTYPE_MOSTLY_{kind}"), 2
    kept = [(name.encode(), values.contiguous()) for name, values in mean_squares(folder)]
    rows = (tool.llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()
    for row, (name, values) in zip(rows, kept, strict=False):
        row.name, row.size = name, values.numel()
        row.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
    params.imatrix = ctypes.cast(rows, type(params.imatrix))
    code = tool.llama_model_quantize(str(floats).encode(), str(out / "model.gguf").encode(), params)
    floats.unlink()
    if code:
        raise SystemExit(f"llama.cpp returned {code}")
    return Written.CODES


PEERS: dict[str, tuple[str, Run]] = {
    "llm-compressor GPTQ": (".peers-methods", llm_compressor(awq=False)),
    "llm-compressor AWQ": (".peers-methods", llm_compressor(awq=True)),
    "ModelOpt": (".peers-methods", modelopt),
    "auto-round untuned": (".peers-autoround", auto_round(0)),
    "GPTQModel": (".peers-gptqmodel", gptqmodel),
    "Brevitas Qronos": (".peers-brevitas", brevitas),
    "NNCF": (".peers-nncf", nncf),
    "llama.cpp imatrix": (".llama_cpp", llama_cpp),
    "auto-round 200 steps": (".peers-autoround", auto_round(200)),
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
    written = PEERS[peer][1](Path(model), Path(out), scheme)
    return {"peak_mb": peak_mb(), "solve_s": round(time.perf_counter() - start, 1), "written": written}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
