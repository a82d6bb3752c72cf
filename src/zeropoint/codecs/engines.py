"""Facts about results, and engine rules over them as data.

A rule is a function from the facts of a result to the problems that an engine has with it. This module knows
no engine and no codec: each codec has the rules of its own files.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..architectures import Config
from ..errors import printable

if TYPE_CHECKING:
    from .protocol import LayerScheme


class Loads(enum.Enum):
    """Extent to which an engine loads a checkpoint."""

    YES = "yes"
    PARTLY = "partly"
    """With an option, a conversion or some releases only, which the reason names."""
    NO = "no"
    UNCHECKED = "not checked"
    """Nothing speaks against it, but this architecture was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a result that engine rules use.

    family: the model's configuration. layers: the schemes of its weights. experts: the schemes of experts.
    section: what its configuration says of quantization. nonlinear: whether embeddings or routers are
    quantized. transposed: whether weights of Conv1D are, which float files have as (in, out). own_name: codes
    of such a weight under its own name, or None. wider: whether a weight had more than 16 bits, or float16's.
    whole_experts: whether fused experts are kept as one tensor.
    single_experts: whether some are written one by one that transformers has in one and does not join.
    joined_floats: floats of which it makes another weight, or None. cut: a layer, not of experts, of which it
    makes others, or None. uncut: a layer that it cuts from another and that is not quantized, or None.
    asked: a layer of codes alone whose weight its initialization reads, or None.
    converter: the operation by which it joins experts, where that is unusual, or None.
    split: layers that engines run as one but that do not have one scheme, in a sentence, or None.
    unusual_experts: whether projections of experts have names of their own. in_floats: layers that vLLM
    builds without a quantization, each with a pattern. head: a quantized one, or None.
    numbered: a layer that transformers calls by a number, or None.
    """

    family: Config
    layers: tuple[LayerScheme, ...]
    experts: frozenset[LayerScheme] = frozenset()
    section: Mapping[str, Any] = field(default_factory=dict)
    nonlinear: bool = False
    transposed: bool = False
    wider: bool = False
    whole_experts: bool = False
    single_experts: bool = False
    joined_floats: str | None = None
    cut: str | None = None
    uncut: str | None = None
    asked: str | None = None
    converter: str | None = None
    unusual_experts: bool = False
    in_floats: Mapping[str, str] = field(default_factory=dict)
    head: str | None = None
    own_name: str | None = None
    numbered: str | None = None
    split: str | None = None


Problem: TypeAlias = tuple[Loads, str]
EngineRule: TypeAlias = Callable[[Facts], Iterator[Problem]]
_NAMES = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "humming": "vLLM with humming",
    "sglang": "SGLang",
    "tensorrt": "TensorRT-LLM",
    "llama_cpp": "llama.cpp",
    "onnxruntime": "onnxruntime",
    "mlx_lm": "mlx-lm",
    "diffusers": "diffusers",
}
"""Names of engines by their arguments of :func:`rules`."""
TRANSFORMERS, VLLM, HUMMING, SGLANG, TENSORRT, LLAMA_CPP, ONNXRUNTIME, MLX_LM, DIFFUSERS = ENGINES = tuple(
    _NAMES.values()
)
"""The engines of which every codec says something, in the order of reports."""

MERGING = frozenset((VLLM, SGLANG, TENSORRT))
"""Those that run layers such as query, key and value as one, which need one scheme for it."""


def reads(rule: EngineRule, layer: LayerScheme) -> bool:
    """Return whether an engine reads such layers of some models."""
    return all(loads is not Loads.NO for loads, _ in rule(Facts(family={}, layers=(layer,))))


def always(loads: Loads, reason: str) -> EngineRule:
    """Return the rule of an engine with one answer."""
    return lambda _: iter([(loads, reason)])


def fused_alike(facts: Facts) -> Iterator[Problem]:
    """Yield the problem of fused layers with several schemes."""
    if facts.split is not None:
        yield Loads.NO, facts.split


def _own_names(facts: Facts) -> Iterator[Problem]:
    """Yield the problem of codes that vLLM takes for floats."""
    if facts.own_name is not None:
        yield Loads.NO, f"it transposes {printable(facts.own_name)} of a Conv1D, where there are codes"


def in_turn(*given: EngineRule) -> EngineRule:
    """Return the rule with the problems of several rules."""
    return lambda facts: (problem for rule in given for problem in rule(facts))


def linear_alone(loads: Loads, reason: str) -> EngineRule:
    """Return the rule with one answer for linear layers, no for others."""

    def rule(facts: Facts) -> Iterator[Problem]:
        if facts.experts or facts.nonlinear or facts.transposed:
            yield Loads.NO, "it reads linear layers alone in this layout"
        yield loads, reason

    return rule


decoded_first = always(
    Loads.PARTLY, "it reads GGUF; its converter decodes these weights first, and quantizes them again"
)
"""The rule of llama.cpp, of layouts that its converter knows."""
no_safetensors = always(Loads.NO, "it reads ONNX models, no safetensors")
"""The rule of onnxruntime, of layouts in safetensors files."""
not_gguf = always(Loads.NO, "it reads GGUF, and its converter does not know this layout")
"""The rule of llama.cpp, of other layouts in safetensors files."""
CONV1D = "weights of Conv1D are read in the layouts of bitsandbytes and GPTQ alone"
"""The rule of transformers for weights that files of floats have as (in, out)."""
not_read = always(Loads.NO, "it does not read this layout")
loader_not_run = always(Loads.UNCHECKED, "it has a loader for this layout, which did not run here")
not_checked = always(Loads.UNCHECKED, "not reviewed for this layout")


def rules(**known: EngineRule) -> MappingProxyType[str, EngineRule]:
    """Return a rule for each engine, of a layout in safetensors files.

    known: those that the codec has. SGLang follows vLLM where it is not named, llama.cpp reads GGUF,
    mlx-lm little but its own layout, and the others are not checked.

    >>> list(rules()) == list(ENGINES)
    True
    """
    if "vllm" in known:
        known["vllm"] = in_turn(_own_names, known["vllm"])
    every = dict.fromkeys(ENGINES, not_checked) | {LLAMA_CPP: not_gguf, ONNXRUNTIME: no_safetensors}
    every |= dict.fromkeys((MLX_LM, HUMMING, DIFFUSERS), not_read)
    every[SGLANG] = known.get("vllm", not_checked)
    return MappingProxyType(every | {_NAMES[engine]: rule for engine, rule in known.items()})
