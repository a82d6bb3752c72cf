"""Shards of the slow suite for pytest, and pieces that should run again, named after runs of the suite."""

import textwrap

import pytest
from tests import slow_pieces


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that the command of a sharded piece gives."""
    parser.addoption("--shard", metavar="K/N", help="run the Kth of N parts, which is every Nth test")


@pytest.hookimpl(trylast=True)  # of the tests that -m chooses, which was there before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the shard that was asked for."""
    asked = config.getoption("--shard")
    if asked is None:
        return
    number, shards = map(int, asked.split("/"))
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % shards != number - 1])
    items[:] = items[number - 1 :: shards]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the pieces that are due, which fails nothing; without git there is nothing to say."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    table = slow_pieces.Table.read()
    late = slow_pieces.due_now(table)
    if late:
        said = f"slow pieces not run for {slow_pieces.FRESH} commits (make test-slow PIECE=name): "
        names = ", ".join(slow_pieces.titles(table, late))
        terminalreporter.write_line(textwrap.fill(said + names, 110, break_on_hyphens=False))
