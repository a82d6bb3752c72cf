"""The system refuses one call, or all of a kind from one on; then it recovers, and the same command again."""

import errno
import random
from collections.abc import Sequence

import pytest
from tests.faults.calls import TAKES_SPACE, Call, Fault
from tests.faults.stage import Stage

pytestmark = pytest.mark.rotating

FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.EROFS)
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*FULL, *BROKEN, errno.EMFILE, errno.EACCES),
    "mkdir": (*FULL, *BROKEN),
    "pwrite": (*FULL, *BROKEN, errno.EFBIG),
    "write": (*FULL, *BROKEN, errno.EFBIG),
    "copy_file_range": (*FULL, *BROKEN, errno.EFBIG),
    "posix_fallocate": (*FULL, *BROKEN, errno.EFBIG),
    "ftruncate": BROKEN,
    "fsync": (*FULL, *BROKEN),
    "fdatasync": (*FULL, *BROKEN),
    "rename": (*FULL, *BROKEN, errno.EXDEV),
    "replace": (*FULL, *BROKEN, errno.EXDEV),
    "unlink": (*BROKEN, errno.EACCES),
    "remove": (*BROKEN, errno.EACCES),
    "rmdir": BROKEN,
    "close": (errno.EIO, *FULL),
    "flock": (errno.ENOLCK,),
}
# Of what only tidies up, the failure may be passed over when everything is in place.
MAY_PASS = ("unlink", "remove", "rmdir", "close")


def single(calls: list[Call]) -> list[tuple[Call, Fault]]:
    """Return each call with each of its errors."""
    return [(c, Fault(at=c.number, kind="error", code=code)) for c in calls for code in ERRORS[c.name]]


def lasting(calls: list[Call]) -> list[tuple[Call, Fault]]:
    """Return each call as the first on a disk that is full, or broken, from then on."""
    kinds = [(code, TAKES_SPACE) for code in FULL] + [(code, tuple(ERRORS)) for code in BROKEN]
    return [
        (c, Fault(at=c.number, kind="error", code=code, lasting=True, names=names))
        for c in calls
        for code, names in kinds
        if c.name in names
    ]


def refused(stage: Stage, call: Call, fault: Fault, *, plant: str | None = None) -> None:
    """Let one fault strike, and check what is said, what stays, and what the same command makes of it."""
    stage.clear()
    ran, layer = stage.run(fault, plant=plant)
    assert layer.struck, "the run made fewer calls than the recorded one"
    stage.tally.points += 1
    stage.tally.faults += len(layer.struck)
    if ran.status == 0:
        # Threads may have changed places since the calls were counted, so it may have been another one. Where
        # the kernel has no lock to give, a file with the owner's name replaces it.
        unnoticed = [name for name in layer.struck if name not in MAY_PASS]
        assert not unnoticed or (unnoticed, fault.code) == (["flock"], errno.ENOLCK), (
            f"{unnoticed} failed with {fault.code}, and nobody noticed; counted: {call.name} of {call.path}"
        )
        assert stage.is_complete
        return
    try:
        stage.check_failed(ran)
        stage.check_resumed()
    except AssertionError as error:
        raise AssertionError(f"{call.name} of {call.path} -> {call.to}, {fault}: {error}") from error


def recorded(stage: Stage) -> list[Call]:
    """Return the calls of an undisturbed run."""
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    return layer.calls


def test_a_run_resumes_after_some_refused_calls(stage: Stage) -> None:
    calls = recorded(stage)
    for call, fault in random.Random(2).sample(single(calls) + lasting(calls), 24):
        refused(stage, call, fault)
    assert stage.tally.resumes > 15


@pytest.mark.slow
def test_a_run_resumes_after_every_refused_call(stage: Stage) -> None:
    calls = recorded(stage)
    every = single(calls) + lasting(calls)
    for call, fault in every:
        refused(stage, call, fault)
    assert stage.tally.resumes > 0.9 * len(every)


def shortened(stage: Stage, calls: Sequence[Call], *, plant: str | None = None) -> None:
    """Let one write at a time take less than it was given."""
    for call in calls:
        stage.clear()
        ran, layer = stage.run(Fault(at=call.number, kind="short"), plant=plant)
        assert (ran.status, ran.err, len(layer.struck)) == (0, "", 1)
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_complete()


def test_short_writes_cannot_be_seen(stage: Stage) -> None:
    shortened(stage, [call for call in recorded(stage) if len(call.data) > 1][::5])
    assert stage.tally.points > 20


@pytest.mark.slow
def test_no_short_write_can_be_seen(stage: Stage) -> None:
    shortened(stage, [call for call in recorded(stage) if len(call.data) > 1])
    assert stage.tally.points > 100


def test_a_write_that_is_taken_for_whole_is_found_out(stage: Stage) -> None:
    call = next(c for c in recorded(stage) if c.name == "pwrite" and c.path.endswith(".safetensors.partial"))
    with pytest.raises(AssertionError):
        shortened(stage, [call], plant="single write")


def test_a_sync_to_whose_failure_nobody_listens_is_found_out(stage: Stage) -> None:
    call = next(c for c in recorded(stage) if c.name == "fdatasync")
    with pytest.raises(AssertionError, match="nobody noticed"):
        refused(stage, call, Fault(at=call.number, kind="error", code=errno.EIO), plant="deaf")
