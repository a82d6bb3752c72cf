"""Statistics and sample vectors of a site's inputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..methods import LayerData, Method, Samples
from ..stats import Accumulator, CrossGram, PairSums, State, Statistics
from .tensor_files import TensorLike, append_tensor, read_tensor, scratch_folder

EVERY = 8
"""One batch of so many is held out: it says how far steps go, and is measured, but is in no statistics."""
SAMPLED = 1024
"""Most vectors of a site that are kept to measure losses on, of batches that are held out and of others."""


def is_held(batch: int, batches: int) -> bool:
    """Return whether a batch is held out; few batches never are."""
    return batches >= EVERY and batch % EVERY == EVERY - 1


class Shelf:
    """Cache of vectors by name and batch, in memory or files."""

    def __init__(self, folder: Path | None) -> None:
        self._place = None if folder is None else scratch_folder(folder)
        self._held: dict[tuple[str, int], torch.Tensor] = {}
        self._files: dict[tuple[str, int], TensorLike] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._place is not None:
            self._place.cleanup()

    def add(self, key: tuple[str, int], x: torch.Tensor) -> None:
        """Keep a copy of vectors, (vectors, features), behind those that are there."""
        if self._place is None:
            before = self._held.get(key)
            self._held[key] = x.clone() if before is None else torch.cat([before, x])
            return
        rows = self._files[key].shape[0] if key in self._files else 0
        append_tensor(self._path(key), x)
        shape = torch.Size((rows + x.shape[0], *x.shape[1:]))
        self._files[key] = TensorLike(shape=shape, dtype=x.dtype, device=x.device)

    def get(self, key: tuple[str, int]) -> torch.Tensor | None:
        """Return a cached tensor, or None."""
        if key in self._files:
            return read_tensor(self._path(key), self._files[key])
        return self._held.get(key)

    def _path(self, key: tuple[str, int]) -> Path:
        assert self._place is not None
        return Path(self._place.name) / f"{key[1]}-{key[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Input vectors of a site in one batch, (vectors, features).

    batch: its number. inputs: as the deployed model has them. floats: the float model's vectors; ``inputs``
    where their number differs, as in an expert that a router sends other tokens.
    """

    batch: int
    inputs: torch.Tensor
    floats: torch.Tensor

    @staticmethod
    def of(batch: int, parts: Sequence[torch.Tensor], floats: torch.Tensor | None) -> Seen:
        """Return the vectors of several calls, with float ones if they match."""
        inputs = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        same = floats is not None and floats.shape == inputs.shape
        return Seen(batch=batch, inputs=inputs, floats=floats if same and floats is not None else inputs)


class SiteInputs:
    """Statistics of a site's inputs, and sample vectors of some batches.

    accumulators: by the names under which methods ask for them. features: of a vector. batches: how many
    there are.
    """

    def __init__(self, accumulators: Mapping[str, Accumulator], features: int, batches: int) -> None:
        self._accumulators, self._batches, self.features = accumulators, batches, features
        self._vectors = 0
        self._states = {name: made.start() for name, made in accumulators.items()}
        self._samples: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}

    @staticmethod
    def of(methods: Iterable[Method], features: int, batches: int) -> SiteInputs:
        """Return empty statistics that methods take, for ``features``."""
        made = {need: make(features) for method in methods for need, make in method.takes.items()}
        return SiteInputs(made, features, batches)

    @property
    def vectors(self) -> int:
        """Number of all vectors that were added."""
        return self._vectors

    @property
    def states(self) -> Mapping[str, State]:
        """Sums by the names under which methods ask for them."""
        return self._states

    def added_to(self, pooled: Mapping[str, State]) -> dict[str, State]:
        """Return sums with these added."""
        return {
            name: {key: pooled[name][key] + value for key, value in state.items()}
            for name, state in self._states.items()
        }

    def put(self, shelf: Shelf, name: str) -> None:
        """Move the sums to a shelf, under a name."""
        for need, state in self._states.items():
            for key, value in state.items():
                shelf.add((f"{name} {need} {key}", 0), value.reshape(1, *value.shape))
        self._states = {}

    def take(self, shelf: Shelf, name: str) -> None:
        """Take back the sums from a shelf."""
        for need, made in self._accumulators.items():
            kept = {key: shelf.get((f"{name} {need} {key}", 0)) for key in made.start()}
            self._states[need] = {key: value[0] for key, value in kept.items() if value is not None}

    def jobs(self, wave: Sequence[Seen]) -> list[Callable[[], None]]:
        """Return thread-safe functions that add the vectors of some batches."""
        self._vectors += sum(len(seen.inputs) for seen in wave)
        named = (functools.partial(self._learn, name, wave) for name in self._accumulators)
        return [*named, functools.partial(self.sample, wave)]

    def learn(self, wave: Sequence[Seen]) -> None:
        """Add the vectors of some batches to the sums alone."""
        self._vectors += sum(len(seen.inputs) for seen in wave)
        for name in self._accumulators:
            self._learn(name, wave)

    def _learn(self, name: str, wave: Sequence[Seen]) -> None:
        made, state = self._accumulators[name], self._states[name]
        learned = [seen for seen in wave if not is_held(seen.batch, self._batches)]
        if not learned:
            return
        inputs = torch.cat([seen.inputs for seen in learned])
        if isinstance(made, CrossGram | PairSums):
            floats = torch.cat([seen.floats for seen in learned])
            self._states[name] = made.update_pair(state, floats, inputs)
        else:
            self._states[name] = made.update(state, inputs)

    def sample(self, wave: Sequence[Seen]) -> None:
        """Keep some vectors of the next batches."""
        most = max(1, SAMPLED // -(-self._batches // EVERY))
        for seen in wave:
            held = is_held(seen.batch, self._batches)
            if held or seen.batch % EVERY == 0:
                step = max(1, -(-len(seen.inputs) // most))
                x, pair = seen.inputs[::step].float(), seen.floats[::step].float()
                good = torch.isfinite(x).all(1) & torch.isfinite(pair).all(1)
                self._samples[held].append((x[good], pair[good]))

    def data(self, pooled: Mapping[str, State] | None = None) -> LayerData:
        """Return statistics and vectors for methods; experts borrow from their kin.

        pooled: sums over all experts of the layer, where a router sent them different numbers of vectors.
        """
        states = self._states
        if pooled is not None:
            states = {name: drawn(state, pooled[name]) for name, state in states.items()}
        statistics = {
            name: Statistics(accumulator=self._accumulators[name], state=state)
            for name, state in states.items()
        }
        samples = {held: _joined(kept) for held, kept in self._samples.items()}
        own = max((int(state["vectors"]) for state in self._states.values()), default=0)
        return LayerData(statistics=statistics, seen=samples[False], held_out=samples[True], own=own)


def loss_on(
    samples: Samples | None, weight: torch.Tensor, values: torch.Tensor, added: torch.Tensor | None = None
) -> float | None:
    """Return the output loss relative to the float model, if known.

    samples: inputs of the layer. weight: of the float layer, (rows, columns) float32. values: of its codes.
    added: the correction of its bias, or None.
    """
    if samples is None:
        return None
    step = max(1, len(samples.inputs) // _MEASURED)
    wanted, found = samples.floats[::step] @ weight.T, samples.inputs[::step] @ values.T
    found = found if added is None else found + added
    return float((wanted - found).square().sum() / wanted.square().sum().clamp_min(1e-30))


_MEASURED = 256
"""Vectors on which a loss is measured."""


def _joined(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Samples | None:
    if not sum(len(x) for x, _ in kept):
        return None
    return Samples(inputs=torch.cat([x for x, _ in kept]), floats=torch.cat([pair for _, pair in kept]))


FEW = 0.25
"""Vectors for each feature: what was learned of all experts counts as much as so many of one's own."""


def drawn(state: State, pooled: State) -> State:
    """Return an expert's sums, plus ``FEW`` vectors a feature from all.

    An expert that gets few tokens has a nearly singular Gram matrix, and without tokens it has none: the sums
    over all experts of their layer fill in.

    pooled: sums over all experts of the layer.
    """
    if not int(pooled["vectors"]):
        return state
    features = next(t.shape[-1] for name, t in state.items() if t.ndim)
    share = min(1.0, FEW * features / int(pooled["vectors"]))
    drawn = {name: t + pooled[name] * share for name, t in state.items() if t.ndim}
    counts = {
        name: t + torch.as_tensor(pooled[name] * share).round().to(t.dtype)
        for name, t in state.items()
        if not t.ndim
    }
    return {**drawn, **counts}


_NUMBER = re.compile(r"(?<=\.)(?:[^.]+_)?\d+(?=\.)|(?<=\.)\d+$")


def kin_of(name: str) -> str:
    """Return a layer's name with ``*`` for numbers, shared by experts.

    >>> kin_of("mlp.experts.7.up_proj")
    'mlp.experts.*.up_proj'
    >>> kin_of("mlp.experts.expert_7.wi"), kin_of("mlp.linear_1")
    ('mlp.experts.*.wi', 'mlp.linear_1')
    """
    return _NUMBER.sub("*", name)


def numbers_of_kin(name: str) -> tuple[str, ...]:
    """Return the numbers in a layer's name, which tell its kin apart."""
    return tuple(_NUMBER.findall(name))
