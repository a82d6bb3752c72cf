"""The page of architectures says what the trials found."""

from __future__ import annotations

from docs.make_architecture_table import PAGE, page

from zeropoint.codecs.compressed_tensors.tested import rows


def test_the_page_on_disk_is_made_from_the_answers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(rows())
