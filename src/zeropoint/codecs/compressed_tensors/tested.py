"""Architectures and schemes that transformers loaded in our tests.

tested.json holds, for each model of tests/architectures/zoo.py, the result of each preset: `yes`,
or `no` and why, or `refused` and why; swept.csv the results of four layouts for every architecture of
transformers that could be made small. `python benchmarks/architectures.py`, with `--all` for the second one,
runs all of them and writes it.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..layer_schemes import layer_scheme
from ..protocol import Codec, LayerScheme

TABLE = Path(__file__).with_name("tested.json")
SWEPT = Path(__file__).with_name("swept.csv")
SWEPT_COLUMNS = ("w4a16", "fp8_dynamic", "mxfp4a16")
"""Columns of swept.csv in layouts of this codec."""
SEVERAL = "several"
"""The column of checkpoints with more than one scheme."""
YES = "yes"
_ANSWERS = (YES, "no", "refused")


class TestedModel(TypedDict):
    """A tested model: name, inputs, model type, and preset answers."""

    name: str
    takes: str
    model_type: str
    answers: dict[str, str]


def rows() -> list[TestedModel]:
    """Return the table, a row for each model."""
    found: list[TestedModel] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def swept() -> list[dict[str, str]]:
    """Return the table of all architectures, a row for each.

    ``compared`` says what was compared: outputs, weights or nothing, and why.
    """
    with SWEPT.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


ASKED_LATE = "asks a layer for its weight while it runs"
"""Mark in reasons: quantized layers of transformers have codes in its place."""
NO_LINEAR = "is no linear layer"
"""Mark in reasons: transformers gives quantized layers the model's own class."""
UNCUT, ASKED = "fails where no such layer is quantized", "asks for the weight"
"""Marks in reasons about the layers of one plan; other plans of the model type may load."""
TEXT_ALONE = "takes models of text alone"
"""Mark in reasons: transformers loads GPTQ files of models whose main input is ``input_ids``."""


@functools.cache
def of_gptq(mark: str) -> Mapping[str, str]:
    """Return recorded reasons of GPTQ files with a mark, by model type."""
    found = {row["model_type"]: row["gptq"].partition(": ")[2] for row in swept()}
    return {model_type: reason for model_type, reason in found.items() if mark in reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether a model loads, and what is to be said of it."""

    loads: bool
    reason: str = ""


def tested(model_type: str, layers: Sequence[LayerScheme], *, several: bool) -> Answer | None:
    """Return the result of a model type with layouts, or None.

    What a loader does follows from the layout, so that int4:g32 was tested with w4a16. several: whether the
    configuration has several groups of layers.
    """
    if not layers:
        return Answer(loads=True)
    known = recorded(layers[0].codec).get(model_type, {})
    ways = [*(_way(layer) for layer in layers), *([SEVERAL] if several else [])]
    if any(way not in known for way in ways):
        return None
    return next((known[way] for way in ways if not known[way].loads), Answer(loads=True))


def _way(layer: LayerScheme) -> str:
    inputs = "" if layer.input is None else " with inputs"
    return f"{layer.layout} {layer.weight.zero_point.value}{inputs}"


@functools.cache
def recorded(codec: Codec) -> Mapping[str, Mapping[str, Answer]]:
    """Return the answers by model type and layout, the worst of several."""
    found: dict[str, dict[str, Answer]] = {}
    every = [(row["model_type"], row["answers"]) for row in rows()]
    every += [(row["model_type"], {name: row[name] for name in SWEPT_COLUMNS}) for row in swept()]
    for model_type, answers in every:
        here = found.setdefault(model_type, {})
        for name, text in answers.items():
            word, _, reason = text.partition(": ")
            of_layers = UNCUT in reason or ASKED in reason
            if word not in _ANSWERS or of_layers:  # nothing was written by others
                continue
            answer = Answer(loads=word == YES, reason=reason)
            way = name if name == SEVERAL else _way(layer_scheme(name, codec))
            if way not in here or not answer.loads:
                here[way] = answer
    return found
