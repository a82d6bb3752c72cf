"""Every byte as it was: outputs.json holds hashes; what changes one is in bold in the changelog."""

import json
from collections.abc import Callable, Iterator

import pytest
from tests.golden import outputs


@pytest.mark.parametrize("part", range(3))
def test_every_scheme_has_the_bytes_that_are_recorded_in_one_dtype(part: int) -> None:
    recorded = json.loads(outputs.HASHES.read_text())
    found = dict(outputs.a_third_of_tensors(part))
    assert len(found) > 100
    assert {name: digest for name, digest in found.items() if recorded[name] != digest} == {}


@pytest.mark.parametrize(
    "part",
    [pytest.param(outputs.tensors, marks=pytest.mark.slow), outputs.models, outputs.dense, outputs.experts],
)
def test_every_output_has_the_bytes_that_are_recorded(part: Callable[[], Iterator[tuple[str, str]]]) -> None:
    recorded = json.loads(outputs.HASHES.read_text())
    kind = {"tensors": "tensor", "models": "model"}.get(part.__name__, f"checkpoint {part.__name__}")
    expected = {name: digest for name, digest in recorded.items() if name.startswith(f"{kind} ")}
    found = dict(part())
    assert found.keys() == expected.keys()
    assert {name for name in expected if found[name] != expected[name]} == set()
