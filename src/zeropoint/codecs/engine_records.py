"""Records of engines: architectures that vLLM quantizes, and its runs.

vllm_architectures.json holds the architectures of which vLLM's own source hands a quantization on to layers,
and the layers of each that it builds without one; `python benchmarks/vllm_architectures.py` reads both off
the release that is installed. Of others nobody looked.

vllm_runs.json holds runs of vLLM on a CPU. Each row is a model in a scheme and a layout. An answer is `ran`;
`loaded`, where vLLM has no kernel for a CPU but held every tensor of the files; both with a package or
an option, where vLLM needs one; or `refused` and why. `python benchmarks/vllm_runs.py FIGURES.json --record`
writes the table.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..architectures import Config, classes_of, model_type
from ..errors import option, printable
from .block_extents import blocks
from .engines import DIFFUSERS, HUMMING, MERGING, MLX_LM, TRANSFORMERS, VLLM, Facts, Loads, Problem
from .protocol import LayerScheme
from .tensor_fields import COLUMNS, ROWS

ARCHITECTURES = Path(__file__).with_name("vllm_architectures.json")
RUNS = Path(__file__).with_name("vllm_runs.json")
_BY_TYPE = frozenset((TRANSFORMERS, HUMMING, MLX_LM, *MERGING))
"""Engines that build a model by the ``model_type`` of its configuration."""
_BY_ARCHITECTURE = frozenset((HUMMING, *MERGING))
_OF_VLLM = frozenset((VLLM, HUMMING))
_WITH_HEADS = frozenset(("compressed-tensors", "gptq", "awq", "modelopt"))
"""Values of ``quant_method`` under which vLLM 0.32 quantizes a head (ParallelLMHead)."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_WHOLE = "*"
"""The name for all layers of a part, which transformers builds inside of vLLM."""
_PART = "_class_name"
"""The key by which diffusers builds a part of a pipeline."""
RAN, LOADED, REFUSED = "ran", "loaded", "refused"
_RANK = {RAN: 0, LOADED: 1, REFUSED: 2}
BUILT_IN_FLOATS = "vLLM builds it without a quantization"
SEVERAL = "several"
"""The way of checkpoints with more than one scheme."""
HEAD = "head"
"""The way of checkpoints with a quantized head."""


def of_diffusers(facts: Facts) -> bool:
    """Return whether a checkpoint is a part of a pipeline of diffusers."""
    return isinstance(facts.family.get(_PART), str)


def of_architecture(engine: str, facts: Facts) -> Iterator[Problem]:
    """Yield the problems of an engine with a model's architecture."""
    if engine in _BY_TYPE and not model_type(facts.family):
        if of_diffusers(facts):
            yield Loads.NO, "config.json has no model_type: it is a part of a pipeline of diffusers"
        else:
            yield Loads.NO, "there is no config.json with a model_type, by which it builds a model"
    elif engine in _BY_ARCHITECTURE and not is_of_vllm(facts.family):
        yield Loads.UNCHECKED, "not checked for this architecture"
    if engine == DIFFUSERS and not of_diffusers(facts):
        yield Loads.NO, "it is no part of a pipeline"
    if engine in _OF_VLLM and facts.in_floats:
        module, patterns = next(iter(facts.in_floats)), [*dict.fromkeys(facts.in_floats.values())]
        keep = option("ignore", patterns)
        yield Loads.NO, f"{VLLM} {release()} builds {printable(module)} without a quantization; use {keep}"

    if engine == VLLM and facts.head is not None and facts.section.get("quant_method") not in _WITH_HEADS:
        keep = option("ignore", facts.head)
        yield Loads.NO, f"{VLLM} {release()} takes no quantized head in this layout; use {keep}"


def built_in_floats(family: Config, modules: Iterable[str]) -> Mapping[str, str]:
    """Return layers that vLLM builds in floats, each with a pattern.

    >>> family = {"architectures": ["LlavaOnevisionForConditionalGeneration"]}
    >>> built_in_floats(family, ["layers.0.up_proj", "multi_modal_projector.linear_1"])
    {'multi_modal_projector.linear_1': '*multi_modal_projector.*'}
    >>> family = {"architectures": ["DiffusionGemmaForBlockDiffusion"]}
    >>> built_in_floats(family, ["model.encoder.0.proj", "model.layers.0.q_proj"])
    {'model.encoder.0.proj': 'model.encoder.*.proj'}
    >>> built_in_floats(family, ["0", "1.0"])
    {}
    """
    known = _table()["in_floats"]
    parts = {part: names for each in classes_of(family) for part, names in known.get(each, {}).items()}
    found, mixed = dict[str, str](), set[str]()
    for module in modules if parts else ():
        *above, last = [name for name in module.split(".") if not name.isdigit()] or [module]
        for part, names in parts.items():
            # A layer that the model itself holds is under one name at most, such as `model`.
            if part in above if part else len(above) <= 1:
                if last in names or _WHOLE in names:
                    found[module] = part
                else:
                    mixed.add(part)
    mixed.add("")
    return {
        module: _NUMBER.sub("*", module) if part in mixed else f"*{part}.*" for module, part in found.items()
    }


def is_of_vllm(family: Config) -> bool:
    """Return whether vLLM builds a model of its own, with quantized layers."""
    return not _table()["architectures"].keys().isdisjoint(classes_of(family))


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, Any] = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    return {"architectures": dict.fromkeys(found["architectures"]), "in_floats": found["in_floats"]}


class VllmRun(TypedDict):
    """A model type, its layers' quantization, and the run's answer.

    scheme: one for all layers, or a recipe.
    """

    model_type: str
    layout: str
    scheme: str
    ways: list[str]
    answer: str


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the release of vLLM and its rows."""
    found: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8"))
    return found


def release() -> str:
    """Return the release of vLLM that ran, such as 0.32."""
    return ".".join(str(table()["release"]).split(".")[:2])


def runs() -> Sequence[VllmRun]:
    """Return the rows."""
    found: list[VllmRun] = table()["rows"]
    return found


def way(layer: LayerScheme) -> str:
    """Return the loader's path for a layer, without group sizes.

    >>> from .layer_schemes import layer_scheme
    >>> from .registry import DEFAULT
    >>> way(layer_scheme("int4:g64", DEFAULT)), way(layer_scheme("w8a8", DEFAULT))
    ('pack-quantized int4 group', 'int-quantized int8 channel, inputs int8')
    """
    weight, given = layer.weight, layer.input
    extents = blocks(weight)
    if extents[ROWS] == 1:
        kind = "group" if extents[COLUMNS] else "channel"
    else:
        kind = "block" if any(extents) else "tensor"
    zeros = "" if weight.zero_point.value == "none" else " with zero points"
    static = "" if given is None or given.dynamic else "static "
    inputs = "" if given is None else f", {static}inputs {given.scheme.element_name}"
    return f"{layer.layout} {weight.element_name} {kind}{zeros}{inputs}"


def ways(facts: Facts) -> list[str]:
    """Return the loader paths of a checkpoint; experts have their own."""
    found = {*map(way, facts.layers), *(f"{way(layer)} in experts" for layer in facts.experts)}
    rest = (SEVERAL, len(facts.layers) > 1), (HEAD, facts.head is not None)
    return [*sorted(found), *(name for name, there in rest if there)]


def answer_to(facts: Facts) -> str | None:
    """Return the answer for an equal checkpoint, or None."""
    if not facts.layers or facts.unusual_experts:
        return None
    alike = model_type(facts.family), facts.layers[0].codec.name, ways(facts)
    found = (run["answer"] for run in runs() if (run["model_type"], run["layout"], run["ways"]) == alike)
    # Of several rows, the one that says least.
    return max(found, key=lambda answer: _RANK[answer.partition(":")[0]], default=None)
