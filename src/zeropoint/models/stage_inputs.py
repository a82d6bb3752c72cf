"""Input statistics of a stage's sites, of experts one at a time.

Sums of a site that stands alone grow while the block runs. Of experts, to which a router sends different
vectors, the vectors are kept: their sums are made afterwards, each expert's when it is solved, so that memory
holds the Gram matrices of as many experts as are solved at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ..methods import LayerData
from ..stats import State
from .block_chain import in_threads
from .site_inputs import EVERY, Seen, Shelf, SiteInputs, kin_of, numbers_of_kin
from .sites import Site
from .solutions import WeightTask


def sites_like(sites: Sequence[Site], names: Iterable[str]) -> list[Site]:
    """Return sites of layers that nothing reached, each as its kin's is.

    An expert's gate and up read one input, as in the other experts.
    """
    known = {kin_of(name): (site, at) for site in sites for at, name in enumerate(site.readers)}
    found: dict[tuple[int, tuple[str, ...]], dict[int, str]] = {}
    for name in names:
        site, at = known[kin_of(name)]
        found.setdefault((sites.index(site), numbers_of_kin(name)), {})[at] = name
    return [
        Site(readers=tuple(own[at] for at in sorted(own)), stage=sites[number].stage)
        for (number, _), own in found.items()
    ]


class StageInputs:
    """Inputs of the sites of one stage.

    sites: of the stage. make: returns empty statistics of a site. shelf: keeps vectors and sums of experts.
    batches: how many there are. workers: threads.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        make: Callable[[Site], SiteInputs],
        shelf: Shelf,
        *,
        batches: int,
        workers: int,
    ) -> None:
        self._sites, self._make, self._shelf = sites, make, shelf
        self._batches, self._workers = batches, workers
        self._site_of = {name: site for site in sites for name in site.readers}
        self._alone = {site.readers[0]: make(site) for site in sites}
        kin: dict[tuple[str, int], list[str]] = {}
        for name, each in self._alone.items():
            kin.setdefault((kin_of(name), each.features), []).append(name)
        self._experts = [names for names in kin.values() if len(names) > 1]
        for name in itertools.chain(*self._experts):
            del self._alone[name]
        self._passing: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._pooled: dict[str, Mapping[str, State]] = {}
        self._empty = set[str]()

    def see(self, name: str, batch: int, x: torch.Tensor) -> bool:
        """Take vectors; return whether the batch has reached all sites."""
        if name not in self._alone:
            self._shelf.add((name, batch), x)
            return False
        self._passing.setdefault((name, batch), []).append(x)
        once = not self._experts and not any(site.repeated for site in self._sites)
        return once and all((other, batch) in self._passing for other in self._alone)

    def add(self, together: Sequence[int], floats: Callable[[tuple[str, int]], torch.Tensor | None]) -> None:
        """Add what batches gave to the sums of sites that stand alone.

        together: their numbers. floats: returns vectors of the float model by site and batch, if known.
        """
        jobs: list[Callable[[], None]] = []
        for name, each in self._alone.items():
            keys = [(name, batch) for batch in together if (name, batch) in self._passing]
            jobs += each.jobs([Seen.of(key[1], self._passing.pop(key), floats(key)) for key in keys])
        in_threads(lambda job: job(), jobs, self._workers)

    def finish(self) -> None:
        """Sum the vectors of experts, once all batches have run."""
        for names in self._experts:
            pooled: Mapping[str, State] | None = None
            counts = set[int]()
            for some in self._at_once(names):
                made = {name: self._make(self._site_of[name]) for name in some}
                in_threads(self._learn, [*made.items()], self._workers)
                for name, each in made.items():
                    counts.add(each.vectors)
                    self._empty |= set() if each.vectors else {name}
                    pooled = each.states if pooled is None else each.added_to(pooled)
                    each.put(self._shelf, name)
            if len(counts) > 1 and pooled is not None:  # a router sent them different vectors
                self._pooled |= dict.fromkeys(names, pooled)

    @property
    def unreached(self) -> set[str]:
        """Readers of unreached sites without kin to learn from."""
        empty = {name for name, each in self._alone.items() if not each.vectors}
        empty |= self._empty - self._pooled.keys()
        return {name for first in empty for name in self._site_of[first].readers}

    def turns(self, tasks: Sequence[WeightTask]) -> Iterator[list[WeightTask]]:
        """Yield tasks with statistics in memory together, experts last."""
        by_site: dict[str, list[WeightTask]] = {}
        for task in tasks:
            by_site.setdefault(self._site_of[task.layer].readers[0], []).append(task)
        yield [task for name, own in by_site.items() if name in self._alone for task in own]
        for names in self._experts:
            for some in self._at_once([name for name in names if name in by_site]):
                yield [task for name in some for task in by_site[name]]

    def _at_once(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        return (names[at : at + self._workers] for at in range(0, len(names), self._workers))

    def data(self, layers: Iterable[str]) -> dict[str, LayerData]:
        """Return the statistics and vectors of layers, by name."""
        found: dict[str, LayerData] = {}
        for site in dict.fromkeys(self._site_of[layer] for layer in layers):
            name = site.readers[0]
            made = self._alone[name].data() if name in self._alone else self._of_expert(name)
            found |= dict.fromkeys(site.readers, made)
        return found

    def _of_expert(self, name: str) -> LayerData:
        each = self._make(self._site_of[name])
        each.take(self._shelf, name)
        for wave in self._waves(name):
            each.sample(wave)
        return each.data(self._pooled.get(name))

    def _learn(self, expert: tuple[str, SiteInputs]) -> None:
        name, each = expert
        for wave in self._waves(name):
            each.learn(wave)

    def _waves(self, name: str) -> Iterator[list[Seen]]:
        """Yield the vectors of an expert, in groups of batches."""
        for first in range(0, self._batches, EVERY):
            found = ((batch, self._shelf.get((name, batch))) for batch in range(first, first + EVERY))
            yield [Seen(batch=batch, inputs=x, floats=x) for batch, x in found if x is not None]
