"""Every byte as it was: outputs.json holds hashes; what changes one is in bold in the changelog."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from tests.golden import outputs


@pytest.mark.parametrize("part", [outputs.tensors, outputs.models, outputs.checkpoints])
def test_every_output_has_the_bytes_that_are_recorded(
    part: Callable[[], Iterator[tuple[str, str]]],
) -> None:
    recorded = json.loads(outputs.HASHES.read_text())
    kind = part.__name__.removesuffix("s")
    expected = {name: digest for name, digest in recorded.items() if name.startswith(f"{kind} ")}
    found = dict(part())
    assert found.keys() == expected.keys()
    assert {name for name in expected if found[name] != expected[name]} == set()
