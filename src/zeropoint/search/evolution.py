"""Evolution of a choice by the whole model's measured KL divergence.

A generation has some offspring of the best choice known: in each, some layers get a scheme of a level more or
less, so that the budget is kept. The best of parent and offspring is the next parent. This finds what a sum
over layers cannot: errors of layers that add up or cancel.

Source: EvoPress, arXiv:2410.14649, section 4 (level-switch mutation, elitist selection).
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.plan.limits import Limits
from ..checkpoint.read.source import Source
from ..errors import count
from ..eval.divergence_meter import DivergenceMeter
from ..progress import Bar, Progress
from .measuring import decoded
from .offers import KEEP, Choices
from .search_state import SearchState
from .searching import Refinement, Refiner, Table
from .weighing import Text, decided_by, meter_of, name_in, windows_of

OFFSPRING = 4
"""Choices that are tried in a generation."""
_SWITCHES = (1, 1, 2, 3)
"""How many layers get more bits in a mutation, each as likely."""
_TRIES = 100
_KEPT = 1 << 28
"""Numbers of decoded weights that are kept for later choices."""
Options = Sequence[Sequence[tuple[str, int]]]
"""Of each layer, candidates and their sizes, by rising size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolved:
    """An evolved choice: layers' texts, its divergence, and the first one's."""

    chosen: tuple[str, ...]
    divergence: float
    first: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Constraints of a choice: options of layers, and bytes in all."""

    options: Options
    budget: int


def mutated(chosen: Sequence[str], terms: Terms, dice: random.Random) -> tuple[str, ...] | None:
    """Return a choice with bits moved between layers, or None.

    >>> terms = Terms(options=[[("a", 1), ("b", 2)]] * 2, budget=3)
    >>> mutated(("a", "b"), terms, random.Random(0))
    ('b', 'a')
    """
    options, budget = terms.options, terms.budget
    levels = [[text for text, _ in own].index(text) for own, text in zip(options, chosen, strict=True)]
    for _ in range(_TRIES):
        new = list(levels)
        for _ in range(dice.choice(_SWITCHES)):
            up = [at for at, level in enumerate(new) if level + 1 < len(options[at])]
            if up:
                new[dice.choice(up)] += 1
        size = sum(own[level][1] for own, level in zip(options, new, strict=True))
        while size > budget:
            down = [at for at, level in enumerate(new) if level and level <= levels[at]]
            if not down:
                break
            at = dice.choice(down)
            size += options[at][new[at] - 1][1] - options[at][new[at]][1]
            new[at] -= 1
        if size <= budget and new != levels:
            return tuple(own[level][0] for own, level in zip(options, new, strict=True))
    return None


def uniform(terms: Terms) -> list[tuple[str, ...]]:
    """Return the uniform choices within the budget.

    >>> uniform(Terms(options=[[("a", 1), ("b", 2)]] * 2, budget=3))
    [('a', 'a')]
    """
    sizes = [dict(own) for own in terms.options]
    shared = [text for text in sizes[0] if all(text in own for own in sizes)] if sizes else []
    return [(text,) * len(sizes) for text in shared if sum(own[text] for own in sizes) <= terms.budget]


class Fitness:
    """Divergence of choices, with cached decoded weights."""

    def __init__(self, meter: DivergenceMeter, found: Choices) -> None:
        self._meter, self._found, self._limits = meter, found, found.plans[0].limits
        self._weights: dict[tuple[str, str], torch.Tensor] = {}

    def __call__(self, chosen: Sequence[str]) -> float:
        """Return the mean KL divergence of a choice, texts by layer."""
        weights = {}
        for layer, text in zip(self._found.layers, chosen, strict=True):
            for weight in layer.weights if text != KEEP else ():
                key = weight.module, text
                if key not in self._weights:
                    if sum(w.numel() for w in self._weights.values()) > _KEPT:
                        self._weights.clear()
                    self._weights[key] = decoded(self._found, weight, text, self._limits).bfloat16()
                weights[self._name(weight.module)] = self._weights[key].float()
        return self._meter.mean_divergence(weights).value

    def _name(self, module: str) -> str:
        source: Source = self._found.source
        return name_in(self._meter, source, module)


def evolved(
    fitness: Callable[[Sequence[str]], float], chosen: Sequence[str], terms: Terms, *, generations: int,
    known: tuple[SearchState, str], on_progress: Progress | None = None,
) -> Evolved:  # fmt: skip
    """Return the best choice after some generations.

    It may start from one option for all layers where that is better. fitness: the divergence of a choice.
    known: a state, and the further inputs of divergences, such as tokens; each generation is kept under
    these, so that an interrupted evolution resumes and a longer one continues.
    """
    state, kind = known
    parse = functools.partial(_parsed, options=terms.options)
    start = hashlib.sha256(json.dumps([list(chosen), terms.budget]).encode()).hexdigest()[:16]
    kind = f"evolution {start}, {kind}"
    best = state.fact(kind, "0", parse)
    if best is None:
        best = tuple(chosen), fitness(chosen)
        state.add_facts(kind, {"0": _document(best)})
    first = best[1]
    begun = state.fact(kind, "uniform", parse)
    if begun is None:
        begun = min([best, *((each, fitness(each)) for each in uniform(terms))], key=lambda one: one[1])
        state.add_facts(kind, {"uniform": _document(begun)})
    best = begun
    for number in range(1, generations + 1):
        after = state.fact(kind, str(number), parse)
        if after is None:
            dice = random.Random(f"{start} {number}")
            children = [mutated(best[0], terms, dice) for _ in range(OFFSPRING)]
            tried = [(child, fitness(child)) for child in dict.fromkeys(children) if child is not None]
            after = min([best, *tried], key=lambda one: one[1])
            state.add_facts(kind, {str(number): _document(after)})
        best = after
        if on_progress is not None:
            on_progress(number, generations, f"{best[1]:.6g}")
    return Evolved(chosen=best[0], divergence=best[1], first=first)


def by_evolution(given: Text, limits: Limits, generations: int) -> Refiner:
    """Return a refinement by generations on a text, see :func:`~.weighing.windows_of`."""

    def improve(
        table: Table, chosen: Sequence[str], allowed: int, state: SearchState, bar: Bar
    ) -> Refinement:
        found = table.choices
        windows = windows_of(found.source, given)
        kind = f"{decided_by(found, table.mark, windows)}{limits.mark}"
        with bar("refining", _generations) as on_generation, meter_of(found, windows, limits) as meter:
            best = evolved(
                Fitness(meter, found),
                chosen,
                Terms(options=levels(table), budget=allowed),
                generations=generations,
                known=(state, kind),
                on_progress=on_generation,
            )
        note = (
            f"refined in {_generations(generations)}: KL divergence {best.first:.6g} -> "
            f"{best.divergence:.6g} on {windows.given.numel()} tokens"
        )
        return Refinement(chosen=best.chosen, note=note)

    return improve


def levels(table: Table) -> Options:
    """Return each layer's undominated options by rising size."""
    every = []
    for own in table.options:
        kept: list[tuple[str, int]] = []
        least = float("inf")
        for text, size, _, loss in sorted(own, key=lambda option: (option[1], option[3])):
            if loss < least:
                kept.append((text, size))
                least = loss
        every.append(kept)
    return every


def _generations(number: int) -> str:
    return count(number, "generation")


def _document(best: tuple[tuple[str, ...], float]) -> Mapping[str, object]:
    return {"chosen": list(best[0]), "divergence": best[1]}


def _parsed(found: object, options: Options) -> tuple[tuple[str, ...], float] | None:
    match found:
        case {"chosen": [*texts], "divergence": float(divergence)} if len(texts) == len(options) and all(
            text in dict(own) for text, own in zip(texts, options, strict=True)
        ):
            return tuple(texts), divergence
    return None
