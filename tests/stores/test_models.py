"""Commands that run a model take URLs, too, and give what they give for a directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import digests
from tests.oracles import tiny_llama
from tests.stores.s3_server import S3Server

from zeropoint.cli.main import main

pytestmark = pytest.mark.rotating


@pytest.fixture
def url(s3: S3Server, bucket: str, tmp_path: Path) -> str:
    """A model in a bucket, of which there also is a directory."""
    tiny_llama.save(tmp_path / "model", torch.float32)
    put(s3, bucket, tmp_path / "model")
    return f"s3://{bucket}/model"


def put(s3: S3Server, bucket: str, folder: Path) -> str:
    for name in digests(folder):
        s3.put(bucket, f"{folder.name}/{name}", (folder / name).read_bytes())
    return f"s3://{bucket}/{folder.name}"


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_behind_urls_are_evaluated_as_those_of_directories(
    url: str, s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document(capsys, "quantize", tmp_path / "model", tmp_path / "out", "--to", "int8:channel")
    save_file({"ids": torch.arange(256) % 64}, tmp_path / "ids.safetensors")
    options = ("--text", tmp_path / "ids.safetensors", "--context", 32, "--windows", 2, "--continuations", 0)
    options = (*options, "--no-noise-floor")
    local = document(capsys, "eval", tmp_path / "out", "--against", tmp_path / "model", *options)
    remote = document(capsys, "eval", put(s3, bucket, tmp_path / "out"), "--against", url, *options)
    assert [m["statistics"] for m in remote["models"]] == [m["statistics"] for m in local["models"]]


def test_calibration_runs_models_behind_urls(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--to", "int4:g32", "--method", "mse_weighted", "--calibration", "random")
    document(capsys, "quantize", url, tmp_path / "a", *options)
    document(capsys, "quantize", tmp_path / "model", tmp_path / "b", *options)
    assert digests(tmp_path / "a")["model.safetensors"] == digests(tmp_path / "b")["model.safetensors"]


def test_scales_of_a_cache_and_rotations_go_from_url_to_url(
    url: str, s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document(capsys, "rotate", url, f"s3://{bucket}/rotated")
    document(capsys, "quantize", url, f"s3://{bucket}/out", "--to", "int8:channel")
    save_file({"ids": torch.arange(2048) % 64}, tmp_path / "ids.safetensors")
    document(
        capsys,
        "kv-scales",
        f"s3://{bucket}/out",
        f"s3://{bucket}/cache",
        "--calibration",
        tmp_path / "ids.safetensors",
    )
    names = {key.partition("/")[0] for key in s3.keys(bucket)}
    assert {"rotated", "out", "cache"} <= names
