"""Little of everything: descriptors, sizes of files, memory, stdout, temporary files, umasks."""

import json
import resource
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.faults.children import Children
from tests.faults.stage import INDEX, Stage, digests, run_here

pytestmark = pytest.mark.rotating


def test_few_descriptors_are_enough_for_many_shards(children: Children, stage: Stage) -> None:
    source = stage.work / "many"
    source.mkdir()
    weight_map = {}
    for number in range(300):
        tensor, shard = f"layers.{number}.mlp.down_proj.weight", f"model-{number + 1:05}-of-00300.safetensors"
        save_file({tensor: torch.ones(2, 16, dtype=torch.bfloat16)}, source / shard)
        weight_map[tensor] = shard
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(stage.source / "config.json", source)
    stage.source = source
    ended = children.run(stage.job(limits=(("RLIMIT_NOFILE", 16),)))
    assert (ended.status, ended.err) == (0, "")
    few = digests(stage.out)
    assert len([name for name in few if name.endswith(".safetensors")]) == 300
    shutil.rmtree(stage.out)
    assert run_here(stage.arguments).status == 0
    assert digests(stage.out) == few


@pytest.mark.parametrize("limit", [600, 1024, 2000, 4000])
def test_a_limit_on_the_size_of_files_is_an_error_and_lifting_it_resumes(
    children: Children, stage: Stage, limit: int
) -> None:
    ended = children.run(stage.job(limits=(("RLIMIT_FSIZE", limit),)))
    assert ended.status == 1
    assert "ulimit -f" in ended.err
    stage.tally.points += 1
    stage.tally.faults += 1
    stage.check_resumed()


@pytest.mark.parametrize("room", [16, 32, 64, 128])
def test_a_process_without_memory_ends_with_one_line_and_resumes(
    children: Children, stage: Stage, room: int
) -> None:
    pid = children.start(stage.job())
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (room << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    children.go(pid)
    ended = children.wait(pid)
    stage.tally.points += 1
    if ended.status != 0:
        stage.tally.faults += 1
        assert ended.status == 1, ended
        assert ended.err.startswith("error: "), ended.err
        assert ended.err.count("\n") == 1, ended.err
    stage.check_resumed()


def test_a_closed_stdout_changes_nothing(children: Children, stage: Stage) -> None:
    ended = children.run(stage.job(closed=True))
    assert (ended.status, ended.err) == (0, "")
    stage.check_complete()


def test_no_temporary_files_are_needed(children: Children, stage: Stage) -> None:
    ended = children.run(stage.job(environment=(("TMPDIR", "/nowhere"), ("HOME", "/nowhere"))))
    assert (ended.status, ended.err) == (0, "")
    stage.check_complete()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_files_have_the_permissions_that_the_umask_gives(
    children: Children, stage: Stage, umask: int
) -> None:
    ended = children.run(stage.job(umask=umask))
    assert (ended.status, ended.err) == (0, "")
    modes = {stat.S_IMODE(p.stat().st_mode) for p in stage.out.rglob("*") if p.is_file()}
    assert modes == {0o666 & ~umask}
    stage.check_complete()


def test_files_that_are_for_their_owner_only_are_found_out(children: Children, stage: Stage) -> None:
    assert children.run(stage.job(umask=0o000, plant="private")).status == 0
    assert {stat.S_IMODE(p.stat().st_mode) for p in stage.out.rglob("*") if p.is_file()} != {0o666}


def test_memory_stays_within_the_limit(children: Children, stage: Stage) -> None:
    stage.options = (*stage.options, "--max-memory", "512M")
    ended = children.run(stage.job())
    assert (ended.status, ended.err) == (0, "")
    assert ended.peak < 512 << 20
    stage.check_complete()
