"""Quotients of two operations differ from IEEE's where the kernels say so, and nowhere else."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating

SOURCE = Path(__file__).with_name("short_quotients.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(("bits", "different"), [(7, 11), (10, 28)])
def test_all_pairs_of_significands_are_counted(bits: int, different: int, tmp_path: Path) -> None:
    program = tmp_path / "short_quotients"
    options = ["-O3", "-march=native", "-ffp-contract=off", "-o", str(program), str(SOURCE), "-lm"]
    subprocess.run([str(COMPILER), *options], check=True)
    ran = subprocess.run([str(program), str(bits)], capture_output=True, text=True, check=True)
    # Of bfloat16 (8 bits) and float16 (11 bits); the one near a boundary is excluded by `usual`.
    assert ran.stdout.split() == [str(different), "1"]
