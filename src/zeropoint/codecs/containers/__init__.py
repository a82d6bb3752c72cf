"""Containers: headers, offsets and names of files, for any codec."""

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
    """Return the container of a file name, by default safetensors.

    >>> container_of("a/model.safetensors").name
    'safetensors'
    """
    return next((each for each in CONTAINERS.values() if file.endswith(each.suffix)), SAFETENSORS)
