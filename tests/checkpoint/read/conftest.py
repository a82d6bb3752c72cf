"""What tests of safetensors headers share: writing bytes, and the message with which a file is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from zeropoint.checkpoint.read.safetensors_file import parse_header
from zeropoint.errors import CheckpointError

Write = Callable[..., Path]
Refusal = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: bytes, name: str = "x.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def refusal(write: Write) -> Refusal:
    """Return the message with which a file is refused: one line, with the path in it."""

    def refusal(content: bytes, name: str = "x.safetensors") -> str:
        path = write(content, name)
        with pytest.raises(CheckpointError) as caught:
            parse_header(path)
        message = str(caught.value)
        assert name in message
        assert "\n" not in message
        assert message.isprintable()
        return message

    return refusal
