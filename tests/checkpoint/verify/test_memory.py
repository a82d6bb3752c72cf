"""Verification and comparison within --max-memory, measured by the system in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import quantize, save

_CHILD = """
import sys
from pathlib import Path
from zeropoint.cli.main import main
status = main(sys.argv[1:])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(status, int(peak.split()[1]) << 10, file=sys.stderr)
"""


def peak_of(*arguments: object) -> int:
    """Return the largest resident memory of a command, which must succeed, in bytes."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, arguments)],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    status, peak = done.stderr.split()[-2:]
    assert status == "0", done.stderr
    return int(peak)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16"])
def test_a_checkpoint_larger_than_the_limit_is_verified_and_compared_below_it(
    scheme: str, tmp_path: Path
) -> None:
    tensors = {
        "m.up.weight": torch.ones(24 << 10, 4096, dtype=torch.bfloat16),  # 192 MiB each
        "embed_tokens.weight": torch.zeros(24 << 10, 4096, dtype=torch.bfloat16),
    }
    source = save(tmp_path / "in", tensors)
    del tensors
    quantize(source, tmp_path / "out", scheme)
    limit = 512 << 20
    for command in (("verify", tmp_path / "out", "--against", source), ("compare", source, tmp_path / "out")):
        assert peak_of(*command, "--workers", 2, "--max-memory", limit) < limit


@pytest.mark.slow
def test_a_small_checkpoint_takes_less_than_a_large_limit(tmp_path: Path) -> None:
    """The control of what is measured: most of it is Python and torch, which the limit includes."""
    source = save(tmp_path / "in", {"m.up.weight": torch.ones(64, 128)})
    quantize(source, tmp_path / "out")
    assert 100 << 20 < peak_of("verify", tmp_path / "out", "--workers", 1) < 450 << 20
