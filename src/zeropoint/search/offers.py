"""Candidates of a search, and layers that are decided together.

Each candidate is a plan for the checkpoint, which says which weights its layout holds and their bytes in the
files, so that a layer has as options the candidates that all of its weights can have. Layers that engines run
as one, weights that lie in one tensor and heads that are tied to their embedding have one choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..architectures import fused_set, is_expert
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from ..checkpoint.plan.limits import Limits
from ..checkpoint.plan.output_tensors import Output
from ..checkpoint.plan.recipe import RecipeText, require_blocks
from ..checkpoint.plan.selection import Selection, module_of
from ..checkpoint.plan.tied import tied_copies
from ..checkpoint.read.source import Source
from ..codecs.engines import MERGING
from ..codecs.protocol import Codec
from ..errors import CheckpointError, RecipeError, ZeropointError, printable
from ..loaded_names import transformers_names

KEEP = "keep"
"""The candidate that leaves a layer in its floats."""
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheme that layers may get.

    text: as recipes name it. plan: that which gives it to all weights that can have it, or None for ``keep``.
    method: which quantizes them, or None for the usual one.
    """

    text: str
    plan: CheckpointPlan | None
    method: str | None = None

    def key(self, weight: Output, extra: str = "") -> str:
        """Return the key of a weight's errors; ``extra``: further inputs."""
        parts = (weight.layer.codec.name, str(weight.layer.weight), weight.method, extra)
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedWeight:
    """A weight that some candidate can hold.

    module: its name. tensor: the name of the tensor which holds it, for rules. values: how many numbers.
    kept: bytes that it takes as it is. numbers: by candidate, its number among the weights of that plan.
    nbytes: by candidate, what its tensors take.
    """

    module: str
    tensor: str
    values: int
    kept: int
    numbers: Mapping[str, int]
    nbytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedLayer:
    """Weights that get one scheme.

    weights: at least one. sizes: bytes by candidate, of those that all of them can have.
    """

    weights: tuple[SearchedWeight, ...]
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        """The first weight, and how many more there are."""
        more = len(self.weights) - 1
        return self.weights[0].module + (f" and {more:,} more" if more else "")

    @property
    def values(self) -> int:
        """Numbers in all of its weights."""
        return sum(weight.values for weight in self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """All that can be chosen.

    candidates: by text, in the order that was given. layers: in the order of the files. without: tensors
    for which no candidate fits the layers that are decided together.
    """

    source: Source
    codec: Codec
    selection: Selection
    candidates: Mapping[str, Candidate]
    layers: tuple[SearchedLayer, ...]
    without: tuple[str, ...]

    @property
    def plans(self) -> list[CheckpointPlan]:
        """The plans of all candidates but ``keep``."""
        return [c.plan for c in self.candidates.values() if c.plan is not None]

    @property
    def values(self) -> int:
        """Numbers that are decided about."""
        return sum(layer.values for layer in self.layers)

    @property
    def other_bytes(self) -> int:
        """Bytes of all files without the searched weights, by the largest plan."""
        searched = [weight for layer in self.layers for weight in layer.weights]
        return max(
            candidate.plan.output_bytes - sum(w.nbytes.get(candidate.text, w.kept) for w in searched)
            for candidate in self.candidates.values()
            if candidate.plan is not None
        )

    def output(self, weight: SearchedWeight, candidate: str) -> Output:
        """Return a weight's output under a candidate."""
        plan = self.candidates[candidate].plan
        assert plan is not None, candidate
        return plan.weights[weight.numbers[candidate]]


def choices(
    source: Source, texts: Sequence[str], codec: Codec, *, method: str | None = None,
    selection: Selection | None = None, limits: Limits | None = None,
) -> Choices:  # fmt: skip
    """Return the candidates' choices for the weights of ``source``.

    method: which quantizes all of them. Raises RecipeError for no candidate and for one that is named twice;
    what :func:`make_plan` raises, with the candidate's name.
    """
    asked = replace(selection or Selection(), strict=False, as_stored=True)
    names = [text.strip() for text in texts if text.strip()]
    if not [name for name in names if name != KEEP]:
        raise RecipeError(
            f"candidates ({', '.join(names) or 'none'}) must name at least one preset or scheme"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError(f"candidate {printable(twice)} is named twice; name it once")
    found = {}
    for text in names:
        plan = None if text == KEEP else _plan(source, text, codec, method, asked, limits)
        found[text] = Candidate(text=text, plan=plan, method=method)
    weights = _weights(found)
    sets = _together(source, found, weights, codec)
    layers = [layer for members in sets if (layer := _layer(members, found)).sizes]
    held = {weight.module for layer in layers for weight in layer.weights}
    return Choices(
        source=source,
        codec=codec,
        selection=asked,
        candidates=found,
        layers=tuple(layers),
        without=tuple(dict.fromkeys(w.tensor for w in weights.values() if w.module not in held)),
    )


def _plan(
    source: Source, text: str, codec: Codec, method: str | None, selection: Selection, limits: Limits | None
) -> CheckpointPlan:
    recipe = RecipeText.of(text)
    if recipe.mixture(codec) is not None:
        raise RecipeError(f"candidate {text} is a mixture; name the types that it is made of")
    # As rules, patterns to include may name tensors that another candidate fits.
    rules = [{"name": pattern, "preset": text} for pattern in selection.include]
    recipe = replace(recipe, text=f"{recipe.text}\nrules: {json.dumps(rules)}")
    recipe = recipe if method is None else recipe.by(method)
    try:
        require_blocks(text, codec)
        return make_plan(source, recipe, selection=replace(selection, include=()), limits=limits, codec=codec)
    except ZeropointError as error:
        raise type(error)(f"candidate {printable(text)}: {error}") from error


def _weights(candidates: Mapping[str, Candidate]) -> dict[str, SearchedWeight]:
    """Return the weights of all plans by module, in plan order."""
    found: dict[str, tuple[str, int, int, dict[str, int], dict[str, int]]] = {}
    for candidate in candidates.values():
        for number, weight in enumerate(() if candidate.plan is None else candidate.plan.weights):
            values, tensor = weight.shape[0] * weight.shape[1], module_of(weight.source.name)
            own = found.setdefault(weight.module, (tensor, values, values * weight.dtype.itemsize, {}, {}))
            own[3][candidate.text] = number
            own[4][candidate.text] = sum(tensor.nbytes for tensor in weight.tensors)
    return {
        module: SearchedWeight(
            module=module, tensor=tensor, values=values, kept=kept, numbers=numbers, nbytes=nbytes
        )
        for module, (tensor, values, kept, numbers, nbytes) in found.items()
    }


def _layer(members: Sequence[SearchedWeight], candidates: Mapping[str, Candidate]) -> SearchedLayer:
    sizes = {}
    for text, candidate in candidates.items():
        if candidate.plan is None:
            sizes[text] = sum(weight.kept for weight in members)
        elif all(text in weight.nbytes for weight in members):
            sizes[text] = sum(weight.nbytes[text] for weight in members)
    return SearchedLayer(weights=tuple(members), sizes=sizes)


def _together(
    source: Source, candidates: Mapping[str, Candidate], weights: Mapping[str, SearchedWeight], codec: Codec
) -> Iterator[list[SearchedWeight]]:
    """Yield weights that are decided together, by first appearance."""
    merges = not MERGING.isdisjoint(codec.usual)
    ties = tied_copies(source)
    owner: dict[str, str] = {}
    joined: dict[str, list[SearchedWeight]] = {}
    for weight in weights.values():
        text = next(iter(weight.numbers))
        plan = candidates[text].plan
        assert plan is not None
        output = plan.weights[weight.numbers[text]]
        names = transformers_names(weight.module, source.config or {}) if merges else ()
        keys = list(_keys(weight.module, output, ties, names))
        lists = list(dict.fromkeys(owner[key] for key in keys if key in owner))
        first = lists[0] if lists else weight.module
        members = joined.setdefault(first, [])
        for other in lists[1:]:
            members += joined.pop(other)
            owner = {key: first if at == other else at for key, at in owner.items()}
        members.append(weight)
        owner |= dict.fromkeys(keys, first)
    return iter(joined.values())


def _keys(module: str, weight: Output, ties: Mapping[str, str], names: Iterable[str]) -> Iterable[str]:
    """Yield the keys of a weight that joint decisions share.

    names: those by which engines find sets that they fuse.
    """
    yield f"tensor {weight.source.name}"
    fused = dict.fromkeys(filter(None, map(fused_set, names)))
    yield from (f"fused {name}" for name in fused)
    if not fused and is_expert(module):
        yield f"experts {EXPERT.sub('*', module)}"
    if weight.share is not None:
        yield f"scale {weight.share}"
    for head, embedding in ties.items():
        if module in (module_of(head), module_of(embedding)):
            yield f"tied {module_of(embedding)}"


def require_choice(found: Choices) -> None:
    """Raise CheckpointError where no layer has a choice."""
    if not found.layers:
        raise CheckpointError(
            f"no candidate of {', '.join(found.candidates)} fits layers that engines run as one, such as "
            f"{printable(found.without[0])}; name other candidates"
        )
