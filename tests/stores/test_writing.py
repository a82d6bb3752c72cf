"""Checkpoints are written to S3 over real HTTP: whole objects alone are seen, any failure can be resumed."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import digests
from tests.faults.tiny import SCHEME, write_tiny
from tests.stores.s3_server import S3Server

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read import object_store
from zeropoint.checkpoint.read.object_store import RemotePath
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import RunResult, run
from zeropoint.errors import CheckpointError, NonFiniteError

pytestmark = pytest.mark.rotating

PREFIX = "quantized/tiny"


@pytest.fixture
def plan(tmp_path: Path) -> CheckpointPlan:
    return make_plan(open_source(write_tiny(tmp_path / "model")), SCHEME, limits=Limits(workers=2))


@pytest.fixture
def golden(plan: CheckpointPlan, tmp_path: Path) -> dict[str, bytes]:
    """The content of each file that a directory gets."""
    return contents(run(plan, tmp_path / "local"))


def contents(result: RunResult) -> dict[str, bytes]:
    folder = Path(str(result.path))
    return {name: (folder / name).read_bytes() for name in digests(folder)}


class Target:
    """A place in a bucket, and what lies there."""

    def __init__(self, s3: S3Server, bucket: str, spool: Path) -> None:
        self.s3, self.bucket, self.spool = s3, bucket, spool
        self.url = RemotePath(f"s3://{bucket}/{PREFIX}")

    def write(self, plan: CheckpointPlan, *, restart: bool = False) -> RunResult:
        return run(plan, self.url, spool=self.spool, restart=restart)

    def content(self) -> dict[str, bytes]:
        """Return all objects, as one who lists and reads them sees them."""
        keys = self.s3.keys(self.bucket)
        return {key.removeprefix(f"{PREFIX}/"): self.s3.content(self.bucket, key) for key in keys}

    def spooled(self) -> int:
        return sum(path.stat().st_size for path in self.spool.rglob("*") if path.is_file())


@pytest.fixture
def target(s3: S3Server, bucket: str, tmp_path: Path) -> Target:
    return Target(s3, bucket, tmp_path / "spool")


def puts(s3: S3Server) -> list[str]:
    """Return the names of the objects that were written, in order."""
    found = [re.fullmatch(rf"PUT /[^/]+/{PREFIX}/([^?]*)\??.*", line) for line in s3.requests]
    return [match[1] for match in found if match]


def test_a_store_gets_the_bytes_of_a_directory_and_nothing_else(
    plan: CheckpointPlan, target: Target, golden: dict[str, bytes]
) -> None:
    result = target.write(plan)
    assert target.content() == golden
    assert (str(result.path), result.resumed) == (str(target.url), 0)
    assert puts(target.s3)[-1] == "model.safetensors.index.json"
    assert not target.spool.exists()


def test_a_reader_never_sees_half_an_object_nor_an_index_before_its_shards(
    plan: CheckpointPlan, target: Target, golden: dict[str, bytes]
) -> None:
    seen: list[set[str]] = []
    two_files = sum(sorted([shard.size for shard in plan.shards] + list(plan.companions.values()))[-2:])

    def look() -> None:
        target.s3.fault = None  # the reader's own requests are not looked at
        content = {name: data for name, data in target.content().items() if not name.startswith(".zero")}
        assert content.items() <= golden.items()
        seen.append(set(content))
        assert target.spooled() <= two_files + 1000  # and the lock
        target.s3.fault = fault

    with target.s3.failing("none", range(1 << 30), method="PUT", then=look) as fault:
        target.write(plan)
    shards = {name for name in golden if name.endswith(".safetensors")}
    assert len(seen) == len(golden) + 5 + 1  # each file, the record of each that units write, the identity
    late = {"model.safetensors.index.json", "config.json", "zeropoint_manifest.json"}
    assert all(names >= shards for names in seen if names & late)


@pytest.mark.parametrize("size", [1000, 5 << 20, 11 << 20])
def test_an_object_with_other_bytes_than_were_sent_is_found(
    size: int, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request, or in parts; moto takes whatever arrives."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)
    monkeypatch.setitem(object_store._UPLOAD["s3"], "chunksize", 5 << 20)
    local, target = tmp_path / "file", RemotePath(f"s3://{bucket}/file")
    local.write_bytes(bytes(range(250)) * (size // 250) + bytes(size % 250))
    s3.requests.clear()
    assert object_store.upload(local, target).size == size
    assert not any(line.startswith("GET") for line in s3.requests)  # the ETag was enough
    # S3's client compares what it reads back with the checksum that was sent, where it has one.
    found = "other bytes than were sent to it between|did not match calculated checksum"
    with s3.failing("flip", range(1), method="PUT"), pytest.raises(CheckpointError, match=found):
        object_store.upload(local, target)
    with s3.failing("flip", range(1), method="PUT"), pytest.raises(CheckpointError, match=found):
        object_store.write(target, b"content")


def test_an_etag_that_proves_nothing_has_the_object_read(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of another size than those that were sent give another ETag, as encryption does."""
    monkeypatch.setitem(object_store._UPLOAD["s3"], "chunksize", 5 << 20)
    local, target = tmp_path / "file", RemotePath(f"s3://{bucket}/file")
    local.write_bytes(bytes(11 << 20))
    s3.requests.clear()
    assert object_store.upload(local, target).size == 11 << 20
    assert any(line.startswith("GET") for line in s3.requests)


@pytest.mark.parametrize("kind", ["500", pytest.param("reset", marks=pytest.mark.slow)])
def test_after_any_failed_write_the_same_call_resumes(
    kind: str, plan: CheckpointPlan, target: Target, golden: dict[str, bytes], tmp_path: Path
) -> None:
    """The k-th request that writes, and all after it, fail; then the store works again."""
    resumed = []
    for k in (0, 4, 9, 13):  # of 14: the identity, 5 files and their records, 3 files at the end
        target.url = RemotePath(f"s3://{target.bucket}/{PREFIX}")
        with (
            target.s3.failing(kind, range(k, 1 << 30), method="PUT") as fault,
            pytest.raises(CheckpointError, match=r"'s3://.*' cannot be written: .*start the same command"),
        ):
            target.write(plan)
        assert fault.struck
        assert not {"model.safetensors.index.json"} & set(target.content())
        assert target.spooled() == 0
        resumed.append(target.write(plan).resumed)
        assert target.content() == golden
        for key in target.s3.keys(target.bucket):
            target.s3.client.delete_object(Bucket=target.bucket, Key=key)
    assert resumed == sorted(resumed)
    assert (resumed[0], resumed[-1]) == (0, 12 + 2)


def test_writes_that_fail_in_passing_are_repeated(
    plan: CheckpointPlan, target: Target, golden: dict[str, bytes]
) -> None:
    with target.s3.failing("500", range(0, 1 << 30, 2), method="PUT") as fault:
        target.write(plan)
    assert fault.struck > 10
    assert target.content() == golden


def interrupt_at(target: Target, plan: CheckpointPlan, name: str) -> None:
    """Begin a run whose write of an object fails for good."""
    with (
        target.s3.failing("500", range(1 << 30), method="PUT", inside=f"/{name}"),
        pytest.raises(CheckpointError, match=f"{name}' cannot be written"),
    ):
        target.write(plan)


def test_an_object_that_was_replaced_meanwhile_is_written_again(
    plan: CheckpointPlan, target: Target, golden: dict[str, bytes]
) -> None:
    interrupt_at(target, plan, "config.json")
    first = plan.shards[0].name
    target.s3.put(target.bucket, f"{PREFIX}/{first}", bytes(len(golden[first])))
    assert 0 < target.write(plan).resumed < len(plan.weights) + len(plan.kept) + len(plan.companions)
    assert target.content() == golden


def test_a_source_that_changed_meanwhile_is_done_again(plan: CheckpointPlan, target: Target) -> None:
    interrupt_at(target, plan, "config.json")
    path = plan.source.root / plan.source.shards[0]
    assert isinstance(path, Path)
    path.write_bytes(path.read_bytes())
    result = target.write(make_plan(open_source(plan.source.given), SCHEME, limits=plan.limits))
    assert result.resumed == 0
    assert any("changed since the interrupted run, so all is done again" in note for note in result.notes)


def test_another_command_is_refused_by_the_field_that_differs_unless_it_restarts(
    plan: CheckpointPlan, target: Target
) -> None:
    interrupt_at(target, plan, "config.json")
    before = target.content()
    other = make_plan(open_source(plan.source.given), "mxfp4", limits=plan.limits)
    rule = r"the interrupted run in 's3://.*' differs in 'recipe': it has '.*', now '.*'; .*restart=True"
    with pytest.raises(CheckpointError, match=rule):
        target.write(other)
    assert target.content() == before
    target.write(other, restart=True)
    assert json.loads(target.content()["config.json"])["quantization_config"]["format"].startswith("mxfp4")


def test_objects_of_others_are_never_touched(plan: CheckpointPlan, target: Target) -> None:
    target.s3.put(target.bucket, f"{PREFIX}/model.safetensors", b"theirs")
    rule = rf"output 's3://.*/{PREFIX}' holds 'model\.safetensors'; remove them, or write elsewhere"
    with pytest.raises(CheckpointError, match=rule):
        target.write(plan, restart=True)
    assert target.content() == {"model.safetensors": b"theirs"}


def test_after_an_error_of_the_data_nothing_is_left(plan: CheckpointPlan, target: Target) -> None:
    entry = plan.weights[-1].source
    assert isinstance(entry.file, Path)
    with entry.file.open("r+b") as file:
        file.seek(entry.begin)
        file.write(b"\x80\x7f")  # infinity in bfloat16
    with pytest.raises(NonFiniteError):
        target.write(make_plan(open_source(plan.source.given), SCHEME, limits=plan.limits))
    assert target.content() == {}
    assert target.spooled() == 0


def test_an_output_in_the_source_or_around_it_is_refused(target: Target, plan: CheckpointPlan) -> None:
    for path in sorted(Path(str(plan.source.root)).rglob("*")):
        if path.is_file():
            name = path.relative_to(str(plan.source.root))
            target.s3.put(target.bucket, f"models/a/{name}", path.read_bytes())
    remote = make_plan(open_source(f"s3://{target.bucket}/models/a"), SCHEME, limits=plan.limits)
    for inner, rule in (("models/a/out", "is the source or lies in it"), ("models", "holds the source")):
        with pytest.raises(CheckpointError, match=rf"output '.*/{inner}' {rule}; write elsewhere"):
            run(remote, RemotePath(f"s3://{target.bucket}/{inner}"))


def large(folder: Path) -> Path:
    """Write a checkpoint whose kept tensor has 12 MiB."""
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": torch.ones(6 << 20, dtype=torch.bfloat16).view(-1, 64),
        "model.layers.0.mlp.up_proj.weight": torch.ones(64, 64, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_large_files_go_up_in_parts_and_a_failure_leaves_none_behind(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store._UPLOAD, "s3", {"chunksize": 5 << 20, "max_concurrency": 2})
    plan = make_plan(open_source(large(tmp_path / "large")), "int8:channel", limits=Limits(workers=1))
    with (
        target.s3.failing("500", range(1 << 30), method="PUT", inside="partNumber=2"),
        pytest.raises(CheckpointError, match=r"model\.safetensors' cannot be written"),
    ):
        target.write(plan)
    assert target.s3.unfinished(target.bucket) == []
    assert "model.safetensors" not in target.content()
    target.write(plan)
    assert sum("partNumber" in line for line in target.s3.requests) >= 3
    assert target.content() == contents(run(plan, tmp_path / "local"))


def test_an_object_that_appears_during_a_run_stays_and_so_does_the_work(
    plan: CheckpointPlan, target: Target, golden: dict[str, bytes]
) -> None:
    intruder = f"{PREFIX}/config.json"
    with (
        target.s3.failing(
            "none",
            range(1),
            method="PUT",
            inside="/identity.json",
            then=lambda: target.s3.put(target.bucket, intruder, b"PRECIOUS"),
        ),
        pytest.raises(CheckpointError, match=r"config\.json' is not an object of this run; move it away"),
    ):
        target.write(plan)
    assert target.content()["config.json"] == b"PRECIOUS"
    target.s3.client.delete_object(Bucket=target.bucket, Key=intruder)
    assert target.write(plan).resumed > 0
    assert target.content() == golden


def test_an_error_of_the_data_removes_no_object_of_others(
    plan: CheckpointPlan, target: Target, tmp_path: Path
) -> None:
    entry = plan.weights[-1].source
    assert isinstance(entry.file, Path)
    with entry.file.open("r+b") as file:
        file.seek(entry.begin)
        file.write(b"\x80\x7f")  # infinity in bfloat16
    bad = make_plan(open_source(plan.source.given), SCHEME, limits=plan.limits)
    intruder = f"{PREFIX}/config.json"
    with (
        target.s3.failing(
            "none",
            range(1),
            method="PUT",
            inside="/identity.json",
            then=lambda: target.s3.put(target.bucket, intruder, b"PRECIOUS"),
        ),
        pytest.raises(NonFiniteError),
    ):
        target.write(bad)
    assert target.content() == {"config.json": b"PRECIOUS"}
