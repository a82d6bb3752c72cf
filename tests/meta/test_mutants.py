"""The planted bugs still fit the sources: each text is there once, each test exists, each room has a bug."""

import ast
from collections import Counter

import pytest
from tests.mutants.mutant import PACKAGE, ROOT, DoesNotApplyError, Mutant, catalog, rooms

MUTANTS = catalog()


def planted(mutant: Mutant) -> str:
    """Return the source of a file with the bug in it."""
    return mutant.applied((ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8"))


def exists(test: str) -> bool:
    """Tell whether a folder or file is there, and holds the test where one is named."""
    file, _, name = test.partition("::")
    if not name:
        return (ROOT / file).exists()
    names = {n.name for n in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if hasattr(n, "name")}
    return name.partition("[")[0].rpartition("::")[2] in names


def test_each_bug_fits_its_file_and_leaves_python() -> None:
    assert all(isinstance(ast.parse(planted(mutant), mutant.file), ast.Module) for mutant in MUTANTS)


def test_a_text_that_is_absent_or_there_twice_is_refused() -> None:
    mutant = Mutant(name="n", file="f.py", old="b", new="c", tests=())
    assert mutant.applied("abd") == "acd"
    for source in ("ad", "abbd"):
        with pytest.raises(DoesNotApplyError, match=r"must occur once in f\.py"):
            mutant.applied(source)


def test_the_tests_that_see_a_bug_exist() -> None:
    assert [test for mutant in MUTANTS for test in mutant.tests or ("none",) if not exists(test)] == []


def test_each_room_has_a_bug_with_a_name_of_its_own() -> None:
    assert rooms() - {mutant.room for mutant in MUTANTS} == set()
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_there_are_sixty_bugs() -> None:
    assert len(MUTANTS) >= 60
