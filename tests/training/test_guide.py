"""The page on training shows what really happens: its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

from zeropoint import training

PAGE = Path(__file__).resolve().parents[2] / "docs/training.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_block_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for text in blocks:
        exec(compile(text, str(PAGE), "exec"), names)
    assert len(blocks) == 10


def test_every_quantizer_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in training.__all__ if name not in text and name != "Quantizer"] == []
