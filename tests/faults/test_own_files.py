"""Files next to an output: a search and the cache of an evaluation, with a fault at any call."""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.checkpoints import write_llama
from tests.faults.calls import TAKES_SPACE, Call, Fault, Layer
from tests.faults.children import Children, Job
from tests.faults.stage import NEIGHBOR, Ran, digests, run_here
from tests.faults.test_errors import ERRORS, MAY_PASS
from tests.oracles import tiny_models
from tests.oracles.tiny_tokenizers import TEXT

pytestmark = pytest.mark.rotating

SEARCH = ("--budget", "9bpw", "--candidates", "int4:g32,int8:channel", "--workers", "1", "--json")
EVAL = ("--context", "16", "--windows", "2", "--continuations", "1", "--no-noise-floor", "--json")
SAFE_TO_FAIL = (*MAY_PASS, "flock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A command that writes files into a folder. golden: those of an undisturbed run, but for a journal."""

    source: Path
    work: Path
    arguments: tuple[str, ...]
    golden: dict[str, str]
    before: dict[str, str]

    @staticmethod
    def of(source: Path, work: Path, *arguments: str) -> Place:
        place = Place(source=source, work=work, arguments=arguments, golden={}, before=digests(source))
        place.clear()
        ran = run_here(arguments)
        assert ran.status == 0, ran.err
        place.golden.update(place.files())
        place.clear()
        return place

    def clear(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        (self.work / NEIGHBOR).write_text("not yours")

    def run(self, fault: Fault | None = None) -> tuple[Ran, Layer]:
        layer = Layer(root=self.work, fault=fault)
        with layer.installed():
            return run_here(self.arguments), layer

    def files(self) -> dict[str, str]:
        found = digests(self.work)
        assert found.pop(NEIGHBOR) == hashlib.sha256(b"not yours").hexdigest()
        return {name: digest for name, digest in found.items() if not name.endswith(".search")}

    def check(self, *, drafts: bool = False) -> None:
        """Assert that files are absent or whole, and that nothing else is there."""
        found = self.files()
        hidden = {name for name in found if name.startswith(".zeropoint.")}
        assert drafts or not hidden
        assert {(name, d) for name, d in found.items() if name not in hidden} <= self.golden.items()
        assert digests(self.source) == self.before

    def check_resumed(self, *, drafts: bool = False) -> None:
        self.check(drafts=drafts)
        if self.golden.items() <= self.files().items():
            return  # all was there when the fault came
        ran = run_here(self.arguments)
        assert ran.status == 0, ran.err
        assert self.golden.items() <= self.files().items()


@pytest.fixture(scope="module", params=["search", "eval"])
def made(disk: Path, request: pytest.FixtureRequest) -> Place:
    folder = disk / f"own-files-{request.param}"
    folder.mkdir()
    work = folder / "work"
    if request.param == "search":
        source = write_llama(folder / "source")
        names = ("-o", str(work / "recipe.yaml"), "--plot", str(work / "plot.svg"))
        return Place.of(source, work, "search", str(source), *SEARCH, *names)
    source = folder / "source"
    tiny_models.write(source, "llama")
    (folder / "text.txt").write_text(TEXT)
    names = ("--text", str(folder / "text.txt"), "--cache", str(work / "cache.safetensors"))
    return Place.of(source, work, "eval", str(source), "--against", str(source), *EVAL, *names)


@pytest.fixture
def place(made: Place) -> Iterator[Place]:
    made.clear()
    yield made
    made.clear()


def refused(place: Place, call: Call, fault: Fault) -> bool:
    """Let one fault strike: a line on stderr, whole files or none, and the same command ends as it should."""
    place.clear()
    ran, layer = place.run(fault)
    if not layer.struck:
        return False
    if ran.status == 0:
        assert set(layer.struck) <= {*SAFE_TO_FAIL}, (call, fault)
        assert place.files() == place.golden
        return True
    assert ran.err.startswith("error: "), ran.err
    assert ran.err.count("\n") == 1, ran.err
    assert str(place.work) in ran.err, ran.err
    place.check_resumed(drafts="unlink" in layer.struck)
    return True


def faults_of(calls: list[Call]) -> list[tuple[Call, Fault]]:
    """Return each call with errors that come once, and that last."""
    single = [
        (c, Fault(at=c.number, kind="error", code=code))
        for c in calls
        for code in ERRORS.get(c.name, (errno.EIO, errno.ENOSPC))
    ]
    kinds = ((errno.ENOSPC, TAKES_SPACE), (errno.EIO, tuple(ERRORS)))
    return single + [
        (c, Fault(at=c.number, kind="error", code=code, lasting=True, names=names))
        for c in calls
        for code, names in kinds
        if c.name in names
    ]


def recorded(place: Place) -> list[Call]:
    ran, layer = place.run()
    assert ran.status == 0, ran.err
    assert len(layer.calls) > 4
    return layer.calls


def test_files_are_whole_or_absent_after_some_refused_calls(place: Place) -> None:
    some = random.Random(1).sample(faults_of(recorded(place)), 8)
    assert sum(refused(place, call, fault) for call, fault in some) > 4


@pytest.mark.slow
def test_files_are_whole_or_absent_after_every_refused_call(place: Place) -> None:
    every = faults_of(recorded(place))
    assert sum(refused(place, call, fault) for call, fault in every) > len(every) // 2


def ended_there(children: Children, place: Place, fault: Fault) -> bool:
    """Let a process end at a call, and run the same command again."""
    place.clear()
    children.run(Job(arguments=place.arguments, root=place.work, fault=fault))
    place.check_resumed(drafts=True)
    return place.golden.items() <= place.files().items()


def kills(calls: list[Call]) -> list[Fault]:
    torn = [Fault(at=call.number, kind="tear") for call in calls if len(call.data) > 1]
    return [*(Fault(at=call.number, kind="kill") for call in calls), *torn]


def test_a_process_that_is_killed_at_some_calls_is_carried_on(children: Children, place: Place) -> None:
    some = random.Random(2).sample(kills(recorded(place)), 2)
    assert all(ended_there(children, place, fault) for fault in some)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_call_is_carried_on(children: Children, place: Place) -> None:
    assert all(ended_there(children, place, fault) for fault in kills(recorded(place)))


def test_one_signal_and_two_end_a_process_that_is_carried_on(children: Children, place: Place) -> None:
    calls = recorded(place)
    middle, names = calls[len(calls) // 2].number, ("write", "pwrite", "fsync", "fdatasync", "rename", "link")
    for lasting in (False, True):
        fault = Fault(at=middle, kind="signal", code=signal.SIGINT, lasting=lasting, names=names)
        assert ended_there(children, place, fault)


def test_of_two_processes_at_once_one_writes_and_the_other_says_so(children: Children, place: Place) -> None:
    jobs = [Job(arguments=place.arguments, root=place.work, pace=number) for number in range(2)]
    pids = [children.start(job) for job in jobs]
    for pid in pids:
        children.go(pid)
    ended = [children.wait(pid) for pid in pids]
    assert 0 in [each.status for each in ended], ended
    for each in ended:
        assert each.status in (0, 1, 2), each
        assert each.err.count("\n") == (each.status != 0), each
    assert place.files() == place.golden
