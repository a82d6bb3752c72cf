"""What engines make of the files that a codec writes: the facts that they look at, and their rules as data.

A rule is a function from the facts of a result to the problems that an engine has with it. This module knows
no engine and no codec: each codec has the rules of its own files.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..architectures import Config

if TYPE_CHECKING:
    from .protocol import LayerScheme


class Loads(enum.Enum):
    """How much of a checkpoint an engine takes."""

    YES = "yes"
    PARTLY = "partly"
    """With an option, a conversion or some releases only, which the reason names."""
    NO = "no"
    UNCHECKED = "not checked"
    """Nothing speaks against it, and nobody has tried it with this architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What engines look at in the result of a plan.

    family: the model's configuration. layers: the schemes of its weights. experts: those of experts. section:
    what its configuration says of quantization. nonlinear: whether embeddings or routers are quantized.
    transposed: whether weights are that lie transposed in their files. wider: whether a weight had more than
    16 bits, or float16's. whole_experts: whether fused experts are kept as one tensor. split: layers that
    engines run as one but that do not have one scheme, in a sentence, or None.
    """

    family: Config
    layers: tuple[LayerScheme, ...]
    experts: frozenset[LayerScheme]
    section: Mapping[str, Any]
    nonlinear: bool
    transposed: bool
    wider: bool
    whole_experts: bool
    split: str | None


Problem: TypeAlias = tuple[Loads, str]
EngineRule: TypeAlias = Callable[[Facts], Iterator[Problem]]
TRANSFORMERS, VLLM, SGLANG, TENSORRT, LLAMA_CPP, ONNXRUNTIME = ENGINES = (
    "transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "onnxruntime",
)  # fmt: skip
"""The engines of which every codec says something, in the order of reports."""


def no_safetensors(facts: Facts) -> Iterator[Problem]:
    """Yield why onnxruntime reads nothing of a checkpoint."""
    yield Loads.NO, "it reads ONNX models, no safetensors"
