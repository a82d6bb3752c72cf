"""What tests of models of checkpoints share."""

from pathlib import Path

import pytest
from tests.oracles import synthetic_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in shards."""
    return synthetic_llama.write(tmp_path_factory.mktemp("source") / "in")
