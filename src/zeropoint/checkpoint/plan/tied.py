"""Tied output heads: absent ones, and copies of the embedding.

A model whose configuration says ``tie_word_embeddings`` takes its head from the embedding. A checkpoint may
hold the head all the same; where its bytes equal the embedding's, nothing is lost without it.
"""

from __future__ import annotations

from ...architectures import heads_of, is_input_embedding, says_tied
from ...loaded_names import tied_layers
from ..read.source import Source
from ..read.storage import opened, read_bytes
from ..read.tensor_entries import TensorEntry
from .selection import WEIGHT, module_of

_COMPARED = 1 << 22
"""Bytes that are compared at once."""


def _is(module: str, head: str) -> bool:
    return module == head or module.endswith("." + head)


def tied_heads(source: Source) -> list[str]:
    """Return tied heads of the model that the checkpoint lacks."""
    config, present = source.config or {}, [module_of(name) for name in source.entries]
    known = heads_of(config)
    absent = [head for head in known if not any(_is(name, head) for name in present)]
    if absent or not known:
        absent += [layer for layer in tied_layers(config) if layer not in (*known, *present)]
    return absent


def tied_copies(source: Source) -> dict[str, str]:
    """Return heads with the bytes of their tied embedding, by name.

    Reads both where dtype and shape agree. Raises CheckpointError when a file cannot be read.
    """
    config = source.config or {}
    if not says_tied(config):
        return {}
    heads = [e for e in source.entries.values() if any(_is(module_of(e.name), h) for h in heads_of(config))]
    embeddings = [
        e
        for e in source.entries.values()
        if e.name.endswith(WEIGHT) and is_input_embedding(module_of(e.name))
    ]
    return {
        head.name: embedding.name for head in heads for embedding in embeddings if _equal(head, embedding)
    }


def _equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether two tensors have one dtype, shape and bytes."""
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    with opened(a.file) as one, opened(b.file) as other:
        for start in range(0, a.nbytes, _COMPARED):
            size = min(_COMPARED, a.nbytes - start)
            if read_bytes(one, a.begin + start, size) != read_bytes(other, b.begin + start, size):
                return False
    return True
