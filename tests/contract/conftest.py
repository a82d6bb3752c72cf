"""Every backend on every device there is: Triton's interpreter stands in for a GPU on the host."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE

import zeropoint as zp


class Place(NamedTuple):
    """A backend, and the device of the tensors that it gets."""

    backend: str
    device: str


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PLACES = (
    Place("reference", "cpu"),
    Place("cpu", "cpu"),
    pytest.param(Place("triton", "cpu"), marks=pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")),
    pytest.param(Place("reference", "cuda"), marks=NO_GPU),
    pytest.param(Place("triton", "cuda"), marks=NO_GPU),
)


@pytest.fixture(params=PLACES, ids=lambda place: f"{place.backend}-{place.device}")
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Run the test on one backend alone, and hand it the device."""
    found: Place = request.param
    if found == ("triton", "cpu"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with zp.only_backend(found.backend):
        yield found
