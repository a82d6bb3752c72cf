"""Calibration tokens per expert of a layer: few tokens teach little."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..plan.checkpoint_plan import SolvedWeight

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?:[^.]+\.)*?(?P<number>\d+)(?:\..*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTokens:
    """Tokens of the solved experts of one layer.

    layer: the name of its experts. experts: how many were solved. fewest, median, most: tokens of one.
    without: experts that got none, and have taken all that is known of their inputs from the others.
    """

    layer: str
    experts: int
    fewest: int
    median: float
    most: int
    without: int


def expert_tokens(solved: Mapping[str, SolvedWeight]) -> tuple[ExpertTokens, ...]:
    """Return the tokens of each layer with experts, in order of weights.

    solved: weights by module, an expert's may have other counts, where a value of an input
    was not finite; the least counts.
    """
    return tokens_by_layer((module, weight.loss.own) for module, weight in solved.items())


def tokens_by_layer(own: Iterable[tuple[str, int]]) -> tuple[ExpertTokens, ...]:
    """Return the tokens of each layer with experts, from each weight's."""
    layers: dict[str, dict[int, int]] = {}
    for module, tokens in own:
        found = _EXPERT.fullmatch(module)
        if found is not None:
            counts = layers.setdefault(found["layer"], {})
            number = int(found["number"])
            counts[number] = min(tokens, counts.get(number, tokens))
    return tuple(
        ExpertTokens(
            layer=layer,
            experts=len(counts),
            fewest=min(counts.values()),
            most=max(counts.values()),
            median=statistics.median(counts.values()),
            without=sum(not n for n in counts.values()),
        )
        for layer, counts in layers.items()
    )
