"""The guide page about plans shows what really happens."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs/prepared.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_block_of_the_page_runs() -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) > 5
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in blocks:
        assert "\n" in block
        exec(compile(block, str(PAGE), "exec"), names)
