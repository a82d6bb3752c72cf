"""Model metadata for file headers: configuration, tokenizer, quantization."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...codecs.model_format import ModelFiles
from ...codecs.protocol import LayerScheme
from ..read.source import Source
from ..read.storage import read_small

MAX_TOKENIZER_BYTES = 64_000_000
"""Most bytes of a file of a tokenizer; the largest published have 33 million."""


def model_files(
    source: Source, shard: str, layers: Sequence[LayerScheme], mixture: str | None = None
) -> ModelFiles:
    """Return the model metadata for a file header.

    shard: the source's file that it comes from. mixture: the mixture that chose the types, if any.
    """
    present = {str(path) for path in source.companions}

    def read(name: str) -> bytes | None:
        return read_small(source.root / name, limit=MAX_TOKENIZER_BYTES)[0] if name in present else None

    def rows() -> int:
        return max((entry.shape[0] for entry in source.entries.values() if entry.shape), default=0)

    return ModelFiles(
        config=source.config or {}, metadata=source.metadata[shard],
        layouts=[layer.layout for layer in layers], read=functools.cache(read), rows=functools.cache(rows),
        mixture=mixture,
    )  # fmt: skip
