"""Keys of a store are whatever somebody put there: none of them leads out of the output."""

import json
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from tests.checkpoint.written import digests
from tests.faults.tiny import SCHEME, write_tiny
from tests.stores.s3_server import S3Server

from zeropoint.checkpoint.plan.config_and_index import MANIFEST
from zeropoint.checkpoint.read.object_store import RemotePath
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.store_target import _spool
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.cli.main import main
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating

PREFIX = "deep/er/model"


@pytest.fixture
def url(s3: S3Server, bucket: str, tmp_path: Path) -> str:
    model = write_tiny(tmp_path / "model")
    for name in digests(model):
        s3.put(bucket, f"{PREFIX}/{name}", (model / name).read_bytes())
    return f"s3://{bucket}/{PREFIX}"


KEYS = [
    "../evil.txt",
    "../../../../../../evil.pth",
    "sub/../../evil.txt",
    "./x.txt",
    "sub/./x.txt",
    "a\\b.txt",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_checkpoint_with_such_a_key_is_refused_by_every_command(
    key: str, url: str, s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.put(bucket, f"{PREFIX}/{key}", b"EVIL")
    before = s3.keys(bucket)
    out = tmp_path / "x" / "y" / "out"
    remote = f"s3://{bucket}/other/out"
    for command in (
        ["inspect", url],
        ["plan", url, "--to", SCHEME],
        ["quantize", url, str(out), "--to", SCHEME, "--overwrite"],
        ["quantize", url, remote, "--to", SCHEME],
        ["dequantize", url, str(out), "--overwrite"],
        ["verify", url],
    ):
        assert main(command) == 1
        assert "which is not the name of a file; do not trust this checkpoint" in capsys.readouterr().err
    assert s3.keys(bucket) == before
    assert not (tmp_path / "x").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_folders_and_what_represents_them_are_read_as_before(url: str, s3: S3Server, bucket: str) -> None:
    s3.put(bucket, f"{PREFIX}/sub/", b"")
    s3.put(bucket, f"{PREFIX}/sub/notes.txt", b"x")
    assert Path("sub/notes.txt") in open_source(url).companions


def test_a_link_in_the_place_of_the_spool_is_not_followed(
    url: str, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "victim" / "empty").mkdir(parents=True)
    arguments = ["quantize", url, f"s3://{bucket}/out", "--to", SCHEME, "--spool", str(tmp_path / "spool")]
    spool = _spool(RemotePath(f"s3://{bucket}/out"), tmp_path / "spool")
    spool.parent.mkdir()
    spool.symlink_to(tmp_path / "victim")
    assert main(arguments) == 1
    assert f"spool '{spool}' is not a directory of yours" in capsys.readouterr().err
    assert (tmp_path / "victim" / "empty").exists()
    spool.unlink()
    assert main(arguments) == 0
    assert inspect_checkpoint(f"s3://{bucket}/out").quantization == "compressed-tensors"
    assert verify(f"s3://{bucket}/out").ok
    with pytest.raises(CheckpointError, match="is not a name below"):
        RemotePath(f"s3://{bucket}/out") / f"../{MANIFEST}"


def test_an_endpoint_that_is_no_url_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    with monkeypatch.context() as context:
        context.setenv("AWS_ENDPOINT_URL", "garbage")
        assert main(["inspect", url]) == 1
        assert (
            "cannot be reached: Invalid endpoint: garbage; check AWS_ENDPOINT_URL" in capsys.readouterr().err
        )
    fsspec.filesystem("s3").clear_instance_cache()
    assert main(["inspect", url]) == 0


def forged(record: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(record), **changes}).encode()


@dataclass(frozen=True)
class Interrupted:
    """A run into a store that failed before its last file, and the key of the record of a shard."""

    arguments: list[str]
    key: str
    record: bytes
    identity: bytes


IDENTITY = "out/.zeropoint/identity.json"


@pytest.fixture
def interrupted(
    url: str, s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Interrupted:
    arguments = ["quantize", url, f"s3://{bucket}/out", "--to", SCHEME, "--spool", str(tmp_path / "spool")]
    with s3.failing("500", range(1 << 30), method="PUT", inside="/zeropoint_manifest.json"):
        assert main(arguments) == 1
    capsys.readouterr()
    key = next(key for key in s3.keys(bucket) if key.startswith("out/.zeropoint/model-00001"))
    return Interrupted(arguments, key, s3.content(bucket, key), s3.content(bucket, IDENTITY))


def test_units_in_a_store_are_believed_as_far_as_bytes_prove_them(
    interrupted: Interrupted, s3: S3Server, bucket: str
) -> None:
    units = json.loads(interrupted.record)["units"]
    for wrong in (7, [{}], [{**units[0], "error": {"values": 1}}]):
        s3.put(bucket, interrupted.key, forged(interrupted.record, units=wrong))
        with s3.failing("500", range(1 << 30), method="PUT", inside="/zeropoint_manifest.json"):
            assert main(interrupted.arguments) == 1
        s3.put(bucket, interrupted.key, interrupted.record)
    other = [{**unit, "sha256": ["0" * 64 for _ in unit["sha256"]]} for unit in units]
    s3.put(bucket, interrupted.key, forged(interrupted.record, units=other))
    assert main(interrupted.arguments) == 0
    assert verify(f"s3://{bucket}/out").ok


def test_an_identity_in_a_store_that_is_none_is_refused(
    interrupted: Interrupted, s3: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [forged(interrupted.identity, identity=w, stamps=w) for w in ({"a": 7}, None, "x")]
    for raw in (*wrong, b"[" * 100_000, b"\xff"):
        s3.put(bucket, IDENTITY, raw)
        assert main(interrupted.arguments) == 1
        assert "is not a record of a run; add --restart" in capsys.readouterr().err
