"""Rules of engines for the layouts of compressed-tensors.

What transformers loads was run, for the architectures of tested.py, and is not claimed for others. What vLLM
ran is in engine_records.py. Otherwise rules are read off the sources of engines, change with their releases,
and say so:

- vLLM: model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (its schemes) and
  utils.py (fused layers).
- SGLang: srt/layers/quantization/compressed_tensors/schemes, which has fewer kernels than vLLM.
- TensorRT-LLM: _torch/model_config.py since pull request 10796, which reads one group of float8 layers.
- llama.cpp: convert_hf_to_gguf.py since pull request 17069, which decodes weights to convert them to GGUF.
- onnxruntime: ONNX models alone.
- mlx-lm: ``sanitize`` of models/deepseek_v3.py in release 0.32.2, which ran; for others, load_model in
  utils.py takes the configuration and then finds none of the names that it looks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ...architectures import expert_layout, model_type, splits_experts
from ...errors import option, printable
from ...schemes import Granularity, ZeroPoint
from ..act_order import group_index
from ..engine_records import is_of_vllm
from ..engines import CONV1D, Facts, Loads, Problem, decoded_first, fused_alike, rules
from ..protocol import LayerScheme
from .layout import FLOAT8, SMALL, Layout, strategy
from .tested import ASKED, UNCUT, tested

_EXPERTS_READ = (Layout.PACK.value, Layout.MXFP4.value)
_WITH_INPUTS = (*FLOAT8, Layout.INT.value)
"""Layouts of experts that vLLM reads with quantized inputs alone."""
_ACT_ORDER = "compressed-tensors 0.19 and newer refuse inputs in groups out of order (actorder: group)"
_SPLIT = ("deepseek_v3", "kimi_k2")
"""Families of mlx-lm whose loader looks for packed integers."""
_DECODED = "where weights alone are quantized, all in one way"


def _transformers(facts: Facts) -> Iterator[Problem]:
    if facts.uncut is not None:
        yield Loads.NO, f"its converter that makes {printable(facts.uncut)} {UNCUT}"
    if facts.asked is not None:
        yield Loads.NO, f"its code {ASKED} of {printable(facts.asked)}, where it finds codes alone"
    if splits_experts(facts.family) and facts.whole_experts:
        yield Loads.NO, "it takes the experts of this family one by one, and here they are kept as one tensor"
    if facts.single_experts or (expert_layout(facts.family).biased and facts.experts):
        yield Loads.NO, "it takes the experts of this family as one tensor, and here they are single matrices"
    if facts.joined_floats is not None and any(layer.layout not in FLOAT8 for layer in facts.layers):
        name = printable(facts.joined_floats)
        yield Loads.NO, f"it makes another weight of {name}, which it does of packed weights alone"
    if facts.converter is not None:
        yield Loads.NO, f"it joins the experts of this family by {facts.converter}, which takes floats alone"
    if any(group_index(layer) is not None for layer in facts.layers):
        yield Loads.NO, _ACT_ORDER
    decoded = facts.section.get("dequantize") is True
    if facts.cut is not None and any(_whole(layer, decoded=decoded) for layer in facts.layers):
        yield (
            Loads.NO,
            f"it makes other layers of {printable(facts.cut)}, which it does not of packed weights",
        )
    if not decoded and facts.nonlinear:
        yield Loads.NO, f"quantized embeddings and routers are read {_DECODED}"
    if facts.transposed:
        yield Loads.NO, CONV1D
    # Those that are taken apart are Linear layers like others.
    experts = frozenset() if splits_experts(facts.family) else facts.experts
    if any(_affine(layer) for layer in facts.layers) and (experts or not decoded):
        yield Loads.NO, f"zero points are read {_DECODED}, and not of experts"
    yield from _of_experts(experts)
    small = [layer for layer in facts.layers if layer.layout in SMALL]
    if small and facts.wider and not decoded:
        yield (
            Loads.PARTLY,
            f"{small[0].layout} is decoded to bfloat16, and the model is not: pass dtype=torch.bfloat16",
        )
    several = len(facts.section.get("config_groups", ())) > 1
    answer = tested(model_type(facts.family), facts.layers, several=several)
    if answer is None:
        yield Loads.UNCHECKED, "not checked for this architecture"
    elif not answer.loads:
        yield Loads.NO, answer.reason


def _whole(layer: LayerScheme, *, decoded: bool) -> bool:
    """Return whether transformers cannot split a layout's weights: shapes are stored."""
    return layer.layout.startswith(Layout.PACK.value) or (decoded and layer.layout not in FLOAT8)


def _of_experts(layers: Collection[LayerScheme]) -> Iterator[Problem]:
    if len(layers) > 1:
        yield Loads.NO, "all experts are read under one scheme, and here they have several"
    for layer in layers:
        word = strategy(layer.weight)
        plain = layer.layout in (Layout.FLOAT.value, Layout.NAIVE.value) and word in ("channel", "tensor")
        if layer.layout not in _EXPERTS_READ and not plain:
            yield Loads.NO, f"experts in {layer.layout} under {layer} are not read"


def _vllm(facts: Facts) -> Iterator[Problem]:
    yield from fused_alike(facts)
    if facts.nonlinear:
        yield Loads.NO, "quantized embeddings and routers are not read"
    biased = expert_layout(facts.family).biased and bool(facts.experts)
    lost = facts.uncut is not None and not is_of_vllm(facts.family)
    if lost or splits_experts(facts.family) or biased or facts.unusual_experts:
        yield Loads.UNCHECKED, "not checked for this architecture"
    for layer in facts.experts:
        if layer.input is None and layer.layout in _WITH_INPUTS:
            yield Loads.NO, f"experts in {layer.layout} without quantized inputs ({layer}) are not read"
    for layer in facts.layers:
        word, layout = strategy(layer.weight), Layout(layer.layout.partition(" ")[0])
        if group_index(layer) is not None:
            yield Loads.PARTLY, f"{_ACT_ORDER}, so releases with older ones read it"
        if layout is Layout.PACK and word == "tensor":
            yield (
                Loads.NO,
                f"packed integers need a scale for each channel or group, {layer} has one for the tensor",
            )
        if layout is Layout.NAIVE and word == "group":
            yield Loads.NO, f"float8 weights in groups ({layer}) have no kernel"
        if layout is Layout.PACK and layer.weight.bits not in (4, 8):
            yield Loads.PARTLY, f"packed integers of 4 and 8 bits are read, others ({layer}) in some releases"
        if layout is Layout.MXFP6:
            yield Loads.UNCHECKED, f"not reviewed for {layout.value}"
        if layout in (Layout.MXFP8, Layout.MXFP4):
            yield Loads.PARTLY, f"{layout.value} is read by newer releases"


def _humming(facts: Facts) -> Iterator[Problem]:
    """Say what schema/compressed_tensors.py of humming-kernels 0.1.19 says; it did not run."""
    for layer in facts.layers:
        if layer.layout.partition(" ")[0] in (Layout.MXFP6.value, Layout.MXFP8.value):
            yield Loads.NO, f"it does not read {layer.layout}"
        if group_index(layer) is not None:
            yield Loads.NO, "inputs in groups out of order are not read"
    yield Loads.PARTLY, "the package humming-kernels runs it on NVIDIA GPUs, 2, 3, 5, 6 and 7 bits as well"


def _sglang(facts: Facts) -> Iterator[Problem]:
    yield from (problem for problem in _vllm(facts) if problem[0] is Loads.NO)
    yield Loads.PARTLY, "its support of compressed-tensors covers fewer schemes and models than vLLM's"


def _tensorrt(facts: Facts) -> Iterator[Problem]:
    if len(facts.layers) > 1:
        yield Loads.NO, "it reads one scheme a checkpoint in this layout"
    for layer in facts.layers:
        if layer.layout != Layout.FLOAT.value or strategy(layer.weight) not in ("channel", "block"):
            yield Loads.NO, "it reads float8 by channel or block with inputs in float8, and nothing else"
    yield Loads.PARTLY, "releases of 2026 read float8 by channel and block"


def _llama_cpp(facts: Facts) -> Iterator[Problem]:
    for layer in facts.layers:
        if group_index(layer) is not None:
            yield Loads.NO, "inputs in groups out of order are not read"
        if Layout(layer.layout.partition(" ")[0]) not in (
            Layout.PACK,
            Layout.INT,
            Layout.FLOAT,
            Layout.NAIVE,
        ):
            yield Loads.NO, f"its converter does not decode {layer.layout}"
    if len(facts.layers) > 1:
        yield Loads.NO, "its converter decodes one scheme a checkpoint"
    yield from decoded_first(facts)


def _mlx_lm(facts: Facts) -> Iterator[Problem]:
    read = model_type(facts.family) in _SPLIT
    for layer in facts.layers:
        read &= layer.layout == Layout.PACK.value and not _affine(layer) and layer.weight.bits == 4
        read &= layer.weight.granularity == Granularity.group(32)
    if not read:
        yield Loads.NO, "it looks for this layout in DeepSeek-V3 and Kimi K2 alone, int4 in groups of 32"
    yield Loads.PARTLY, f"it quantizes kv_b_proj anew, so keep it ({option('ignore', '*kv_b_proj*')})"


RULES = rules(
    transformers=_transformers,
    vllm=_vllm,
    humming=_humming,
    sglang=_sglang,
    tensorrt=_tensorrt,
    llama_cpp=_llama_cpp,
    mlx_lm=_mlx_lm,
)


def _affine(layer: LayerScheme) -> bool:
    return layer.weight.zero_point is not ZeroPoint.NONE
