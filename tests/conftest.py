"""What every test may rely on, however the suite was started."""

import gc
import importlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.selection", "tests.durations", "tests.slow_plugin"]

# Nothing that collecting makes is garbage; see pytest_collection_finish.
gc.disable()

# Before any module of tests loads transformers, which loads Triton.
importlib.import_module("tests.kernels.triton.interpreter")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; the tests of Ctrl-C send it
# to children of their own. A handler, unlike SIG_IGN, is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where kernels are not compiled yet a line on stderr says so, which no test of what a command writes expects.
os.environ.setdefault("ZEROPOINT_QUIET", "1")

# One thread a worker: the teams of several would wait for each other at every step. What threads may change
# is tested with counts of its own.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine draws inputs slowly, which is no fault of a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

MEMORY_DISK, ROOM = Path("/dev/shm"), 4 << 30


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let tests write to a disk in memory where there is one: making files durable takes no time there."""
    if config.option.basetemp is None and MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM:
        config.option.basetemp = tempfile.mkdtemp(prefix="zeropoint-tests-", dir=MEMORY_DISK)
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Take modules and items, which live as long as the process, out of what the garbage collector visits."""
    gc.collect()
    gc.freeze()
    gc.enable()
