"""How tensors share files: heads, offsets and names of files, whatever a codec puts there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .gguf import GGUF
from .onnx import ONNX
from .protocol import Container
from .safetensors import SAFETENSORS

CONTAINERS: Mapping[str, Container] = MappingProxyType({c.name: c for c in (SAFETENSORS, GGUF, ONNX)})
"""Name to container."""


def container_of(file: str) -> Container:
    """Return the container that a file of this name is; safetensors where the name tells nothing.

    >>> container_of("a/model.safetensors").name
    'safetensors'
    """
    return next((each for each in CONTAINERS.values() if file.endswith(each.suffix)), SAFETENSORS)
