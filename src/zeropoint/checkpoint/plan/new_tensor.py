"""New tensors of an output, which its source does not have."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...codecs.safetensors_dtypes import FILE_DTYPES
from ...layout.packing import flat_bytes
from ..read.tensor_entries import TensorEntry
from .origin import Origin


class NewTensor(NamedTuple):
    """A new tensor: its name, the tensor before it, and its numbers."""

    name: str
    near: TensorEntry
    value: torch.Tensor

    @property
    def origin(self) -> Origin:
        """What writes it."""
        value, near = self.value.detach().cpu().contiguous(), self.near
        entry = TensorEntry(
            name=self.name, dtype=FILE_DTYPES[value.dtype], shape=tuple(value.shape), begin=near.begin,
            nbytes=value.nbytes, file=near.file,
        )  # fmt: skip
        return Origin(entry=entry, data=flat_bytes(value).numpy().tobytes())
