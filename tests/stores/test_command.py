"""The command reads and writes URLs, and a killed command resumes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.written import digests
from tests.faults.tiny import SCHEME, write_tiny
from tests.stores.s3_server import S3Server

from zeropoint.checkpoint.read.file_names import REPORT
from zeropoint.cli.main import main

pytestmark = pytest.mark.rotating


@pytest.fixture
def url(s3: S3Server, bucket: str, tmp_path: Path) -> str:
    """A model in a bucket, of which there also is a directory."""
    model = write_tiny(tmp_path / "model")
    for name in digests(model):
        s3.put(bucket, f"model/{name}", (model / name).read_bytes())
    return f"s3://{bucket}/model"


def content(s3: S3Server, bucket: str) -> dict[str, bytes]:
    """Return all objects of an output but the page, of which a store has a shorter one."""
    keys = [key for key in s3.keys(bucket) if key.startswith("out/") and key != f"out/{REPORT}"]
    return {key.removeprefix("out/"): s3.content(bucket, key) for key in keys}


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in digests(folder) if name != REPORT}


def test_a_command_from_store_to_store_gives_the_bytes_of_directories(
    url: str, s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--to", SCHEME]) == 0
    capsys.readouterr()
    arguments = ["quantize", url, f"s3://{bucket}/out", "--to", SCHEME, "--spool", str(tmp_path / "spool")]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == f"s3://{bucket}/out"
    folder = tmp_path / "out"
    assert content(s3, bucket) == files_of(folder)
    pages = [page.decode() for page in (s3.content(bucket, f"out/{REPORT}"), (folder / REPORT).read_bytes())]
    assert [page.count("<h2>All layers</h2>") for page in pages] == [1, 1]
    assert [page.count("<h2>Codes and scales</h2>") for page in pages] == [0, 1], "a request for each layer"
    assert main(["verify", f"s3://{bucket}/out", "--against", url]) == 0
    assert main(["plan", f"s3://{bucket}/model", "--to", SCHEME]) == 0
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(f"'s3://{bucket}/out' is complete already" in note for note in notes)
    assert main([*arguments[:4], "int8:channel"]) == 1
    assert f"output 's3://{bucket}/out' holds '1_Pooling/config.json'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["s3://bucket/out", "--overwrite"], "neither overwritten nor locked; leave --overwrite out"),
        (["s3://bucket/out", "--break-lock"], "neither overwritten nor locked; leave --break-lock out"),
        (["out", "--spool", "spool"], "--spool is for an output behind a URL; leave it out"),
        (
            ["out", "--address", "head:6379"],
            "--address head:6379 is the address of a Ray cluster; pass --executor ray",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny(tmp_path / "model")
    assert main(["quantize", str(model), *options, "--to", SCHEME]) == 2
    assert rule in capsys.readouterr().err


def test_a_wrong_bucket_a_wrong_name_and_missing_permissions_have_errors_of_their_own(
    url: str, s3: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main([*arguments]) == 1
        return capsys.readouterr().err

    elsewhere = "s3://no-such-bucket/model"
    assert "'s3://no-such-bucket/model' cannot be opened: there is no bucket 'no-such-bucket';" in said(
        "inspect", elsewhere
    )
    assert f"there is no such object in bucket '{bucket}'; check the name" in said("inspect", f"{url}-2")
    assert "there is no bucket 'no-such-bucket'" in said("quantize", url, f"{elsewhere}-out", "--to", SCHEME)
    with s3.failing("403", range(1000)):
        assert "access is denied (" in (found := said("inspect", url))
    assert f"; check the permissions of these credentials for bucket '{bucket}'\n" in found


QUANTIZE = ("quantize", "--to", SCHEME)
BUDGET = ("quantize", "--budget", "9bpw", "--candidates", "int4:g32,int8:channel")
CONVERT = ("convert", "--force", "--format", "gptq", "--to", "int4:g32:scale=bfloat16")


def killed_at(words: tuple[str, ...], method: str, k: int, s3: S3Server, source: str, out: str) -> None:
    """Start a command, and kill it when it sends its k-th request to write, or to remove, an object."""
    command = [sys.executable, "-m", "zeropoint", words[0], source, out, *words[1:]]
    with s3.failing("none", range(k, k + 1), method=method, then=lambda: os.kill(child.pid, signal.SIGKILL)):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert child.stderr is not None
        with child.stderr as errors:
            message = errors.read()
        assert child.wait() == -signal.SIGKILL, message


def resumes(
    method: str, k: int, s3: S3Server, bucket: str, url: str, folder: Path, words: tuple[str, ...] = QUANTIZE
) -> None:
    """Kill a command at its k-th request, see that what is there are whole objects, and resume."""
    spool, out = folder.parent / "spool", f"s3://{bucket}/out"
    words = (*words, "--spool", str(spool))
    killed_at(words, method, k, s3, url, out)
    golden = files_of(folder)
    seen = content(s3, bucket).items()
    found = {name: data for name, data in seen if not name.startswith(".zeropoint/")}
    assert found.items() <= golden.items()
    assert main([words[0], url, out, *words[1:]]) == 0
    assert content(s3, bucket) == golden
    assert not spool.exists() or not list(spool.iterdir())
    for name in (*golden, REPORT):
        s3.client.delete_object(Bucket=bucket, Key=f"out/{name}")


@pytest.fixture
def codes(s3: S3Server, bucket: str, tmp_path: Path) -> str:
    """A quantized model in a bucket, of which there also is a directory."""
    floats, made = write_tiny(tmp_path / "floats"), tmp_path / "codes"
    assert main(["quantize", str(floats), str(made), "--to", "int4:g32"]) == 0
    for name in digests(made):
        s3.put(bucket, f"codes/{name}", (made / name).read_bytes())
    return f"s3://{bucket}/codes"


@pytest.mark.slow
@pytest.mark.parametrize("words", [BUDGET, CONVERT])
def test_a_search_and_a_conversion_killed_in_an_upload_resume_in_the_store(
    words: tuple[str, ...], url: str, codes: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    source = codes if words is CONVERT else url
    local = tmp_path / source.rpartition("/")[2]
    assert main([words[0], str(local), str(tmp_path / "out"), *words[1:]]) == 0
    resumes("PUT", 6, s3, bucket, source, tmp_path / "out", words)


def test_a_killed_command_resumes_in_the_store(url: str, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--to", SCHEME]) == 0
    resumes("PUT", 5, s3, bucket, url, tmp_path / "out")


@pytest.mark.slow
def test_a_command_killed_at_any_write_resumes_in_the_store(
    url: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--to", SCHEME]) == 0
    s3.requests.clear()
    assert main(["quantize", url, f"s3://{bucket}/out", "--to", SCHEME]) == 0
    methods = [request.partition(" ")[0] for request in s3.requests]
    for name in (*content(s3, bucket), REPORT):
        s3.client.delete_object(Bucket=bucket, Key=f"out/{name}")
    writes, removals = methods.count("PUT"), methods.count("DELETE")
    assert (writes, removals) == (15, 6)
    # Nothing is left to resume at the last removal, which takes the identity, and the last write, the report.
    for method, k in [("PUT", k) for k in range(writes - 1)] + [("DELETE", k) for k in range(removals - 1)]:
        resumes(method, k, s3, bucket, url, tmp_path / "out")
