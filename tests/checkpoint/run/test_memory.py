"""``--max-memory`` is a bound that the operating system enforces here, whatever the shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from tests.checkpoint.written import CONFIG, digests, save, weight

from zeropoint.checkpoint.plan.limits import BASE_MEMORY

MIB = 1 << 20
PEAK = 700 * MIB
# Warm: the kernels are loaded before the limit is set, which is what the rest of the memory then is. Next
# to the tiles there are stacks, arenas that the allocator only reserves, and the values of the run itself.
CHILD = """
import re, resource, sys
from pathlib import Path
from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.run import work
from zeropoint.cli.main import main

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

warm, source, out, to, room, planted, layout = sys.argv[1:]
more = ["--to", to, "--workers", "2", "--json", "--format", layout]
assert main(["quantize", warm, out + "-warm", *more]) == 0
if planted == "whole":
    work.tile_shape = output_tensors.tile_shape = lambda weight, limits: (1 << 40, weight.shape[1])
before = status("VmSize")
resource.setrlimit(resource.RLIMIT_AS, (before + int(room), before + int(room)))
code = main(["quantize", source, out, "--max-memory", "512M", *more])
print("peak", status("VmHWM"), "room", status("VmPeak") - before, file=sys.stderr)
sys.exit(code)
"""
ROOM = 512 * MIB - BASE_MEMORY + 160 * MIB

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are Linux's"),
    pytest.mark.rotating,
]


def sparse(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a checkpoint of zeros in bfloat16 that takes no room on the disk."""
    folder.mkdir()
    table, begin = {}, 0
    for name, shape in shapes.items():
        size = 2
        for extent in shape:
            size *= extent
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + begin)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def sparse_onnx(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """Write an ONNX model of products with zeros in float32, which lie next to it and take no room."""
    folder.mkdir()
    held, nodes, begin = [], [], 0
    for name, (inputs, outputs) in shapes.items():
        tensor = TensorProto(name=name, dims=[inputs, outputs], data_type=1, data_location=1)
        size = 4 * inputs * outputs
        for key, value in (("location", "numbers.bin"), ("offset", str(begin)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
        held.append(tensor)
        nodes.append(helper.make_node("MatMul", [f"x of {name}", name], [f"y of {name}"]))
        begin += size
    proto = helper.make_model(
        helper.make_graph(nodes, "main", [], [], held), opset_imports=[helper.make_opsetid("", 21)]
    )
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    with (folder / "numbers.bin").open("wb") as file:
        file.truncate(begin)
    return folder


def quantized(
    source: Path, tmp_path: Path, to: str, *, planted: str = "", layout: str = "compressed-tensors"
) -> tuple[int, str]:
    """Quantize in a child under a limit; return its status and what it says."""
    if layout == "onnx":
        warm = sparse_onnx(tmp_path / "warm", {"w": (512, 512)})
    else:
        warm = save(tmp_path / "warm", {"m.weight": weight(512, 512)})
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable, "-c", CHILD, str(warm), str(source), str(tmp_path / "out"), to, str(ROOM),
            planted, layout,
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, env=environment,
    )  # fmt: skip
    return done.returncode, done.stderr


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "larger-than-the-limit": {"m.weight": (19_000, 16_384), "norm.weight": (7,), "empty": (0, 4)},
    "experts": {"m.experts.gate_up_proj": (6, 4096, 2048), "m.experts.down_proj": (6, 2048, 2048)},
    "odd": {
        "a.weight": (3_000_000, 32), "b.weight": (1, 1_000_000), "c.weight": (7, 130_048), "d.weight": (5, 3),
        "e.weight": (1, 1), "f.weight": (100_003, 33), "big.bias": (200_000_000,), "none": (0,),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "to"),
    [
        ("larger-than-the-limit", "w4a16"),
        pytest.param("odd", "int4:g32", marks=pytest.mark.slow),
        pytest.param("experts", "nvfp4a16", marks=pytest.mark.slow),
        pytest.param("odd", "int8:channel", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_below_the_limit(shapes: str, to: str, tmp_path: Path) -> None:
    source = sparse(tmp_path / "in", SHAPES[shapes])
    status, said = quantized(source, tmp_path, to)
    assert status == 0, said
    peak = int(said.split()[1])
    assert peak < PEAK, said
    assert "model.safetensors" in digests(tmp_path / "out")


ONNX = {f"w{n}": (16_384, 12_288) for n in range(4)}
"""Together 3.2 GB, of which a transposed weight is cut along its inputs."""


@pytest.mark.slow
def test_an_onnx_model_far_above_the_limit_is_quantized_below_it(tmp_path: Path) -> None:
    source = sparse_onnx(tmp_path / "in", ONNX)
    assert (source / "numbers.bin").stat().st_size == 6 * 512 * MIB
    status, said = quantized(source, tmp_path, "int4:g128", layout="onnx")
    assert status == 0, said
    assert int(said.split()[1]) < PEAK, said
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size > 400 * MIB


@pytest.mark.slow
def test_a_run_that_takes_whole_tensors_does_not_pass_this_limit(tmp_path: Path) -> None:
    source = sparse(tmp_path / "in", SHAPES["larger-than-the-limit"])
    status, said = quantized(source, tmp_path, "w4a16", planted="whole")
    assert status != 0
    assert "out of memory" in said or "allocate" in said, said
