"""Kernels are compiled once on a machine: this is said, and can be done ahead of time."""

import subprocess
from pathlib import Path

import pytest
from tests import processes

CALL = """
import torch
from zeropoint.kernels.cpu.host.statistics import RowExtremes
from zeropoint.schemes import Granularity
rows = RowExtremes((4, 8), torch.float32, Granularity.tensor(), ranged=False)
rows.find(torch.ones(4, 8))  # the smallest kernel
print(float(rows.high.max()))
"""
# Names of compiled entry points with the types that they were compiled for, before and after other calls.
OTHER_CALLS = """
import sys, torch, zeropoint as zp
from torch import nn
from zeropoint.functional import row_errors
from zeropoint.methods import LayerData, method_named
from zeropoint.schemes import Scheme
from zeropoint.ops import feedback
from zeropoint.stats import GramMatrix, MeanSquare, Statistics
from zeropoint.warmup import compile_kernels
def compiled():
    kernels = [(name, module) for name, module in sys.modules.items() if name.startswith("zeropoint.kernels")]
    found = [(name, key, value) for name, module in kernels for key, value in vars(module).items()
             if hasattr(value, "signatures")]
    return {(name, key, str(types)) for name, key, value in found for types in value.signatures}
calls = compile_kernels()
before = compiled()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.randn(32, 384).to(dtype)
    for text in ("int6:g64", "uint4:channel:asym", "e4m3:g96", "mxfp6_e2m3", "fp4_bnb:g64", "int5:tensor",
                 "float8_e5m2:block64x64", "int5:g32:scale=bfloat16", "nvfp4:dialect=compressed-tensors"):
        q = zp.quantize(x, text)
        q.dequantize()
        row_errors(x, zp.quantize(x, q.params))
        trained = x.clone().requires_grad_()
        zp.fake_quantize(trained, q.params).sum().backward()
    for preset in ("w8a8", "w4a16", "mxfp4", "fp8_dynamic", "w4a8"):
        layer = zp.quantize_model(nn.Linear(384, 48, bias=False).to(dtype), preset).model
        with torch.no_grad():
            layer(x)
            layer(x[:1])
    square = MeanSquare(features=384)
    seen = Statistics(accumulator=square, state=square.update(square.start(), x))
    m, d = feedback.factor(GramMatrix(features=384).measure(x)["gram"] + torch.eye(384))
    feedback.solve(feedback.gram(x.double(), x), m, d, torch.arange(384).flip(0))
    for wide in (torch.float32, torch.float64):
        grid = feedback.Grid(levels=torch.tensor([-1.0, 0.5, 2.0]).double(), scale=torch.ones(32, 3).to(wide),
                             block_of=torch.arange(384) % 3, ties_up=torch.ones(2, dtype=torch.uint8))
        values, _ = feedback.feed_back(x.to(wide), m, d, None, grid)
        feedback.descend(x.to(wide), values, m @ m.T, None, grid, sweeps=2)
    for text in ("int4:g64", "int3:tensor", "uint4:g32:asym=real", "mxfp4", "float8_e4m3fn:g128", "w8a8",
                 "q6_k", "int4:g32:scale=signed", "int4:g128:scale=search2.4", "int4:g32:asym:scale=search"):
        scheme = Scheme.parse(text)
        for method in (method_named("mse"), method_named("mse_weighted")):
            if method.refusal(scheme) is None:
                method.quantize(x, scheme, LayerData(statistics={"mean_square": seen}))
        zp.quantize(x, scheme)
print(calls, len(before), sorted(compiled() - before))
"""


# Entry points of searches, and after the calls of ``warmup`` for them those that were not compiled.
SEARCHES = """
import pkgutil
from zeropoint import warmup
from zeropoint.kernels.cpu import least_error as room
names = "windows.searched_rows", "integer_scales.fitted_rows", "long_fits.long_fitted_slots"
names += "affine_scales.affine_slots", "tried_scales.tried_slots"
kernels = {name: pkgutil.resolve_name(f"{room.__name__}.{name}") for name in names}
for name, call in warmup._searches():
    call()
print(len(kernels), [name for name, value in kernels.items() if len(value.signatures) < 3])
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = processes.run(code, **environment)
    done.check_returncode()
    return done


def test_the_first_compilation_is_said_once_and_a_cached_kernel_is_silent(tmp_path: Path) -> None:
    first = run(CALL, NUMBA_CACHE_DIR=str(tmp_path), ZEROPOINT_QUIET="")
    assert first.stderr.startswith("zeropoint: compiling kernels for this machine, once; ")
    assert first.stderr.count("\n") == 1
    again = run(CALL, NUMBA_CACHE_DIR=str(tmp_path), ZEROPOINT_QUIET="")
    assert (first.stdout, again.stdout, again.stderr) == ("1.0\n", "1.0\n", "")


def test_where_no_folder_keeps_kernels_one_line_says_so_and_what_to_set() -> None:
    nowhere = {"NUMBA_CACHE_DIR": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}
    ran = run(CALL, **nowhere, ZEROPOINT_QUIET="")
    assert ran.stdout == "1.0\n"
    assert "in each run, since no folder can be written" in ran.stderr
    assert "set NUMBA_CACHE_DIR" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_functions_of_others_are_compiled_without_a_word() -> None:
    others = "import zeropoint.kernels.cpu, numba\nprint(numba.njit(lambda x: x + 1)(2))"
    ran = run(others, ZEROPOINT_QUIET="")
    assert (ran.stdout, ran.stderr) == ("3\n", "")


def test_each_kernel_that_searches_is_compiled_for_each_dtype() -> None:
    count, left = run(SEARCHES).stdout.split(maxsplit=1)
    assert int(count) >= 5
    assert left == "[]\n"


@pytest.mark.slow  # where kernels are not compiled yet it compiles all of them, two minutes of processor time
def test_after_warming_up_nothing_is_left_to_compile() -> None:
    ran = run(OTHER_CALLS)
    calls, entries, left = ran.stdout.split(maxsplit=2)
    assert int(calls) > 50
    assert int(entries) > 50
    assert left == "[]\n"
