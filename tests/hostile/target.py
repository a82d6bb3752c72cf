"""What is fuzzed: a parser, inputs to begin with, and how they are changed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.mutations import mutate

from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, ZeropointError

Decide = Callable[[bytes], str]
Mutate = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser: inputs to begin with, how they are changed, and what says "accepted", "refused" and so on."""

    name: str
    seeds: Sequence[bytes]
    decide: Decide
    mutate: Mutate = mutate


def refusal(judge: Callable[[Path], object], path: Path) -> str | None:
    """Return the message, one printable line, with which ``judge`` refuses what is at a path, or None."""
    message = None
    try:
        judge(path)
    except ZeropointError as error:
        message = str(error)
    assert message is None or message.isprintable(), message
    return message


def in_directory(folder: Path, name: str, judge: Callable[[Path], object]) -> Decide:
    """Return what puts an input at ``folder / name`` and says what ``judge`` makes of the folder."""

    def decide(content: bytes) -> str:
        (folder / name).write_bytes(content)
        return "accepted" if refusal(judge, folder) is None else "refused"

    return decide


def read_whole(place: Path) -> None:
    """Read a checkpoint as ``inspect`` and ``verify`` do; raises ZeropointError where one finds problems."""
    problems = inspect_checkpoint(place).problems
    if problems:
        raise CheckpointError("; ".join(problems))
    verify(place, limits=Limits(workers=1)).require()
