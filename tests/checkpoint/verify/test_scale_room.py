"""Block scales of NVFP4 say by which rule they were chosen."""

from pathlib import Path

import pytest
from tests.checkpoint.written import LINEAR, quantize, save, weight

import zeropoint as zp


@pytest.mark.parametrize(("to", "said"), [("nvfp4a16", False), ("nvfp4a16:scale=four_over_six", True)])
def test_files_of_four_over_six_are_named(to: str, said: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "in", {LINEAR: weight(64, 128)})
    quantize(source, tmp_path / "out", to)
    found = zp.inspect_checkpoint(tmp_path / "out")
    assert any("leaves the room of four over six" in line for line in found.lines) is said
