"""Output files: numbered names, model metadata and header rows.

A row of a header may stack tensors of the model: the same matrix of all experts of a layer, as GGUF files
have them. The parts of one lie next to each other, in their order, in one dtype.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...codecs.containers.protocol import Row
from ...codecs.model_format import ModelFiles
from ...codecs.stored_forms import StoredForm
from ...errors import CheckpointError, printable
from ..read.index import NUMBERED
from ..read.source import Source
from ..read.storage import read_small
from .texts import Text

MAX_TOKENIZER_BYTES = 64_000_000
"""Most bytes of a file of a tokenizer; the largest published have 33 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScale:
    """Weights with one tensor scale, and the shards that hold them."""

    modules: tuple[str, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShard:
    """A file to write: its name, its header and its size."""

    name: str
    head: Text
    size: int

    @property
    def header(self) -> bytes:
        """Its first bytes."""
        return bytes(self.head)


def without_gaps(names: Sequence[str]) -> tuple[str, ...]:
    """Return file names with ``NUMBER-of-COUNT`` renumbered where files are left out.

    >>> without_gaps(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    """
    found = [NUMBERED.fullmatch(name) for name in names]
    if any(match is None or int(match["count"]) == len(names) for match in found):
        return tuple(names)
    stems = [match["stem"] for match in found if match is not None]
    return tuple(f"{stem}-{n:05}-of-{len(names):05}.safetensors" for n, stem in enumerate(stems, start=1))


def model_files(source: Source, shard: str, mixture: str | None = None) -> ModelFiles:
    """Return the model metadata for a file header.

    shard: the source's file that it comes from. mixture: the mixture that chose the types, if any.
    """
    present = {str(path) for path in source.companions}

    def read(name: str) -> bytes | None:
        return read_small(source.root / name, limit=MAX_TOKENIZER_BYTES)[0] if name in present else None

    def rows() -> int:
        return max((entry.shape[0] for entry in source.entries.values() if entry.shape), default=0)

    return ModelFiles(
        config=source.config or {},
        metadata=source.metadata[shard],
        read=functools.cache(read),
        rows=functools.cache(rows),
        mixture=mixture,
    )


class FiledTensor(NamedTuple):
    """A tensor of the model as a file holds it.

    form: its name there, and which part of what it is. dtype: as the container spells it. shape: of the
    tensor in the model.
    """

    form: StoredForm
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def joined_rows(
    numbers: Sequence[int], filed: Callable[[int], FiledTensor], counts: array[int]
) -> Iterator[Row]:
    """Yield the header row of each tensor of a file.

    Appends to ``counts`` the number of model tensors in each. numbers: of the tensors of the model, in the
    order of the file. Raises CheckpointError where parts are missing or differ.
    """
    at = 0
    while at < len(numbers):
        first = filed(numbers[at])
        parts = 1 if first.form.part is None else first.form.part[1]
        if first.form.part is not None:
            _require_alike([filed(number) for number in numbers[at : at + parts]])
        counts.append(parts)
        at += parts
        yield Row(first.form.name, first.dtype, first.form.file_shape(first.shape), parts * first.nbytes)


def _require_alike(found: Sequence[FiledTensor]) -> None:
    """Raise CheckpointError unless tensors are all parts of one, in one dtype."""
    name, part = printable(found[0].form.name), found[0].form.part
    assert part is not None
    mine = [each for each in found if each.form.name == found[0].form.name]
    there = {each.form.part[0] for each in mine if each.form.part is not None}
    missing = sorted(set(range(part[1])) - there)
    if missing:
        raise CheckpointError(
            f"{name} holds {part[1]} experts, and {missing[0]} is not in the checkpoint; download it again"
        )
    dtypes = sorted({each.dtype for each in mine})
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{name} holds {part[1]} experts in one type, but they would be {' and '.join(dtypes)}; give all "
            "experts of a layer one scheme"
        )
    if len({each.shape for each in mine}) > 1:
        raise CheckpointError(f"{name} holds {part[1]} experts in one shape, but theirs differ")
