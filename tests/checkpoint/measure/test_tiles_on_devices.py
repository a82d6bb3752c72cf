"""Tiles that are quantized on a GPU, or on a device that stands in for one, have the bytes of the host."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.written import OF_RUNS, digests
from tests.stand_in_device import Elsewhere, standing_in
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.checkpoint.measure.tiles import Scratch
from zeropoint.methods import LayerData, method_named
from zeropoint.schemes import Scheme


@pytest.fixture
def device() -> Iterator[torch.device]:
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    with standing_in() as found:
        yield found


@pytest.mark.parametrize("method", ["nearest", "mse"])
@pytest.mark.parametrize("scheme", ["int4:g32", "nvfp4", "mxfp4:scale=search"])
def test_a_tile_on_a_device_has_the_bytes_of_the_host(device: torch.device, scheme: str, method: str) -> None:
    parsed, used = Scheme.parse(scheme), method_named(method)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    there = Scratch(bytearray(), device)
    for tile in (x, x / 2):  # the second one takes the memory of the first
        data = LayerData(extremes=(-4.0, 9.0)) if scheme == "nvfp4" else LayerData()
        expected = Scratch(bytearray()).quantize(tile, parsed, used, data).q
        found = there.quantize(tile, parsed, used, data).q
        assert not isinstance(found.data, Elsewhere)
        assert found.data.device.type == "cpu"
        assert same_bytes(found.data, expected.data)
        assert all(map(same_bytes, found.params.stored, expected.params.stored))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "scheme", ["int4:g32:scale=search/ue4m3", "mxfp4:scale=search", "nvfp4:scale=search"]
)
def test_threads_with_streams_of_their_own_share_tables(scheme: str) -> None:
    parsed, used = Scheme.parse(scheme), method_named("nearest")
    tiles = [torch.randn(512, 2048, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(
            lambda x: Scratch(bytearray(), torch.device("cuda", 0)).quantize(x, parsed, used).q, tiles
        )
        for x, q in zip(tiles, found, strict=True):
            expected = Scratch(bytearray()).quantize(x, parsed, used).q
            assert same_bytes(q.data, expected.data)
            assert all(map(same_bytes, q.params.stored, expected.params.stored))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("scheme", ["nvfp4", "int4:g128:scale=search"])
def test_a_checkpoint_on_a_gpu_has_the_files_of_the_host(tmp_path: Path, scheme: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    weights = {f"layers.{n}.weight": torch.randn(512, 1024).bfloat16() for n in range(6)}
    save_file(weights, source / "model.safetensors")
    for name, where in (("host", None), ("device", "cuda")):
        zp.quantize_checkpoint(source, tmp_path / name, scheme, device=where)
    found, expected = digests(tmp_path / "device"), digests(tmp_path / "host")
    assert {name: found[name] for name in found if name not in OF_RUNS} == {
        name: expected[name] for name in expected if name not in OF_RUNS
    }
