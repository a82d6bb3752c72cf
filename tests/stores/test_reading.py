"""Checkpoints are read from S3 as from a disk, over real HTTP, and whatever fails there is an error here."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tests.checkpoint.safetensors_bytes import blob, spec
from tests.checkpoint.written import digests, digests_of_outputs, refused
from tests.cli.checkpoints import write_llama
from tests.codecs.onnx_models import model as onnx_model
from tests.codecs.onnx_models import save
from tests.stores.s3_server import S3Server

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.storage import open_file, place
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.cli.main import main
from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


@pytest.fixture
def url(model: Path, s3: S3Server, bucket: str) -> str:
    """The URL of the model in a bucket."""
    for path in sorted(model.iterdir()):
        s3.put(bucket, f"models/llama/{path.name}", path.read_bytes())
    s3.requests.clear()
    return f"s3://{bucket}/models/llama"


def quantize(source: str | Path, out: Path, to: str = "nvfp4a16") -> None:
    run(make_plan(open_source(source), to, limits=Limits(workers=2)), out)


def test_a_source_behind_a_url_says_what_the_directory_says(model: Path, url: str) -> None:
    here, there = open_source(model), open_source(url)
    assert str(there.root) == url
    assert list(there.entries) == list(here.entries)
    assert [(e.begin, e.nbytes) for e in there.entries.values()] == [
        (e.begin, e.nbytes) for e in here.entries.values()
    ]
    assert (there.config, there.companions, there.metadata) == (here.config, here.companions, here.metadata)
    assert inspect_checkpoint(url).dtypes == inspect_checkpoint(model).dtypes


def test_a_range_is_what_the_store_holds_there(url: str, model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    file = open_file(place(f"{url}/model.safetensors"))
    buffer = bytearray(1000)
    file.read_into(memoryview(buffer), 777)
    file.close()
    assert file.stamp.size == len(content)
    assert buffer == content[777:1777]


def test_the_output_has_the_bytes_that_a_local_source_gives(model: Path, url: str, tmp_path: Path) -> None:
    quantize(model, tmp_path / "here")
    quantize(url, tmp_path / "there")
    here, there = digests(tmp_path / "here"), digests(tmp_path / "there")
    assert here.pop("zeropoint_manifest.json", None) is None or there.pop("zeropoint_manifest.json")
    assert there == here


def test_each_byte_of_the_weights_is_fetched_once(
    model: Path, url: str, s3: S3Server, tmp_path: Path
) -> None:
    """What is kept, too; headers are read for the plan, and again for the identity."""
    size = (model / "model.safetensors").stat().st_size
    source = open_source(url)
    before = s3.bytes_asked
    run(make_plan(source, "int8:channel", limits=Limits(workers=2)), tmp_path / "out")
    header = min(entry.begin for entry in source.entries.values())
    assert size - header <= s3.bytes_asked - before <= size + 3 * header


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_requests_that_fail_in_passing_are_repeated(
    kind: str, model: Path, url: str, s3: S3Server, tmp_path: Path
) -> None:
    quantize(model, tmp_path / "here", to="int8:channel")
    s3.requests.clear()
    quantize(url, tmp_path / "whole", to="int8:channel")
    count = len(s3.requests)
    for k in range(0, count, max(1, count // 4)):
        with s3.failing(kind, range(k, k + 1)) as fault:
            quantize(url, tmp_path / f"{kind}{k}", to="int8:channel")
        assert fault.struck == 1
        name = "model.safetensors"
        assert (tmp_path / f"{kind}{k}" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_what_is_not_there_is_named(s3: S3Server, bucket: str) -> None:
    s3.put(bucket, "empty/readme.txt", b"x")
    assert refused(f"s3://{bucket}/empty").startswith(f"'s3://{bucket}/empty' holds no model.safetensors")
    assert f"'s3://{bucket}/nothing' cannot be opened" in refused(f"s3://{bucket}/nothing")
    assert "'s3://no-such-bucket/model' cannot be opened" in refused("s3://no-such-bucket/model")


def test_a_url_that_nobody_reads_is_refused_with_those_that_are() -> None:
    # memory:// is what fsspec would read, and lose with the process.
    for scheme in ("s4", "http", "memory"):
        rule = f"'{scheme}://bucket/x' has the scheme {scheme}, but s3, gs and file are read; use a directory"
        assert refused(f"{scheme}://bucket/x").startswith(rule)
    assert refused("s3://") == "'s3://' names no bucket; write s3://BUCKET/NAME"


def test_a_file_url_is_the_path_it_names(model: Path) -> None:
    assert open_source(f"file://{model}").root == model


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_a_store_that_keeps_failing_is_an_error_that_names_the_object(
    kind: str, url: str, s3: S3Server, tmp_path: Path
) -> None:
    source = open_source(url)
    plan = make_plan(source, "int8:channel", limits=Limits(workers=2))
    with s3.failing(kind, range(3, 1 << 30), method="GET"), pytest.raises(CheckpointError) as caught:
        run(plan, tmp_path / "out")
    assert str(caught.value).startswith(f"'{url}/model.safetensors' cannot be read at byte ")
    assert str(caught.value).endswith("check the connection, and retry")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_a_store_that_does_not_answer_is_an_error(kind: str, url: str, s3: S3Server) -> None:
    with s3.failing(kind, range(1 << 30)):
        assert f"'{url}' cannot be listed: " in refused(url)


def test_an_object_replaced_during_the_run_is_found(
    model: Path, url: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    """The new object has the same size, header and place: its ETag alone tells."""
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    plan = make_plan(open_source(url), "int8:channel", limits=Limits(workers=1))
    key = "models/llama/model.safetensors"
    with (
        s3.failing(
            "none", range(4, 5), method="GET", then=lambda: s3.put(bucket, key, bytes(content))
        ) as fault,
        pytest.raises(CheckpointError, match=r"model\.safetensors' changed since its header was read"),
    ):
        run(plan, tmp_path / "out")
    assert fault.struck == 1


def test_an_object_that_was_replaced_gives_no_bytes(model: Path, url: str, s3: S3Server, bucket: str) -> None:
    """Also where it has its first bytes again at the end, so that nothing else would tell."""
    content = (model / "model.safetensors").read_bytes()
    file = open_file(place(f"{url}/model.safetensors"))
    s3.put(bucket, "models/llama/model.safetensors", content[::-1])
    with pytest.raises(CheckpointError, match=rf"its ETag is no longer {file.stamp.identity}; stop what"):
        file.read_into(memoryview(bytearray(10)), 0)
    s3.put(bucket, "models/llama/model.safetensors", content)
    buffer = bytearray(10)
    file.read_into(memoryview(buffer), 0)
    assert buffer == content[:10]


def test_an_answer_that_is_too_short_is_an_error(url: str, s3: S3Server) -> None:
    source = open_source(url)
    entry = max(source.entries.values(), key=lambda entry: entry.begin)
    file = open_file(entry.file)
    with (
        s3.failing("short", range(1), method="GET"),
        pytest.raises(
            CheckpointError, match=rf"gave {entry.nbytes - 10} bytes .* but {entry.nbytes} were there"
        ),
    ):
        file.read_into(memoryview(bytearray(entry.nbytes)), entry.begin)


def test_hostile_headers_are_refused_as_on_a_disk(s3: S3Server, bucket: str) -> None:
    s3.put(bucket, "bad/model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}")
    message = refused(f"s3://{bucket}/bad")
    assert f"'s3://{bucket}/bad/model.safetensors' is not a safetensors file: its first 8 bytes" in message


def test_shards_and_their_index_are_read_through_a_url(s3: S3Server, bucket: str) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    s3.put(bucket, f"m/{one}", blob({"a": spec(0, 1)}, b"x"))
    index = {"metadata": {"total_size": 2}, "weight_map": {"a": one, "b": two}}
    s3.put(bucket, "m/model.safetensors.index.json", json.dumps(index).encode())
    assert f"1 missing shards: '{two}' (1 tensors)" in refused(f"s3://{bucket}/m")
    s3.put(bucket, f"m/{two}", blob({"b": spec(0, 1)}, b"y"))
    assert open_source(f"s3://{bucket}/m").shards == (one, two)


def test_a_gguf_file_behind_a_url_gives_the_bytes_that_it_gives_on_disk(
    model: Path, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    zp.quantize_checkpoint(model, tmp_path / "gguf", "q8_0", format="gguf")
    (path,) = (tmp_path / "gguf").glob("*.gguf")
    s3.put(bucket, f"models/{path.name}", path.read_bytes())
    for name, source in (("here", path), ("there", f"s3://{bucket}/models/{path.name}")):
        zp.convert_checkpoint(source, tmp_path / name, "compressed-tensors")
    assert digests_of_outputs(tmp_path / "there") == digests_of_outputs(tmp_path / "here")


def test_an_onnx_model_behind_a_url_gives_the_bytes_that_it_gives_on_disk(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    path = save(onnx_model(), tmp_path / "in", external=True)
    for file in path.parent.iterdir():
        s3.put(bucket, f"models/{file.name}", file.read_bytes())
    for name, source in (("here", path), ("there", f"s3://{bucket}/models/model.onnx")):
        zp.quantize_checkpoint(source, tmp_path / name, "int8:channel", format="onnx")
    assert digests_of_outputs(tmp_path / "there") == digests_of_outputs(tmp_path / "here")


def test_the_command_line_inspects_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == url


def test_without_its_package_a_scheme_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "gs", raising=False)  # where another test has used it
    assert refused("gs://bucket/model") == (
        "'gs://bucket/model' needs the package gcsfs, which is not installed; pip install 'zeropoint[remote]'"
    )
