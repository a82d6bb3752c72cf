"""Quick runs take covers of crossed tests, and a thirtieth of their other cases and of rotating tests."""

import itertools

import pytest
from tests import selection

PRODUCT = list(itertools.product(range(4), range(3), range(2)))
CROSSED = """
import pytest

@pytest.mark.crossed
@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize(("a", "b"), [(n, -n) for n in range(5)])
@pytest.mark.parametrize("d", range(4))
def test_a_product(a, b, c, d):
    pass

def test_alone():
    pass
"""
ROTATING = """
import pytest

pytestmark = pytest.mark.rotating

@pytest.mark.parametrize("n", range(200))
def test_many(n):
    pass

def test_one():
    pass

@pytest.mark.slow
def test_always_slow():
    pass
"""
MARKS = "[pytest]\nmarkers =\n slow: s\n crossed: c\n rotating: r\n"
pytest_plugins = ["pytester"]


def test_a_cover_holds_each_pair_and_little_more() -> None:
    taken = selection.covering(PRODUCT, 2)
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(case[first], case[second]) for case in PRODUCT}
        assert pairs == {(PRODUCT[n][first], PRODUCT[n][second]) for n in taken}
    assert len(taken) <= 14  # 12 would do: the pairs of the two longest parameters


def test_a_cover_of_two_parameters_holds_each_value() -> None:
    cases = list(itertools.product(range(7), range(3)))
    assert len(selection.covering(cases, 1)) == 7


def test_within_the_parts_every_case_is_chosen_once() -> None:
    chosen = [selection.part_of(f"test_product[{n}]") for n in range(1000)]
    assert set(chosen) == set(range(selection.PARTS))
    assert max(chosen.count(part) for part in range(selection.PARTS)) < 150


def test_quick_and_slow_runs_take_every_case_between_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(CROSSED)
    pytester.makeini(MARKS)
    taken = {}
    for commit in ("first", "second"):
        monkeypatch.setattr(selection, "commit", lambda commit=commit: commit)
        for mark in ("slow", "not slow"):
            done = pytester.inline_run("-m", mark, plugins=[selection])
            passed, skipped, failed = done.listoutcomes()
            assert not skipped
            assert not failed
            taken[commit, mark] = {report.nodeid.partition("::")[2] for report in passed}
        assert len(taken[commit, "slow"]) + len(taken[commit, "not slow"]) == 61
        assert not taken[commit, "slow"] & taken[commit, "not slow"]
        assert "test_alone" in taken[commit, "not slow"]
        assert 20 <= len(taken[commit, "not slow"]) <= 32
    assert taken["first", "not slow"] != taken["second", "not slow"]


def test_rotating_tests_are_quick_in_one_commit_of_thirty(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(ROTATING)
    pytester.makeini(MARKS)
    taken: list[set[str]] = []
    for turn in range(selection.PARTS):
        commit = next(str(n) for n in range(1000) if selection.part_of(str(n)) == turn)
        monkeypatch.setattr(selection, "commit", lambda commit=commit: commit)
        passed, _, _ = pytester.inline_run("-m", "not slow", plugins=[selection]).listoutcomes()
        taken.append({report.nodeid.partition("::")[2] for report in passed})
    assert sum(map(len, taken)) == len(set[str]().union(*taken)) == 201
    assert max(map(len, taken)) < 35
    passed, _, _ = pytester.inline_run("-m", "not slow", "--every-turn", plugins=[selection]).listoutcomes()
    assert len(passed) == 201


def test_without_a_repository_the_choice_is_fixed(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert selection.commit() == ""
