"""A run that was ended anywhere continues: identical bytes, nothing believed that the files do not prove."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoint.interrupted import flip_a_byte, plan_of, records, resumed, stop_after
from tests.checkpoint.written import CONFIG, ONE, digests, save, weight

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.file_names import JOURNAL
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.directory import partial_name
from zeropoint.checkpoint.run.journal import Journal
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.run.units import Units
from zeropoint.errors import CheckpointError, NonFiniteError

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.rotating]


def test_a_run_that_was_stopped_anywhere_continues_with_the_same_bytes(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    plan = plan_of(source)
    total = len(Units(plan))
    assert total > 50
    for count in (0, 1, 2, 3, 5, 11, total // 2, total - 2, total - 1):
        out = tmp_path / str(count)
        stop_after(plan, out, count)
        assert all(path.name.startswith(".") for path in out.iterdir())
        done = sum("unit" in record for record in records(out))
        assert done == count + 1
        assert resumed(plan, out, golden).resumed == done


@pytest.mark.slow
def test_a_run_that_was_stopped_after_each_unit_continues_with_the_same_bytes(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    plan = plan_of(source)
    for count in range(len(Units(plan))):
        stop_after(plan, tmp_path / str(count), count)
        assert resumed(plan, tmp_path / str(count), golden).resumed > count
        shutil.rmtree(tmp_path / str(count))


def test_a_run_that_is_stopped_again_and_again_ends(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    plan = plan_of(source, limits=Limits(workers=3, tile_values=9000))
    found = []
    for _ in range(6):
        stop_after(plan, tmp_path / "out", 4)
        found.append(sum("unit" in record for record in records(tmp_path / "out")))
    assert all(later >= before + 5 for before, later in pairwise(found))
    resumed(plan, tmp_path / "out", golden)


def test_nothing_is_done_twice(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(source)
    stop_after(plan, tmp_path / "out", 20)
    before = {record["unit"] for record in records(tmp_path / "out") if "unit" in record}
    again: list[dict[str, object]] = []
    append = Journal.append

    def watch(journal: Journal, found: Iterator[dict[str, object]]) -> None:
        batch = list(found)
        again.extend(batch)
        append(journal, batch)

    monkeypatch.setattr(Journal, "append", watch)
    result = resumed(plan, tmp_path / "out", golden)
    assert result.resumed == len(before) == 21
    assert before.isdisjoint({record["unit"] for record in again if "unit" in record})


def test_a_resumed_run_reports_the_same_errors_to_the_last_digit(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source)
    fresh = run(plan, tmp_path / "fresh")
    stop_after(plan, tmp_path / "out", 17)
    again = run(plan, tmp_path / "out")
    assert [o.error for o in again.outcomes] == [o.error for o in fresh.outcomes]
    assert again.error == fresh.error


def test_a_journal_that_ends_anywhere_is_used_up_to_there(
    source: Path, stopped: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    data = (stopped / JOURNAL).read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    cuts = {0, 1, 9, 17, 18, *(end + step for end in ends[::13] for step in (-1, 0, 1)), len(data) - 1}
    for count in sorted(cuts):
        out = tmp_path / f"cut{count}"
        shutil.copytree(stopped, out)
        (out / JOURNAL).write_bytes(data[:count])
        whole = data[: max((end for end in ends if end <= count), default=0)]
        result = resumed(plan_of(source), out, golden)
        assert result.resumed == whole.count(b'{"unit":')
        shutil.rmtree(out)


def test_the_records_of_another_run_of_the_same_plan_are_not_believed(
    source: Path, stopped: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    stop_after(plan_of(source, to="nvfp4a16"), tmp_path / "other", 50)
    (stopped / JOURNAL).write_bytes((tmp_path / "other" / JOURNAL).read_bytes())
    result = resumed(plan_of(source), stopped, golden)
    assert 0 < result.resumed < result.units


def _partials(out: Path) -> list[Path]:
    return sorted(path for path in out.iterdir() if path.name.endswith(".safetensors.partial"))


def _every_byte(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def _header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 16)


@pytest.mark.parametrize(
    ("change", "all_kept"),
    [
        (Path.unlink, False),
        (lambda path: path.write_bytes(b""), False),
        (lambda path: os.truncate(path, path.stat().st_size // 3), False),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), True),
        (_every_byte, False),
        (flip_a_byte, None),
        (_header, True),
    ],
    ids=["missing", "emptied", "shorter", "longer", "changed", "one-byte", "header"],
)
def test_what_a_partial_file_does_not_prove_is_done_again(
    change: Callable[[Path], object],
    all_kept: bool | None,
    source: Path,
    stopped: Path,
    golden: dict[str, str],
) -> None:
    change(_partials(stopped)[0])
    result = resumed(plan_of(source), stopped, golden)
    assert 0 <= result.resumed <= 31
    if all_kept is not None:
        assert (result.resumed == 31) is all_kept


def test_a_partial_file_that_has_another_name_too_is_kept(
    source: Path, stopped: Path, tmp_path: Path
) -> None:
    path = _partials(stopped)[0]
    os.link(path, tmp_path / "precious")
    before = (tmp_path / "precious").read_bytes()
    run(plan_of(source), stopped)
    assert (tmp_path / "precious").read_bytes() == before


def test_a_link_in_the_place_of_a_partial_file_is_refused_and_everything_kept(
    source: Path, stopped: Path, tmp_path: Path
) -> None:
    path = _partials(stopped)[0]
    path.rename(tmp_path / "victim")
    path.symlink_to(tmp_path / "victim")
    before = digests(stopped)
    with pytest.raises(CheckpointError, match="exists and is not a regular file; move it away"):
        run(plan_of(source), stopped)
    assert digests(stopped) == before


def test_an_interrupted_run_next_to_files_of_others_is_refused(source: Path, stopped: Path) -> None:
    (stopped / "mine.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"holds 'mine\.txt'; choose an empty directory, or add overwrite=True"
    ):
        run(plan_of(source), stopped)
    assert (stopped / JOURNAL).exists()


def test_an_error_of_the_data_leaves_nothing_behind_even_after_a_stop(tmp_path: Path) -> None:
    bad = weight(64, 128)
    bad[5, 5] = float("nan")
    tensors = {f"m.{n}.weight": weight(64, 128) for n in range(6)} | {"z.weight": bad}
    plan = make_plan(open_source(save(tmp_path / "in", tensors, CONFIG)), "w8a8", limits=ONE)
    (tmp_path / "out").mkdir()
    stop_after(plan, tmp_path / "out", 3)
    with pytest.raises(NonFiniteError, match=r"'z\.weight'"):
        run(plan, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interruption_says_that_the_same_command_continues(source: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(plan_of(source), tmp_path / "out", on_progress=progress)
    assert caught.value.__notes__ == [
        f"the work so far is kept in '{tmp_path / 'out'}'; run the same command again to resume"
    ]


def test_bytes_that_do_not_read_back_are_an_error_and_done_again(
    source: Path, tmp_path: Path, golden: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def flip(descriptor: int, data: bytes, offset: int) -> int:
        # A disk, or memory on the way to it, that stores something else than it was given.
        bad = bytearray(data)
        if len(bad) > 5000:
            bad[4321] ^= 1
        return pwrite(descriptor, bad, offset)

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", flip)
        with pytest.raises(
            CheckpointError, match=r"holds other bytes than were written at byte .*check the mem"
        ):
            run(plan_of(source), tmp_path / "out")
    name = partial_name("model-00001-of-00003.safetensors")
    assert (tmp_path / "out" / name).exists()
    result = resumed(plan_of(source), tmp_path / "out", golden)
    assert 0 < result.resumed < result.units


def test_a_record_with_fewer_digests_than_parts_proves_nothing(
    source: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "out").mkdir()
    stop_after(plan_of(source), out, 6)
    documents = records(out)
    done = [record for record in documents if "unit" in record]
    for record in done:
        record["sha256"] = list(record["sha256"])[:-1]
    (out / JOURNAL).unlink()
    forged = Journal(out / JOURNAL)
    forged.append(documents)
    forged.close()
    assert len(done) > 0
    assert resumed(plan_of(source), out, golden).resumed == 0


def scaled(path: Path) -> None:
    """Change a shard in place, and set its time back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_each_part_that_a_unit_wrote_is_proven_before_it_counts(
    source: Path, stopped: Path, tmp_path: Path, golden: dict[str, str]
) -> None:
    plan = plan_of(source)
    done = {record["unit"] for record in records(stopped) if "unit" in record}
    unit = next(unit for unit in Units(plan) if unit.number in done and len(unit.spans) > 1)
    for number, span in enumerate(unit.spans):
        out = shutil.copytree(stopped, tmp_path / f"copy{number}")
        with (out / partial_name(span.file)).open("r+b") as file:
            file.seek(span.begin)
            byte = file.read(1)
            file.seek(span.begin)
            file.write(bytes([byte[0] ^ 1]))
        assert resumed(plan, out, golden).resumed == len(done) - 1


def test_a_source_changed_in_place_with_its_old_time_is_read_again(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "in"
    shutil.copytree(source, own)
    stop_after(plan_of(own), tmp_path / "out", 40)
    scaled(own / "model-00001-of-00003.safetensors")
    run(plan_of(own), tmp_path / "expected")
    result = resumed(plan_of(own), tmp_path / "out", digests(tmp_path / "expected"))
    assert any("changed since the interrupted run" in note for note in result.notes)


def test_weights_that_share_a_scale_with_a_changed_one_are_done_again(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "in"
    shutil.copytree(source, own)
    stop_after(plan_of(own), tmp_path / "out", len(Units(plan_of(own))) - 3)
    # The largest of the set from now on; queries and keys lie in the shard before.
    path, name = own / "model-00003-of-00003.safetensors", "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 3] = 64.0
    save_file(tensors, path, metadata={"format": "pt"})
    assert not any(key.startswith("model.layers.1.self_attn.q_proj") for key in tensors)
    run(plan_of(own), tmp_path / "expected")
    assert resumed(plan_of(own), tmp_path / "out", digests(tmp_path / "expected")).resumed > 0


def test_a_source_that_changes_during_a_run_costs_its_own_units_only(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "in"
    shutil.copytree(source, own)
    plan = plan_of(own)
    with pytest.raises(
        CheckpointError, match=r"\(.*ctime_ns\) changed since the checkpoint was opened"
    ) as caught:
        run(plan, tmp_path / "out", on_progress=lambda *_: scaled(own / "model-00003-of-00003.safetensors"))
    assert "run the same command again to resume" in caught.value.__notes__[0]
    assert all(path.name.startswith(".") for path in (tmp_path / "out").iterdir())
    run(plan_of(own), tmp_path / "expected")
    assert resumed(plan_of(own), tmp_path / "out", digests(tmp_path / "expected")).resumed > 0
