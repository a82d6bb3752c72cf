"""The page on quantizers names all of them."""

from pathlib import Path

from zeropoint import training

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/quantizers.md"


def test_every_quantizer_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in training.__all__ if name not in text and name != "Quantizer"] == []
