"""The same faults put in the way by the kernel itself, through strace, which knows nothing of our layer."""

import json
import signal
from pathlib import Path

import pytest
from tests.faults.children import Children
from tests.faults.kernel import Seen, injected, traced, why_not
from tests.faults.stage import Ran, Stage
from tests.faults.test_errors import MAY_PASS

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.rotating]


def witnessed(children: Children, stage: Stage, log: Path) -> list[Seen]:
    """Return the calls of an undisturbed run that change files."""
    ended, seen = traced(children, stage.job(), log)
    assert ended.status == 0, ended.err
    stage.check_complete()
    stage.tally.compared = 0
    return [s for s in seen if s.changes]


def killed(children: Children, stage: Stage, seen: Seen, log: Path) -> None:
    """Let the kernel kill a run at a call."""
    stage.clear()
    ended = injected(children, stage.job(), seen, "signal=SIGKILL", log=log)
    assert ended.signal == signal.SIGKILL, (seen, ended)
    stage.tally.points += 1
    stage.tally.faults += 1
    stage.check_resumed()


def refused(children: Children, stage: Stage, seen: Seen, code: str, *, log: Path) -> None:
    """Let the kernel refuse a call."""
    stage.clear()
    ended = injected(children, stage.job(), seen, f"error={code}", log=log)
    stage.tally.points += 1
    stage.tally.faults += 1
    if ended.status == 0:
        assert seen.name in MAY_PASS, seen
        assert stage.is_complete
        return
    assert ended.status is not None, ended
    stage.check_failed(Ran(status=ended.status, out=ended.out, err=ended.err))
    stage.check_resumed()


def test_the_kernel_sees_the_calls_that_the_layer_recorded(
    children: Children, stage: Stage, tmp_path: Path
) -> None:
    record = tmp_path / "calls.json"
    ended, seen = traced(children, stage.job(record=record), tmp_path / "strace.log")
    assert ended.status == 0, ended.err
    stage.check_complete()
    recorded = [(c["name"], c["path"], c["to"]) for c in json.loads(record.read_text())]
    renamed = {"rename", "replace"}
    expected = [
        ("rename", to) if name in renamed else ("unlink" if name == "remove" else name, path)
        for name, path, to in recorded
        if name != "close"  # of which the kernel sees far more
        and not (name == "open" and (stage.work / path).is_dir())
    ]
    assert [(s.name, s.path) for s in seen if s.changes] == expected


def test_a_run_killed_by_the_kernel_resumes(children: Children, stage: Stage, tmp_path: Path) -> None:
    some = witnessed(children, stage, tmp_path / "log")[::19]
    for seen in some:
        killed(children, stage, seen, tmp_path / "log")
    assert stage.tally.resumes == len(some) > 5


@pytest.mark.slow
def test_a_run_killed_by_the_kernel_at_any_call_resumes(
    children: Children, stage: Stage, tmp_path: Path
) -> None:
    every = witnessed(children, stage, tmp_path / "log")
    for seen in every:
        killed(children, stage, seen, tmp_path / "log")
    assert stage.tally.resumes == len(every)


@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_a_run_refused_by_the_kernel_resumes(
    children: Children, stage: Stage, tmp_path: Path, code: str
) -> None:
    some = witnessed(children, stage, tmp_path / "log")[::41]
    for seen in some:
        refused(children, stage, seen, code, log=tmp_path / "log")
    assert stage.tally.points == len(some) > 2


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_a_run_refused_by_the_kernel_at_any_call_resumes(
    children: Children, stage: Stage, tmp_path: Path, code: str
) -> None:
    every = witnessed(children, stage, tmp_path / "log")
    for seen in every:
        refused(children, stage, seen, code, log=tmp_path / "log")
    assert stage.tally.points == len(every)


def test_a_call_that_is_interrupted_is_made_again(children: Children, stage: Stage, tmp_path: Path) -> None:
    first = {seen.call: seen for seen in reversed(witnessed(children, stage, tmp_path / "log"))}
    # Of the rest, POSIX says that they are not interrupted.
    for call in sorted(first.keys() & {"openat", "pwrite64", "fsync", "fdatasync", "ftruncate", "fallocate"}):
        stage.clear()
        ended = injected(children, stage.job(), first[call], "error=EINTR", log=tmp_path / "log")
        assert (ended.status, ended.err) == (0, ""), call
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_complete()
    assert stage.tally.points >= 5
