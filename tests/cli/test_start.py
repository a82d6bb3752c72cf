"""What a command loads before it does anything: only what it may need."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest

import zeropoint as zp

LOADED = "import sys, zeropoint.cli.main; print(*sys.modules)"


def test_the_command_line_loads_neither_models_nor_kernels() -> None:
    child = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = child.stdout.split()
    assert "zeropoint.checkpoint.run" in loaded
    parts = ("models", "prepared", "stats", "training", "kernels")
    assert [name for name in loaded if name.startswith(tuple(f"zeropoint.{part}" for part in parts))] == []
    assert {"numba", "transformers", "ray", "fsspec"}.isdisjoint(loaded)


def test_every_public_name_is_there() -> None:
    assert {name for name in zp.__all__ if not hasattr(zp, name)} == set()
    assert set(zp.__all__) <= set(dir(zp))
    assert zp.stats is sys.modules["zeropoint.stats"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zeropoint' has no attribute 'quantise'"):
        operator.attrgetter("quantise")(zp)
