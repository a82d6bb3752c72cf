"""Which tests are quick of those that cost more than they find: covers of products, and turns by the commit.

A test marked ``crossed`` runs over a product of parameters: most faults show with two values together. Quick
runs take

- cases that hold each pair of values of any two parameters (each value, where there are only two parameters;
  none, where there is one),
- a thirtieth of the others, by the hash of the commit, so that cases of all kinds return within some commits.

Of tests marked ``rotating``, which start processes, interpret kernels or repeat what others show at length,
quick runs take a thirtieth by the hash of the commit, and with ``--every-turn`` all.

The others are slow: ``pytest -m slow`` runs all of them, and ``pytest -m ""`` runs a case by its name.
"""

import itertools
import subprocess
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

PARTS = 30
"""Parts of a product, and of rotating tests, of which each commit takes one."""
ROOT = Path(__file__).resolve().parents[1]

Case = tuple[Hashable, ...]
Together = tuple[tuple[int, Hashable], ...]


def commit() -> str:
    """Hash of the checked-out commit, or an empty text outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def part_of(text: str) -> int:
    """Part in which ``text`` lies, from 0 to ``PARTS`` - 1."""
    return zlib.crc32(text.encode()) % PARTS


def together(case: Case, strength: int) -> Iterator[Together]:
    """Yield the combinations of ``strength`` values in a case."""
    return itertools.combinations(enumerate(case), strength)


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Indices of cases that hold every combination of ``strength`` values that any case holds.

    Greedy: each time the case with the most combinations that are still missing, the first of several.
    """
    missing = {combination for case in cases for combination in together(case, strength)}
    taken: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda n: sum(c in missing for c in together(cases[n], strength)))
        missing.difference_update(together(cases[best], strength))
        taken.add(best)
    return taken


def identity(value: object) -> Hashable:
    """What tells a value of a parameter from others; 1 and True are two."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def given_together(item: pytest.Function) -> list[list[str]]:
    """Names of the parameters of a test, by the decorator that gives them."""
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[n.strip() for n in (m.split(",") if isinstance(m, str) else m)] for m in marks]
    fixtures = set(item.callspec.params) - {name for group in groups for name in group}
    return [*groups, *([name] for name in sorted(fixtures))]


def crossed_values(items: Sequence[pytest.Function]) -> list[Case]:
    """Values of each item, one for each decorator or fixture that has several."""
    axes = [
        [tuple(identity(item.callspec.params[name]) for name in group) for item in items]
        for group in given_together(items[0])
    ]
    return list(zip(*(axis for axis in axes if len(set(axis)) > 1), strict=True)) or [()] * len(items)


def quick_cases(items: Sequence[pytest.Function], part: int) -> set[int]:
    """Indices of the items of one test that quick runs take."""
    cases = crossed_values(items)
    strength = min(2, len(cases[0]) - 1)
    chosen = {n for n, item in enumerate(items) if part_of(item.nodeid) == part}
    return chosen | (covering(cases, strength) if strength > 0 else set()) or {part % len(items)}


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Function]]:
    """Items of each test that is marked as crossed, without those that are slow in any case."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        crossed = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if crossed and item.get_closest_marker("crossed") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that waits for no turn."""
    parser.addoption("--every-turn", action="store_true", help="take all rotating tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what neither pairs nor the commit choose."""
    now = commit()
    part = part_of(now)
    for cases in by_test(items).values():
        quick = quick_cases(cases, part)
        for n, item in enumerate(cases):
            if n not in quick:
                item.add_marker(pytest.mark.slow)
    for item in [] if config.getoption("--every-turn") else items:
        if item.get_closest_marker("rotating") and part_of(item.nodeid) != part:
            item.add_marker(pytest.mark.slow)
