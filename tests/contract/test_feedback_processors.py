"""Error feedback has the same bytes where its kernels are compiled for another processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.test_vectors import MACHINES, X86

HASH = """
import hashlib, torch
from zeropoint.ops import feedback
torch.manual_seed(0)
digest = hashlib.sha256()
def take(*tensors):
    for x in tensors:
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
order, block_of = torch.randperm(200), torch.arange(200) // 100
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.randn(300, 200).to(dtype)
    h = feedback.gram(x)
    h.diagonal().add_(0.01 * h.diagonal().mean())
    m, d = feedback.factor(h[order][:, order])
    take(h, m, d, feedback.squares(x), feedback.gram(x, x[:, :70]), feedback.solve(h, m, d, order))
for levels, ties in ((torch.arange(-8, 8), None), (torch.tensor([-1, 0, 2, 9]), torch.tensor([0, 1, 0]))):
    scale, weight = torch.rand(40, 2) + 0.1, torch.randn(40, 200)
    named = dict(scale=scale, block_of=block_of, ties_up=ties, offset=scale / 7)
    grid = feedback.Grid(levels=levels.double(), **named)
    values, losses = feedback.feed_back(weight, m, d, order, grid)
    take(values, losses, *feedback.descend(weight, values, h, order, grid, sweeps=2))
print(digest.hexdigest())
"""


def hash_with(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HASH],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@X86
@pytest.mark.slow  # compiles all of these kernels for each processor
def test_other_processors_give_the_bytes_of_this_one(tmp_path: Path) -> None:
    own = hash_with()
    for machine, features in MACHINES.items():
        cache = str(tmp_path / machine)
        other = hash_with(NUMBA_CPU_NAME=machine, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=cache)
        assert other == own, machine
