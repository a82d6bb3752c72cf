"""Which engines load what a plan writes, and why the others do not.

What transformers loads was run, for the architectures of tested.py, and is not claimed for others. The other
engines are read off their sources and change with their releases; nothing of theirs ran here, and every row
says so:

- vLLM: model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (its schemes) and
  utils.py (fused layers).
- SGLang: srt/layers/quantization/compressed_tensors/schemes, which has fewer kernels than vLLM.
- TensorRT-LLM: _torch/model_config.py since pull request 10796, which reads one group of float8 layers.
- llama.cpp: convert_hf_to_gguf.py since pull request 17069, which decodes weights to convert them to GGUF.
- onnxruntime: ONNX models alone.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..architectures import is_transposed, model_type, splits_experts, unloadable
from ..codecs.compressed_tensors import Layout, strategy
from ..codecs.compressed_tensors_config import LayerScheme
from ..errors import CheckpointError
from ..schemes import ZeroPoint
from .config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG
from .documents import odd_targets
from .experts import is_expert
from .partners import split_sets
from .plan import Plan
from .selection import is_fused_experts
from .source import CONFIG
from .tested import tested


class Loads(enum.Enum):
    """How much of a checkpoint an engine takes."""

    YES = "yes"
    PARTLY = "partly"
    """With an option, a conversion or some releases only, which the reason names."""
    NO = "no"
    UNCHECKED = "not checked"
    """Nothing speaks against it, and nobody has tried it with this architecture."""


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


def refusal(plan: Plan) -> str | None:
    """Return why transformers does not load the result of a plan that vLLM does not load either, or None.

    What one of them does not take may be meant for the other.
    """
    theirs, vllm = (v for v in verdicts(plan) if v.engine in (_CHECKED, _VLLM))
    refused = theirs.loads is Loads.NO and vllm.loads in (Loads.NO, Loads.UNCHECKED)
    return theirs.reason if refused else None


def require_loadable(plan: Plan) -> None:
    """Raise CheckpointError where transformers does not load the result of a plan, nor vLLM that we know."""
    reason = refusal(plan)
    if reason is not None:
        raise CheckpointError(
            f"transformers {TRANSFORMERS} does not load the result: {reason}; choose another scheme, or "
            "add --force to write it all the same"
        )


def _verdict(engine: str, problems: Callable[[Plan], Iterator[_Problem]], plan: Plan) -> Verdict:
    found = list(problems(plan))
    # The worst comes first; of equals, the one that was found first.
    found.sort(key=lambda problem: -_WORST.index(problem[0]))
    loads, reason = next(iter(found), (Loads.YES, "reads every layout in it"))
    checked = engine == _CHECKED and loads is not Loads.UNCHECKED
    return Verdict(engine=engine, loads=loads, reason=reason, checked=checked)


_WORST = (Loads.YES, Loads.PARTLY, Loads.UNCHECKED, Loads.NO)
TRANSFORMERS = "5.23"
"""The version that our tests load with."""
_CHECKED, _VLLM = USUAL = "transformers", "vLLM"
_EXPERTS_READ = (Layout.PACK, Layout.MXFP4)


def _transformers(plan: Plan) -> Iterator[_Problem]:
    config = plan.source.config or {}
    broken = unloadable(config)
    if broken is not None:
        yield Loads.NO, broken
    if splits_experts(config) and any(is_fused_experts(kept.source) for kept in plan.kept):
        yield Loads.NO, "it takes the experts of this family one by one, and here they are kept as one tensor"
    experts = {weight.layer for weight in plan.weights if is_expert(weight.module)}
    written = _written(plan)
    decoded = written.get("dequantize") is True
    if not decoded and odd_targets(plan.decisions, config):
        yield Loads.NO, f"quantized embeddings and routers are read {_DECODED}"
    if not decoded and _transposed(plan):
        yield Loads.NO, f"quantized weights of Conv1D are read {_DECODED}"
    if any(_affine(layer) for layer in plan.layers) and (experts or not decoded):
        yield Loads.NO, f"zero points are read {_DECODED}, and not of experts"
    yield from _of_experts(experts)
    wider = any(weight.dtype is not torch.bfloat16 for weight in plan.weights)
    small = [layer for layer in plan.layers if layer.layout in (Layout.MXFP4, Layout.MXFP8, Layout.NVFP4)]
    if small and wider and not decoded:
        layout = small[0].layout.value
        yield (
            Loads.PARTLY,
            f"{layout} is decoded to bfloat16, and the model is not: pass dtype=torch.bfloat16",
        )
    answer = tested(model_type(config), plan.layers, several=len(written.get("config_groups", ())) > 1)
    if answer is None:
        yield Loads.UNCHECKED, "not checked for this architecture"
    elif not answer.loads:
        yield Loads.NO, answer.reason


def _written(plan: Plan) -> Mapping[str, Any]:
    """Return what the result's configuration says of quantization."""
    text = plan.texts.get(CONFIG) or plan.texts.get(WEIGHTS_ONLY_CONFIG) or "{}"
    found: Mapping[str, Any] = json.loads(str(text)).get(CONFIG_KEY) or {}
    return found


_DECODED = "where weights alone are quantized, all in one way"


def _of_experts(layers: Collection[LayerScheme]) -> Iterator[_Problem]:
    if len(layers) > 1:
        yield Loads.NO, "all experts are read under one scheme, and here they have several"
    for layer in layers:
        word = strategy(layer.weight)
        plain = layer.layout in (Layout.FLOAT, Layout.NAIVE) and word in ("channel", "tensor")
        if layer.layout not in _EXPERTS_READ and not plain:
            yield Loads.NO, f"experts in {layer.layout.value} under {layer} are not read"


def _transposed(plan: Plan) -> bool:
    """Return whether weights are quantized that lie transposed in their files."""
    config = plan.source.config or {}
    return any(is_transposed(weight.module, config) for weight in plan.weights)


def _vllm(plan: Plan) -> Iterator[_Problem]:
    split = split_sets(plan.decisions)
    if split:
        yield Loads.NO, split[0]
    config = plan.source.config or {}
    if odd_targets(plan.decisions, config):
        yield Loads.NO, "quantized embeddings and routers are not read"
    if _transposed(plan):
        yield Loads.NO, "quantized weights of Conv1D are not read"
    if unloadable(config) or splits_experts(config):
        yield Loads.UNCHECKED, "not checked for this architecture"
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
    _VLLM: _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt,
    "llama.cpp": _llama_cpp,
    "onnxruntime": _onnxruntime,
}


def _affine(layer: LayerScheme) -> bool:
    return layer.weight.zero_point is not ZeroPoint.NONE
