"""The output directory: all or nothing, whatever fails, and nothing of others is touched."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import CONFIG, LINEAR, ONE, digests, quantize, save, weight
from tests.oracles import synthetic_llama

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run import directory as output
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.cli.main import main
from zeropoint.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save(tmp_path / "in", {LINEAR: weight(64, 128), "a.bias": weight(70_000)})
    (folder / "vocab.txt").write_text("a")
    return folder


def test_the_output_holds_final_names_only(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "new" / "out")
    names = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    weights = {"model.safetensors", "model.safetensors.index.json"}
    assert names == weights | {"config.json", "vocab.txt", "zeropoint_manifest.json"}


def test_an_empty_directory_is_a_fine_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert quantize(model, tmp_path / "out").path == tmp_path / "out"


def test_an_output_with_files_is_refused_and_kept(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"holds 'mine\.txt'; choose an empty directory, or add overwrite=True"
    ):
        quantize(model, tmp_path / "out")
    assert digests(tmp_path / "out").keys() == {"mine.txt"}


def test_overwrite_replaces_what_it_writes_and_leaves_the_rest(model: Path, tmp_path: Path) -> None:
    plan = make_plan(open_source(model), "w8a8", limits=ONE)
    run(plan, tmp_path / "fresh")
    quantize(model, tmp_path / "out", "w4a16")
    (tmp_path / "out" / "mine.txt").write_text("mine")
    run(plan, tmp_path / "out", overwrite=True)
    after = digests(tmp_path / "out")
    assert after.pop("mine.txt")
    assert after == digests(tmp_path / "fresh")


def test_overwrite_is_refused_next_to_weights_that_loaders_might_take_instead(
    model: Path, tmp_path: Path
) -> None:
    quantize(synthetic_llama.write(tmp_path / "shards"), tmp_path / "out")
    before = digests(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds other weights \('model-00001-of-00003\.safetensors', "):
        run(make_plan(open_source(model), "w8a8", limits=ONE), tmp_path / "out", overwrite=True)
    assert digests(tmp_path / "out") == before


def test_a_file_in_the_place_of_the_output_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a directory"):
        quantize(model, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def _link(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(model)
    return tmp_path / "link"


def test_an_output_may_lie_next_to_the_one_file_that_is_read(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    quantize(file, model / "out")
    assert (model / "out" / file.name).exists()
    with pytest.raises(CheckpointError, match="is the source or lies in it"):
        quantize(file, model)


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        (lambda model, _: model, "is the source or lies in it"),
        (lambda model, _: model / "out", "is the source or lies in it"),
        (lambda model, _: model / "deep" / "out", "is the source or lies in it"),
        (lambda _, tmp_path: tmp_path, "holds the source"),
        (_link, "is the source or lies in it"),
        (lambda model, _: model.parent / "x" / ".." / model.name, "is the source or lies in it"),
    ],
)
def test_an_output_at_the_source_is_refused(
    place: Callable[[Path, Path], Path], rule: str, model: Path, tmp_path: Path
) -> None:
    before = digests(model)
    plan = make_plan(open_source(model), "w8a8", limits=ONE)
    with pytest.raises(CheckpointError, match=rule):
        run(plan, place(model, tmp_path), overwrite=True)
    assert digests(model) == before


@pytest.fixture
def mounted(model: Path, tmp_path: Path) -> Iterator[Path]:
    """The parent of the source under another mount, which gives it other numbers of device and inode."""
    at, *others = (tmp_path / name for name in ("mount", "upper", "work"))
    for folder in (at, *others):
        folder.mkdir()
    options = f"lowerdir={model.parent / 'in'},upperdir={others[0]},workdir={others[1]}"
    made = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield at
    subprocess.run(["umount", str(at)], check=True)


@pytest.mark.parametrize("inner", [".", "deep/out"])
def test_an_output_at_the_source_is_refused_under_another_mount(
    inner: str, model: Path, mounted: Path
) -> None:
    assert not os.path.samefile(model, mounted)
    before = digests(model)
    plan = make_plan(open_source(mounted), "w8a8", limits=ONE)
    with pytest.raises(CheckpointError, match="is the source, lies in it or holds it: it is also seen as"):
        run(plan, model / inner, overwrite=True)
    assert digests(model) == before


def test_an_output_among_the_files_of_a_snapshot_is_refused(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    model.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    before = digests(blobs)
    plan = make_plan(open_source(snapshot), "w8a8", limits=ONE)
    with pytest.raises(CheckpointError, match="is the source or lies in it"):
        run(plan, blobs, overwrite=True)
    assert digests(blobs) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ".model.safetensors.partial"])
def test_a_link_at_an_output_name_is_never_followed(name: str, model: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"is not a regular file|File exists|symbolic"):
        run(make_plan(open_source(model), "w8a8", limits=ONE), tmp_path / "out", overwrite=True)
    assert victim.read_text() == "precious"
    assert (tmp_path / "out" / name).is_symlink()


def test_too_little_room_is_said_before_writing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_available", lambda _: 1000)
    with pytest.raises(CheckpointError, match=r"has 1000 B free, but .*B are needed"):
        quantize(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Fails:
    """A function of os that fails with ``number`` at its n-th call."""

    def __init__(self, name: str, number: int, at: int) -> None:
        self.real = getattr(os, name)
        self.number = number
        self.left = at

    def __call__(self, *arguments: object, **named: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments, **named)


FAULTS = [
    ("posix_fallocate", errno.ENOSPC, 1),
    ("posix_fallocate", errno.EFBIG, 2),
    ("pwrite", errno.ENOSPC, 2),
    ("pwrite", errno.EDQUOT, 4),
    ("pwrite", errno.EIO, 5),
    ("copy_file_range", errno.ENOSPC, 1),
    ("copy_file_range", errno.EIO, 2),
    ("fsync", errno.EIO, 1),
    ("fsync", errno.ENOSPC, 3),
    ("rename", errno.EIO, 1),
    ("rename", errno.EROFS, 3),
    ("mkdir", errno.EACCES, 1),
]


@pytest.mark.parametrize(("name", "number", "at"), FAULTS)
def test_a_failing_call_publishes_nothing_and_the_same_call_continues(
    name: str, number: int, at: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_source(model), "w4a16", limits=ONE)
    fault = _Fails(name, number, at)
    monkeypatch.setattr(os, name, fault)
    so_far = "some files were published, but not the index" if at == 3 and name == "rename" else "nothing was"
    with pytest.raises(CheckpointError, match=rf"cannot be written: .*{so_far}"):
        run(plan, tmp_path / "out")
    monkeypatch.undo()
    assert fault.left <= 0
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    run(plan, tmp_path / "out")
    run(plan, tmp_path / "expected")
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


@pytest.mark.parametrize(("name", "number", "at"), [f for f in FAULTS if f[0] not in ("rename", "mkdir")])
def test_a_failing_call_leaves_an_earlier_output_intact(
    name: str, number: int, at: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(model, tmp_path / "out", "w8a8")
    before = digests(tmp_path / "out")
    plan = make_plan(open_source(model), "w4a16", limits=ONE)
    monkeypatch.setattr(os, name, _Fails(name, number, at))
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(plan, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    after = digests(tmp_path / "out")
    assert {name: digest for name, digest in after.items() if not name.startswith(".")} == before


def test_a_full_disk_says_how_much_is_needed_and_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_source(model), "w4a16", limits=ONE)
    monkeypatch.setattr(os, "pwrite", _Fails("pwrite", errno.ENOSPC, 3))
    with pytest.raises(CheckpointError, match=r"B are needed in all and .*B are free"):
        run(plan, tmp_path / "out")


def test_a_limit_on_the_size_of_files_is_named(model: Path, tmp_path: Path) -> None:
    plan = make_plan(open_source(model), "w4a16", limits=ONE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="limits the size of a file"):
            run(plan, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()


def test_short_writes_and_copies_are_resumed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(model, tmp_path / "expected", "w4a16")
    pwrite, copy = os.pwrite, os.copy_file_range
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:1000]), at))
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: copy(a, b, min(n, 999), *at))
    quantize(model, tmp_path / "out", "w4a16")
    monkeypatch.undo()
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_kernel_cannot_copy_bytes_are_read_and_written(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(model, tmp_path / "expected", "w4a16")

    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    quantize(model, tmp_path / "out", "w4a16")
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(umask: int, model: Path, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        quantize(model, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


def test_what_a_killed_run_left_is_taken_over(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "expected")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".model.safetensors.partial").write_bytes(b"half")
    (tmp_path / "out" / output.LOCK).write_text("999999")
    quantize(model, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


def test_a_second_run_into_the_same_directory_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    plan = make_plan(open_source(model), "w8a8", limits=ONE)
    refusals: list[str] = []

    def progress(done: int, size: int, name: str) -> None:
        if not refusals:
            with pytest.raises(CheckpointError) as caught:
                run(plan, tmp_path / "out")
            refusals.append(str(caught.value))

    run(plan, tmp_path / "out", on_progress=progress)
    assert f"is being written by another run (process {os.getpid()})" in refusals[0]
    assert (tmp_path / "out" / "config.json").exists()


def test_a_reader_during_the_run_sees_no_model(model: Path, tmp_path: Path) -> None:
    seen: list[set[str]] = []
    plan = make_plan(open_source(model), "w8a8", limits=ONE)
    run(plan, tmp_path / "out", on_progress=lambda *_: seen.append(set(os.listdir(tmp_path / "out"))))
    assert seen
    assert all(name.startswith(".") for names in seen for name in names)


SCRIPT = """
    import sys, time
    from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
    from zeropoint.checkpoint.run.loop import run
    from zeropoint.checkpoint.read.source import open_source

    def progress(done, size, name):
        print("running", flush=True)
        time.sleep(60)

    run(make_plan(open_source(sys.argv[1]), "w8a8"), sys.argv[2], on_progress=progress)
"""


@pytest.mark.rotating
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_an_interrupted_process_publishes_nothing(number: signal.Signals, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(number)
        process.communicate(timeout=600)
    assert process.returncode == -number
    assert all(path.name.startswith(".") for path in (tmp_path / "out").iterdir())
    quantize(source, tmp_path / "out", "w8a8")
    quantize(source, tmp_path / "expected", "w8a8")
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


def test_names_with_spaces_newlines_and_other_letters_work(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "mo del\nzwei \u00e4", {LINEAR: weight(8, 32), "w\n\x1b[31m.weight": weight(8, 32)}
    )
    result = quantize(folder, tmp_path / "out \u00fc\n")
    assert {o.weight.module for o in result.outcomes} >= {"w\n\x1b[31m"}


def test_a_sparse_giant_is_planned_without_reading_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {LINEAR: torch.zeros(8, 32)})
    path = folder / "model.safetensors"
    rows = 1 << 33
    header = f'{{"{LINEAR}":{{"dtype":"BF16","shape":[{rows},64],"data_offsets":[0,{rows * 128}]}}}}'.encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + rows * 128)
        except OSError:
            pytest.skip("the file system holds no file of a terabyte")
    plan = make_plan(open_source(folder), "w8a8", limits=ONE)
    assert plan.peak_memory < 1 << 30
    with pytest.raises(CheckpointError, match=" free, but"):
        run(plan, tmp_path / "out")


def test_an_output_of_one_file_has_nothing_to_say_about_itself(tmp_path: Path) -> None:
    quantize(save(tmp_path / "in", {LINEAR: weight(8, 32)}), tmp_path / "out")
    source = open_source(tmp_path / "out")
    assert source.notes == ()
    assert source.index == "model.safetensors.index.json"
    assert source.left_out == ()
    assert verify(tmp_path / "out").problems == ()


def test_no_path_is_not_the_current_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="the path is empty"):
        quantize(model, "", "w8a8", limits=ONE)
    assert main(["quantize", str(model), "", "--to", "w8a8"]) != 0
    assert list(Path().iterdir()) == []


def test_an_empty_configuration_of_quantization_says_nothing(tmp_path: Path) -> None:
    model = save(tmp_path / "in", {LINEAR: weight(8, 32)}, {**CONFIG, "quantization_config": {}})
    quantize(model, tmp_path / "out")
    assert verify(tmp_path / "out", model).ok


def test_used_up_inodes_and_quotas_are_not_called_a_full_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_source(model), "w4a16", limits=ONE)
    real = os.statvfs
    for number, rule in ((errno.ENOSPC, r"no room for more files \(inodes\)"), (errno.EDQUOT, "your quota")):
        with monkeypatch.context() as context:
            context.setattr(os, "pwrite", _Fails("pwrite", number, 3))
            context.setattr(os, "statvfs", lambda path: _without_inodes(real(path)))
            with pytest.raises(CheckpointError, match=rule):
                run(plan, tmp_path / "out")


def _without_inodes(found: os.statvfs_result) -> os.statvfs_result:
    return os.statvfs_result((*found[:5], 1000, 0, 0, *found[8:]))
