"""Header rows of a file's tensors, some of which stack model tensors.

The parts of one lie next to each other, in their order, in one dtype: the same matrix of all experts of a
layer, as GGUF files have them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...codecs.containers.protocol import Row
from ...codecs.stored_forms import StoredForm
from ...errors import CheckpointError, printable


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
