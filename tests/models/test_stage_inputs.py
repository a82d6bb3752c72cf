"""Statistics of experts, made one at a time: the sums that all of them at once would give."""

import functools
from pathlib import Path

import pytest
import torch

from zeropoint.methods import method_named
from zeropoint.models.site_inputs import Seen, Shelf, SiteInputs, drawn
from zeropoint.models.sites import Site
from zeropoint.models.solutions import WeightTask
from zeropoint.models.stage_inputs import StageInputs
from zeropoint.schemes import Scheme

EXPERTS, FEATURES, BATCHES, WORKERS = 5, 8, 11, 2
METHOD = method_named("shift+gptq")
SITES = [Site(readers=(f"experts.{n}.gate", f"experts.{n}.up"), stage=1) for n in range(EXPERTS)]
ROUTER = Site(readers=("router",), stage=1)


def empty(_: Site) -> SiteInputs:
    return SiteInputs.of([METHOD], FEATURES, BATCHES)


def vectors(expert: int, batch: int) -> torch.Tensor | None:
    """What an expert sees of a batch: the last one nothing at all, others nothing of some."""
    made = torch.Generator().manual_seed(100 * expert + batch)
    count = int(torch.randint(0, 9, (), generator=made))
    return torch.randn(count, FEATURES, generator=made) if count and expert + 1 < EXPERTS else None


def filled(shelf: Shelf, *, routed: bool = True) -> StageInputs:
    stage = StageInputs([ROUTER, *SITES], empty, shelf, batches=BATCHES, workers=WORKERS)
    for first in range(0, BATCHES, 8):
        together = range(first, min(first + 8, BATCHES))
        for batch in together:
            stage.see("router", batch, torch.ones(2, FEATURES))
            for expert, site in enumerate(SITES):
                x = vectors(expert, batch) if routed else torch.ones(3, FEATURES) * expert
                if x is not None:
                    for part in x.split(2):  # a layer may be called several times
                        assert not stage.see(site.readers[0], batch, part)
        stage.add(together, lambda _: None)
    stage.finish()
    return stage


@pytest.mark.parametrize("folder", [False, True])
def test_experts_have_the_sums_that_all_at_once_would_give(folder: bool, tmp_path: Path) -> None:
    made = [empty(site) for site in SITES]
    for first in range(0, BATCHES, 8):
        for expert, each in enumerate(made):
            found = ((n, vectors(expert, n)) for n in range(first, min(first + 8, BATCHES)))
            for job in each.jobs([Seen(batch=n, inputs=x, floats=x) for n, x in found if x is not None]):
                job()
    pooled = {
        need: {key: functools.reduce(torch.add, (each.states[need][key] for each in made)) for key in state}
        for need, state in made[0].states.items()
    }
    with Shelf(tmp_path if folder else None) as shelf:
        stage = filled(shelf)
        for site, each in zip(SITES, made, strict=True):
            found = stage.data([site.readers[1]])
            assert found.keys() == set(site.readers)
            data, plain = found[site.readers[1]], each.data()
            for need, state in each.states.items():
                wanted = drawn(state, pooled[need])
                assert all(torch.equal(data.statistics[need].state[key], wanted[key]) for key in wanted)
            for ours, theirs in ((data.seen, plain.seen), (data.held_out, plain.held_out)):
                assert (ours is None) == (theirs is None)
                assert ours is None or theirs is None or torch.equal(ours.inputs, theirs.inputs)
            assert data.own == plain.own


def test_as_many_experts_as_workers_are_in_memory_at_the_same_time() -> None:
    names = [name for site in [*SITES, ROUTER] for name in site.readers]
    tasks = [WeightTask(name=n, layer=n, scheme=Scheme.parse("int4:g8"), method=METHOD) for n in names]
    with Shelf(None) as shelf:
        stage = filled(shelf)
        turns = [[task.layer for task in turn] for turn in stage.turns(tasks)]
    one, two, three = (
        [name for site in SITES[at : at + WORKERS] for name in site.readers] for at in range(0, EXPERTS, 2)
    )
    assert turns == [["router"], one, two, three]


def test_sites_that_see_equal_numbers_of_vectors_borrow_nothing() -> None:
    with Shelf(None) as shelf:
        stage = filled(shelf, routed=False)
        (state,) = (stage.data(["experts.2.up"])["experts.2.up"].statistics["gram"].state,)
    assert float(state["vectors"]) == 3 * (BATCHES - 1)  # the eighth batch is held out
    assert float(next(value for value in state.values() if value.ndim == 2)[0, 0]) == 3 * (BATCHES - 1) * 4
