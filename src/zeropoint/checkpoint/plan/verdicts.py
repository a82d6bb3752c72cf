"""Verdicts of engines on a plan's output, and tensor parallelism.

Layers that take the hidden state are cut by rows, and those that give it back by columns, as Megatron-LM does
(https://arxiv.org/abs/1909.08053, section 3); the sum over devices follows the latter. Each device must hold
whole groups with their scales, and whole words of packed codes and zero points, or it cannot load its part.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...architectures import (
    HEAD,
    is_expert,
    is_usual_expert,
    layer_type,
    split_by_columns,
    splits_experts,
)
from ...codecs.containers import CONTAINERS
from ...codecs.engine_records import (
    RAN,
    REFUSED,
    answer_to,
    built_in_floats,
    of_architecture,
    of_diffusers,
    release,
)
from ...codecs.engines import DIFFUSERS, VLLM, EngineRule, Facts, Loads
from ...codecs.engines import TRANSFORMERS as _CHECKED
from ...codecs.protocol import LayerScheme
from ...codecs.tensor_fields import COLUMNS, ROWS
from ...errors import CheckpointError, option
from ...loaded_layers import cut_in_vain
from ...loaded_names import MERGE, conversion, is_installed, loaded_parameters, transformers_names
from ..read.config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG
from ..read.source import CONFIG
from .as_loaded import asked_for, is_numbered
from .config_and_index import odd_targets
from .decisions import split_sets
from .output_tensors import Output
from .selection import WEIGHT, is_fused_experts, module_of

if TYPE_CHECKING:
    from .checkpoint_plan import CheckpointPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of an engine: whether it loads, the reason, and whether tested."""

    engine: str
    loads: Loads
    reason: str
    checked: bool


def verdicts(plan: CheckpointPlan) -> tuple[Verdict, ...]:
    """Return the verdict of each engine on the result of ``plan``."""
    # Files of other containers say themselves what model they hold.
    facts, alone = facts_of(plan), not CONTAINERS[plan.codec.container].indexed
    return tuple(
        _verdict(engine, rule, facts, alone=alone)
        for engine, rule in plan.codec.engines.items()
        if engine != DIFFUSERS or of_diffusers(facts)
    )


def refusal(plan: CheckpointPlan) -> str | None:
    """Return why no usual engine of a layout loads the result.

    A layout that one of them does not load may be meant for another, and a model that none of them builds for
    another program.
    """
    facts, rules = facts_of(plan), plan.codec.engines
    usual = (engine for engine in rules if engine in plan.codec.usual)
    first, *others = (_verdict(engine, rules[engine], facts, alone=True) for engine in usual)
    refused = first.loads is Loads.NO and all(v.loads in (Loads.NO, Loads.UNCHECKED) for v in others)
    return first.reason if refused else None


def require_loadable(plan: CheckpointPlan) -> None:
    """Raise CheckpointError where neither transformers nor vLLM loads the result."""
    reason = refusal(plan)
    if reason is not None:
        raise CheckpointError(
            f"{_version(plan.codec.usual[0])} does not load the result: {reason}; choose another scheme, or "
            f"add {option('force', True)} to write it all the same"
        )


def facts_of(plan: CheckpointPlan) -> Facts:
    """Return the facts about a result that engine rules use."""
    family = plan.source.config or {}
    return Facts(
        family=family,
        layers=plan.layers,
        experts=frozenset(weight.layer for weight in plan.weights if is_expert(weight.module)),
        section=_section(plan),
        nonlinear=bool(odd_targets(plan.decisions, plan.source.entries, family)),
        transposed=any(map(_is_conv1d, plan.weights)),
        own_name=_own_name(plan),
        numbered=next((w.module for w in plan.weights if is_numbered(w.module, family)), None),
        wider=any(weight.dtype is not torch.bfloat16 for weight in plan.weights),
        single_experts=_single_experts(plan),
        joined_floats=_joined_floats(plan),
        cut=_cut(plan),
        uncut=_uncut(plan),
        asked=_asked(plan),
        converter=_converter(plan),
        unusual_experts=any(is_expert(w.module) and not is_usual_expert(w.module) for w in plan.weights),
        whole_experts=any(is_fused_experts(kept.source) for kept in plan.kept),
        in_floats=built_in_floats(family, (weight.module for weight in plan.weights)),
        head=next((w.module for w in plan.weights if layer_type(w.module, family) == HEAD), None),
        split=next(iter(split_sets(plan.decisions)), None),
    )


def _is_conv1d(weight: Output) -> bool:
    return weight.reader.entry.inputs_first


def _own_name(plan: CheckpointPlan) -> str | None:
    """Return codes that have the name of a Conv1D's weight, or None."""
    names = (tensor.name for weight in plan.weights if _is_conv1d(weight) for tensor in weight.tensors)
    return next((name for name in names if name.endswith(WEIGHT)), None)


def _single_experts(plan: CheckpointPlan) -> bool:
    """Return whether transformers never joins the split experts of a plan."""
    config = plan.source.config or {}
    apart = next((w for w in plan.weights if w.module != module_of(w.reader.entry.name)), None)
    if apart is None or not is_installed() or splits_experts(config):
        return False
    return all(map(is_expert, loaded_parameters(f"{apart.module}.weight", config)))


def _joined_floats(plan: CheckpointPlan) -> str | None:
    """Return a kept tensor that transformers converts when it loads, or None."""
    config = plan.source.config or {}
    kept = (d.entry.name for d in plan.decisions if not d.quantized and d.entry.name.endswith(WEIGHT))
    return next((name for name in kept if conversion(name, config)), None)


def _cut(plan: CheckpointPlan) -> str | None:
    """Return a layer, no expert, that transformers converts on loading, or None."""
    config = plan.source.config or {}
    layers = (weight.module for weight in plan.weights if not is_expert(weight.module))
    return next((module for module in layers if conversion(module + WEIGHT, config)), None)


def _uncut(plan: CheckpointPlan) -> str | None:
    """Return an unquantized layer that transformers cuts from another, or None."""
    config = plan.source.config or {}
    if not plan.weights or not is_installed():
        return None
    return cut_in_vain([n for w in plan.weights for n in transformers_names(w.module, config)], config)


def _asked(plan: CheckpointPlan) -> str | None:
    """Return a layer of codes alone whose weight transformers reads, or None."""
    config = plan.source.config or {}
    asked = frozenset() if _section(plan).get("dequantize") is True else asked_for(plan.layers, config)
    names = (name for weight in plan.weights for name in transformers_names(weight.module, config))
    return next((name for name in names if name in asked), None) if asked else None


def _converter(plan: CheckpointPlan) -> str | None:
    """Return the unusual transformers operation that joins experts, or None."""
    config = plan.source.config or {}
    expert = next((weight.module for weight in plan.weights if is_expert(weight.module)), None)
    first = None if expert is None else next(iter(conversion(expert + WEIGHT, config)), None)
    return None if first == MERGE else first


def _section(plan: CheckpointPlan) -> Mapping[str, Any]:
    """Return the quantization section of the result's configuration."""
    text = plan.texts.get(CONFIG) or plan.texts.get(WEIGHTS_ONLY_CONFIG) or "{}"
    found: Mapping[str, Any] = json.loads(str(text)).get(CONFIG_KEY) or {}
    return found


def _verdict(engine: str, rule: EngineRule, facts: Facts, *, alone: bool) -> Verdict:
    """Return the verdict of one engine.

    alone: whether its rule judges the layout without the architecture.
    """
    built = [] if alone else [*of_architecture(engine, facts)]
    found = [*rule(facts), *built]
    # The worst comes first; of equals, the one that was found first.
    found.sort(key=lambda problem: -_WORST.index(problem[0]))
    loads, reason = next(iter(found), (Loads.YES, "reads every layout in it"))
    checked = engine == _CHECKED and loads is not Loads.UNCHECKED
    if engine == VLLM and loads is not Loads.NO and not built:
        loads, reason, checked = _seen(facts, loads, reason)
    return Verdict(engine=engine, loads=loads, reason=reason, checked=checked)


def _seen(facts: Facts, loads: Loads, reason: str) -> tuple[Loads, str, bool]:
    """Return the verdict of a vLLM run, or the given one."""
    answer, which = answer_to(facts), f"{VLLM} {release()}"
    if answer is None:
        return loads, reason, False
    did, _, more = answer.partition(": ")
    if did == REFUSED:
        return Loads.NO, f"{which}: {more}", True
    # What follows an answer is a package or an option that it needs.
    loads, given = (Loads.PARTLY, f" {more}") if more else (loads, "")
    if did == RAN:
        return Loads.PARTLY if more else Loads.YES, f"{which} ran it on a CPU{given}", True
    return loads, f"{reason}; {which} loaded its weights{given}, and has no kernel for a CPU", False


_WORST = (Loads.YES, Loads.PARTLY, Loads.UNCHECKED, Loads.NO)
TRANSFORMERS = "5.23"
"""The version that our tests load with."""


def _version(engine: str) -> str:
    return f"{engine} {TRANSFORMERS}" if engine == _CHECKED else engine


WAYS = (1, 2, 4, 8)
"""Numbers of devices that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indivisible:
    """A weight that cannot be cut into ``ways`` parts, and why."""

    module: str
    ways: int
    reason: str


def indivisible(weights: Iterable[Output]) -> tuple[Indivisible, ...]:
    """Return each weight and device count that do not divide it."""
    return tuple(
        Indivisible(module=weight.module, ways=ways, reason=reason)
        for ways in WAYS
        for weight in weights
        if (reason := problem(weight.layer, weight.shape, ways, by_columns=split_by_columns(weight.module)))
    )


@functools.lru_cache(maxsize=4096)
def problem(layer: LayerScheme, shape: tuple[int, int], ways: int, *, by_columns: bool) -> str | None:
    """Return why a weight cannot be cut into ``ways`` parts, or None.

    >>> from zeropoint.codecs.layer_schemes import layer_scheme
    >>> from zeropoint.codecs.registry import DEFAULT
    >>> problem(layer_scheme("w4a16", DEFAULT), (4096, 11008), 4, by_columns=True)
    '11008 columns / 4 = 2752, not a multiple of the group, 128'
    """
    extent, noun = (shape[1], "columns") if by_columns else (shape[0], "rows")
    if extent % ways:
        return f"{extent} {noun} cannot be split into {ways}"
    part = extent // ways
    for multiple, what in layer.codec.multiples(layer, COLUMNS if by_columns else ROWS):
        # One device holds all, with whatever stands over at the end.
        if part % multiple and ways > 1:
            return f"{extent} {noun} / {ways} = {part}, not a multiple of {what}, {multiple}"
    return None
