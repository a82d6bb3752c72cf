"""Recorded runs of vLLM on a CPU, from vllm_runs.json.

Each row is a model in a scheme and a layout. An answer is `ran`; `loaded`, where vLLM has no kernel for a CPU
but held every tensor of the files, bit for bit; or `refused` and why. `python benchmarks/vllm_runs.py
FIGURES.json --record` writes the table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..architectures import model_type
from .block_extents import blocks
from .engines import Facts
from .protocol import LayerScheme
from .tensor_fields import COLUMNS, ROWS

TABLE = Path(__file__).with_name("vllm_runs.json")
RAN, LOADED, REFUSED = "ran", "loaded", "refused"
_RANK = {RAN: 0, LOADED: 1, REFUSED: 2}
SEVERAL = "several"
"""The way of checkpoints with more than one scheme."""


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
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
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
    return [*sorted(found), *([SEVERAL] if len(facts.layers) > 1 else [])]


def answer_to(facts: Facts) -> str | None:
    """Return the answer for an equal checkpoint, or None."""
    if not facts.layers or facts.unusual_experts:
        return None
    alike = model_type(facts.family), facts.layers[0].codec.name, ways(facts)
    found = (run["answer"] for run in runs() if (run["model_type"], run["layout"], run["ways"]) == alike)
    # Of several rows, the one that says least.
    return max(found, key=lambda answer: _RANK[answer.partition(":")[0]], default=None)
