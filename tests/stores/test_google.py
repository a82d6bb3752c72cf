"""Checkpoints are read from and written to Google Cloud Storage, over HTTP to an emulator of it."""

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.checkpoint.written import digests, quantize
from tests.faults.tiny import SCHEME, write_tiny

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.object_store import RemotePath
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.cli.main import main
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating

_NUMBERS = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """fsspec's file system of a new server that holds one empty bucket, ``tests``."""
    port = free_port()
    module = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--in-memory",
        "--default-bucket",
        "tests",
    ]
    server = subprocess.Popen(
        [*module, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google's own servers about buckets
        fsspec.filesystem("gs").clear_instance_cache()
        try:
            _wait(port, server)
            yield fsspec.filesystem("gs")
        finally:
            fsspec.filesystem("gs").clear_instance_cache()
            server.terminate()
            server.wait()


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return when the server answers."""
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"the emulator ended with {server.returncode}")


@pytest.fixture
def folder(store: Any) -> RemotePath:
    """A place in the bucket that no other test uses."""
    return RemotePath(f"gs://tests/{next(_NUMBERS)}")


def put(store: Any, source: Path, target: RemotePath) -> RemotePath:
    for path in source.rglob("*"):
        if path.is_file():
            store.put_file(str(path), (target / path.relative_to(source).as_posix()).url)
    return target


def content(store: Any, folder: RemotePath) -> dict[str, bytes]:
    """Return all objects below a folder, as one who lists and reads them sees them."""
    names = [path.removeprefix(folder.url.removeprefix("gs://") + "/") for path in store.find(folder.url)]
    return {name: store.cat_file((folder / name).url) for name in names}


def local_content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in digests(folder)}


def test_a_bucket_gets_the_bytes_of_a_directory_and_nothing_else(
    store: Any, folder: RemotePath, tmp_path: Path
) -> None:
    tiny = write_tiny(tmp_path / "model")
    source = put(store, tiny, folder / "in")
    plan = make_plan(open_source(source), SCHEME, limits=Limits(workers=2))
    run(plan, folder / "out", spool=tmp_path / "spool")
    golden = quantize(tiny, tmp_path / "local", SCHEME, limits=Limits(workers=2))
    assert content(store, folder / "out") == local_content(Path(str(golden.path)))
    assert len(golden.outcomes) == len(plan.weights) > 0


def test_an_interrupted_run_resumes_in_the_bucket(store: Any, folder: RemotePath, tmp_path: Path) -> None:
    source = open_source(write_tiny(tmp_path / "model"))
    plan = make_plan(source, SCHEME, limits=Limits(workers=1))
    total = plan.processed_bytes + sum(plan.companions.values())

    def stop(done: int, size: int, name: str) -> None:
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, folder, spool=tmp_path / "spool", on_progress=stop)
    assert not any("index" in name for name in content(store, folder))
    result = run(plan, folder, spool=tmp_path / "spool")
    assert result.resumed > 0
    golden = run(plan, tmp_path / "local")
    assert content(store, folder) == local_content(Path(str(golden.path)))


def test_the_commands_take_urls_of_google(
    store: Any, folder: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put(store, write_tiny(tmp_path / "model"), folder / "in").url
    out = (folder / "out").url
    assert main(["quantize", source, out, "--to", SCHEME, "--json"]) == 0
    assert main(["verify", out, "--against", source, "--json"]) == 0
    assert main(["inspect", out, "--json"]) == 0
    capsys.readouterr()
    assert main(["quantize", source, out, "--to", "int8:channel"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_url_without_objects_says_so(store: Any, folder: RemotePath) -> None:
    assert store.ls("tests") is not None
    with pytest.raises(CheckpointError, match=f"'{folder.url}' cannot be opened: there is no such object in"):
        open_source(folder)
