"""What the tests of the command line share: a checkpoint, and a way to call the command."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.checkpoints import write_llama

from zeropoint.cli.main import main


@dataclass(frozen=True)
class Called:
    status: int
    out: str
    err: str


Call = Callable[..., Called]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Carry out a command line in this process."""

    def run(*arguments: object) -> Called:
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Called(status, captured.out, captured.err)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of two layers."""
    return write_llama(tmp_path / "model")
