"""Rules of engines about model architectures, whatever the layout.

vllm_architectures.json holds the architectures of which vLLM's own source hands a quantization on to layers;
`python benchmarks/vllm_architectures.py` reads it off the release that is installed. Of others nobody looked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

from ..architectures import Config, classes_of, model_type
from .engines import DIFFUSERS, HUMMING, MERGING, MLX_LM, TRANSFORMERS, Facts, Loads, Problem

TABLE = Path(__file__).with_name("vllm_architectures.json")
_BY_TYPE = frozenset((TRANSFORMERS, HUMMING, MLX_LM, *MERGING))
"""Engines that build a model by the ``model_type`` of its configuration."""
_BY_ARCHITECTURE = frozenset((HUMMING, *MERGING))
_PART = "_class_name"
"""The key by which diffusers builds a part of a pipeline."""


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


def is_of_vllm(family: Config) -> bool:
    """Return whether vLLM builds a model of its own, with quantized layers."""
    return not _architectures().isdisjoint(classes_of(family))


@functools.cache
def _architectures() -> frozenset[str]:
    found: list[str] = json.loads(TABLE.read_text(encoding="utf-8"))["architectures"]
    return frozenset(found)
