"""The solver against all choices there are, and what it says of its own answers."""

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropoint.errors import RangeError
from zeropoint.search import knapsack
from zeropoint.search.knapsack import Groups, frontier, solve

pytestmark = pytest.mark.rotating

Options = list[tuple[int, float]]


def least(groups: Groups, budget: int) -> Fraction | None:
    """Return the least loss of all choices within the budget, without rounding."""
    found = [
        sum(Fraction(loss) for _, loss in choice)
        for choice in itertools.product(*groups)
        if sum(size for size, _ in choice) <= budget
    ]
    return min(found, default=None)


def exact(groups: Groups, choice: Sequence[int]) -> tuple[int, Fraction]:
    picked = [options[at] for options, at in zip(groups, choice, strict=True)]
    return sum(size for size, _ in picked), sum((Fraction(loss) for _, loss in picked), Fraction(0))


# Multiples of a power of two, so that integers of 61 bits hold each loss and each sum.
OPTION = st.tuples(st.integers(0, 40), st.integers(0, 2000).map(lambda n: n / 64))
GROUPS = st.lists(st.lists(OPTION, min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(GROUPS, st.integers(0, 240))
def test_no_choice_within_the_budget_has_less_loss(groups: list[Options], budget: int) -> None:
    want = least(groups, budget)
    if want is None:
        with pytest.raises(RangeError, match="is less than the smallest allocation"):
            solve(groups, budget)
        return
    found = solve(groups, budget)
    size, loss = exact(groups, found.choice)
    assert loss == want
    assert size == found.size <= budget
    assert found.optimal
    assert found.loss == found.bound == float(want)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(10**6, 10**8), st.floats(1e-9, 1.0)), min_size=1, max_size=4),
                min_size=1, max_size=6), st.floats(0, 1))  # fmt: skip
def test_any_floats_and_sizes_in_bytes_are_solved_to_the_last_digits(
    groups: list[Options], share: float
) -> None:
    low = sum(min(size for size, _ in options) for options in groups)
    high = sum(max(size for size, _ in options) for options in groups)
    budget = low + int(share * (high - low))
    found, want = solve(groups, budget), least(groups, budget)
    assert want is not None
    size, loss = exact(groups, found.choice)
    assert size <= budget
    assert float(loss - want) <= len(groups) * 2.0**-60 * sum(max(loss for _, loss in g) for g in groups)


def layers(count: int, kinds: int, dice: random.Random) -> Groups:
    """Return layers of a few shapes whose losses fall with their bits, as those of models do."""
    shapes = [dice.randrange(1, 60) * 2**16 for _ in range(6)]
    groups = []
    for _ in range(count):
        values, weight = dice.choice(shapes), dice.lognormvariate(0, 1.5)
        bits = sorted(dice.uniform(2, 9) for _ in range(kinds))
        groups.append([(int(values * b / 8), weight * 4**-b * dice.uniform(0.6, 1.6)) for b in bits])
    return groups


def relaxed(groups: Groups, budget: int) -> float:
    """Return a bound of all choices: the best multiplier of many, each of which bounds them."""
    sizes = np.full((len(groups), max(map(len, groups))), 1 << 60, dtype=np.float64)
    losses = np.full_like(sizes, 1e30)
    for number, options in enumerate(groups):
        for at, (size, loss) in enumerate(options):
            sizes[number, at], losses[number, at] = size, loss
    return max(
        float((losses + m * sizes).min(axis=1).sum() - m * budget) for m in np.geomspace(1e-16, 1e-4, 4000)
    )


@pytest.mark.parametrize("share", [0.4, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.8))])
def test_thousands_of_layers_are_solved_with_proof_and_close_to_the_relaxed_bound(share: float) -> None:
    dice = random.Random(7)
    groups = layers(2000, 20, dice)
    low, high = (sum(pick(size for size, _ in g) for g in groups) for pick in (min, max))
    budget = int(low + share * (high - low))
    found = solve(groups, budget)
    assert found.optimal
    assert found.size <= budget
    assert relaxed(groups, budget) <= found.loss * (1 + 1e-9)
    assert found.loss <= relaxed(groups, budget) * 1.001


def test_a_search_that_is_cut_short_says_how_far_it_may_be_from_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(3)
    # One loss for a byte: nothing tells options apart, so that states pile up.
    groups = [[(s, 1e6 - s) for s in {dice.randrange(10**6) for _ in range(4)}] for _ in range(24)]
    budget = sum(max(size for size, _ in g) for g in groups) // 2
    whole = solve(groups, budget)
    monkeypatch.setattr(knapsack, "_FIRST", 2)
    monkeypatch.setattr(knapsack, "_STATES", 3)
    short = solve(groups, budget)
    assert whole.optimal
    assert short.bound <= whole.loss <= short.loss
    assert not short.optimal


def test_the_curve_holds_the_best_allocation_of_each_of_its_sizes() -> None:
    groups = layers(5, 4, random.Random(1))
    points = frontier(groups)
    assert points[0][0] == sum(min(size for size, _ in g) for g in groups)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))
    for size, loss in points:
        want = least(groups, size)
        assert want is not None
        assert loss == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[]], "a group has no options; give it at least one"),
        ([[(1, math.nan)]], r"option \(size 1, loss nan\) must have numbers from 0 on"),
        ([[(1, math.inf)]], r"option \(size 1, loss inf\) must have numbers from 0 on"),
        ([[(-1, 0.0)]], r"option \(size -1, loss 0.0\) must have numbers from 0 on"),
        ([[(4, 1.0)], [(9, 0.0)]], r"budget \(=12 bytes\) is less than the smallest allocation, 13 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(groups: list[Options], message: str) -> None:
    with pytest.raises(RangeError, match=message):
        solve(groups, 12)


def test_nothing_to_choose_is_an_answer_too() -> None:
    assert solve([], 0).choice == ()
    assert solve([[(3, 0.0), (2, 0.0)]], 9).choice == (1,)
