"""Which engines load what a plan writes, and why the others do not.

Facts about transformers are checked by our tests against the version installed there. The others are read off
their sources and change with their releases; nothing of theirs ran here, and every row says so:

- vLLM: model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (its schemes) and
  utils.py (fused layers).
- SGLang: srt/layers/quantization/compressed_tensors/schemes, which has fewer kernels than vLLM.
- TensorRT-LLM: _torch/model_config.py since pull request 10796, which reads one group of float8 layers.
- llama.cpp: convert_hf_to_gguf.py since pull request 17069, which decodes weights to convert them to GGUF.
- onnxruntime: ONNX models alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..codecs.compressed_tensors import Layout, strategy
from ..codecs.compressed_tensors_config import LayerScheme
from ..schemes import ZeroPoint
from .documents import odd_targets
from .experts import is_expert
from .partners import split_sets
from .plan import Plan


class Loads(enum.Enum):
    """How much of a checkpoint an engine takes."""

    YES = "yes"
    PARTLY = "partly"
    """With an option, a conversion or some releases only, which the reason names."""
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an engine loads the result of a plan, the reason, and whether our tests have tried it."""

    engine: str
    loads: Loads
    reason: str
    checked: bool


_Problem = tuple[Loads, str]


def verdicts(plan: Plan) -> tuple[Verdict, ...]:
    """Return what each engine makes of the result of ``plan``."""
    return tuple(_verdict(engine, problems, plan) for engine, problems in _ENGINES.items())


def _verdict(engine: str, problems: Callable[[Plan], Iterator[_Problem]], plan: Plan) -> Verdict:
    found = list(problems(plan))
    worst = next((p for p in found if p[0] is Loads.NO), next(iter(found), None))
    loads, reason = worst or (Loads.YES, "reads every layout in it")
    return Verdict(engine=engine, loads=loads, reason=reason, checked=engine == _CHECKED)


_CHECKED = "transformers"
_EXPERTS_READ = (Layout.PACK, Layout.MXFP4)


def _transformers(plan: Plan) -> Iterator[_Problem]:
    if odd_targets(plan.decisions):
        yield Loads.NO, "quantized embeddings are not read"
    experts = {weight.layer for weight in plan.weights if is_expert(weight.module)}
    if len(experts) > 1:
        yield Loads.NO, "all experts are read under one scheme, and here they have several"
    for layer in experts:
        plain = layer.layout in (Layout.FLOAT, Layout.NAIVE) and strategy(layer.weight) in (
            "channel",
            "tensor",
        )
        if layer.layout not in _EXPERTS_READ and not plain:
            yield Loads.NO, f"experts in {layer.layout.value} under {layer} are not read"
    if any(_affine(layer) for layer in plan.layers):
        if len(plan.layers) > 1 or experts:
            yield Loads.NO, "zero points need dequantize=True, which reads one scheme and no experts"
        yield Loads.PARTLY, "zero points are read with dequantize=True"


def _vllm(plan: Plan) -> Iterator[_Problem]:
    split = split_sets(plan.decisions)
    if split:
        yield Loads.NO, split[0]
    if odd_targets(plan.decisions):
        yield Loads.NO, "quantized embeddings are not read"
    for layer in plan.layers:
        word = strategy(layer.weight)
        if layer.layout is Layout.PACK and word == "tensor":
            yield (
                Loads.NO,
                f"packed integers need a scale for each channel or group, and {layer} has one in all",
            )
        if layer.layout is Layout.NAIVE and word == "group":
            yield Loads.NO, f"float8 weights in groups ({layer}) have no kernel"
        if layer.layout is Layout.PACK and layer.weight.bits not in (4, 8):
            yield Loads.PARTLY, f"packed integers of 4 and 8 bits are read, others ({layer}) in some releases"
        if layer.layout in (Layout.MXFP8, Layout.MXFP4):
            yield Loads.PARTLY, f"{layer.layout.value} is read by newer releases"


def _sglang(plan: Plan) -> Iterator[_Problem]:
    yield from (problem for problem in _vllm(plan) if problem[0] is Loads.NO)
    yield Loads.PARTLY, "its support of compressed-tensors covers fewer schemes and models than vLLM's"


def _tensorrt(plan: Plan) -> Iterator[_Problem]:
    if len(plan.layers) > 1:
        yield Loads.NO, "it reads one scheme a checkpoint in this layout"
    for layer in plan.layers:
        if layer.layout is not Layout.FLOAT or strategy(layer.weight) not in ("channel", "block"):
            yield Loads.NO, "it reads float8 by channel or block with inputs in float8, and nothing else"
    yield Loads.PARTLY, "releases of 2026 read float8 by channel and block"


def _llama_cpp(plan: Plan) -> Iterator[_Problem]:
    for layer in plan.layers:
        if layer.layout not in (Layout.PACK, Layout.INT, Layout.FLOAT, Layout.NAIVE):
            yield Loads.NO, f"its converter does not decode {layer.layout.value}"
    if len(plan.layers) > 1:
        yield Loads.NO, "its converter decodes one scheme a checkpoint"
    yield Loads.PARTLY, "it reads GGUF; its converter decodes these weights first, and quantizes them again"


def _onnxruntime(plan: Plan) -> Iterator[_Problem]:  # noqa: ARG001 (whatever the plan)
    yield Loads.NO, "it reads ONNX models, no safetensors"


_ENGINES: dict[str, Callable[[Plan], Iterator[_Problem]]] = {
    _CHECKED: _transformers,
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt,
    "llama.cpp": _llama_cpp,
    "onnxruntime": _onnxruntime,
}


def _affine(layer: LayerScheme) -> bool:
    return layer.weight.zero_point is not ZeroPoint.NONE
