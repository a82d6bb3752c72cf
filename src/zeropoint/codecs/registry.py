"""The codecs by name: each module of this package that defines ``CODEC``.

All code that writes or reads quantized checkpoints looks them up here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..errors import UnsupportedError, near_misses
from . import compressed_tensors
from .containers.protocol import Metadata
from .names import MODULES
from .protocol import Codec
from .stored_forms import StoredForm

DEFAULT: Codec = compressed_tensors.CODEC
"""Codec of results by default."""


class _Codecs(Mapping[str, Codec]):
    """Codecs by name, each imported when it is first looked up."""

    def __getitem__(self, name: str) -> Codec:
        return _codec(MODULES[name].module)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)

    def __contains__(self, name: object) -> bool:
        return name in MODULES


@functools.cache
def _codec(module: str) -> Codec:
    codec: Codec = import_module(f".{module}", __package__).CODEC
    return codec


CODECS: Mapping[str, Codec] = _Codecs()
"""Name to codec: the default, then the others by name."""


@functools.cache
def codecs_in(container: str) -> tuple[Codec, ...]:
    """Return the codecs of a container, the default first.

    Args:
        container: name of it.

    Example:
        >>> [codec.name for codec in codecs_in("gguf")]
        ['gguf', 'mmproj']
    """
    return tuple(CODECS[name] for name, found in MODULES.items() if found.container == container)


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``; raises UnsupportedError with those that there are.

    Args:
        name: what ``--format`` takes, a key of :data:`CODECS` in any case.
    """
    codec = CODECS.get(name.lower())
    if codec is None:
        raise UnsupportedError(f"format {name!r} is unknown; {near_misses(name, CODECS)}")
    return codec


_NONE: Metadata = MappingProxyType({})


def codec_of(container: str, metadata: Metadata = _NONE) -> Codec:
    """Return the codec of files that are not safetensors.

    Args:
        container: name of their container.
        metadata: of one of them, which tells codecs of one container apart.

    Example:
        >>> codec_of("gguf").name, codec_of("gguf", {"general.architecture": "clip"}).name
        ('gguf', 'mmproj')
    """
    return next(codec for codec in codecs_in(container) if codec.model_format.owns(metadata))


_PLAIN = {codec.model_format for codec in codecs_in(DEFAULT.container)}
"""Model formats of safetensors files."""
STACKS = tuple(found.stack for found in _PLAIN if found.stack)
"""Marks in tensor names for which :func:`parts_of` may apply."""


def parts_of(name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, StoredForm]]:
    """Return the model tensors in a safetensors tensor, or nothing.

    Args:
        name: of the tensor in the file.
        shape: its shape there.

    Example:
        >>> [name for name, _ in parts_of("a.mlp.switch_mlp.up_proj.weight", (2, 32, 8))]
        ['a.mlp.experts.0.up_proj.weight', 'a.mlp.experts.1.up_proj.weight']
    """
    return next(filter(None, (found.parts(name, shape) for found in _PLAIN)), ())


def claiming(quantization: Mapping[str, Any]) -> Codec | None:
    """Return the codec whose checkpoints have this ``quantization_config``, or None.

    Args:
        quantization: ``quantization_config`` of config.json.

    Example:
        >>> claiming({"quant_method": "fp8"}).name
        'fp8-block'
    """
    return next((codec for codec in CODECS.values() if codec.claims(quantization)), None)


def method_in(quantization: Mapping[str, Any]) -> str:
    """Return the configured method, or its codec's name.

    Args:
        quantization: ``quantization_config`` of config.json.

    Example:
        >>> method_in({"quant_method": "vptq"}), method_in({"bits": 4, "group_size": 64}), method_in({})
        ('vptq', 'mlx', 'unknown')
    """
    codec = claiming(quantization)
    return str(quantization.get("quant_method", "unknown" if codec is None else codec.name))


def methods() -> list[str]:
    """Return the values of ``quant_method`` that are read."""
    return list(dict.fromkeys(method for codec in CODECS.values() for method in codec.methods))
