"""Container protocol: file headers, tensor offsets, and metadata.

A container knows bytes and names; it opens no file, and knows neither codecs nor which tensors are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from ...errors import UnsupportedError

if TYPE_CHECKING:
    import torch


class Value(Protocol):
    """A value of a file's metadata that is kept as its bytes."""

    def get(self) -> Scalar | Sequence[Scalar]:
        """Return it as a Python value."""


Scalar: TypeAlias = str | bool | int | float
Metadata: TypeAlias = Mapping[str, Scalar | Sequence[Scalar] | Value]
"""Metadata of a file by key; safetensors hold texts alone."""
Read = Callable[[int, int], bytes]
"""From an offset and a number of bytes to these bytes of a file."""


class Row(NamedTuple):
    """A tensor of a file: name, dtype, shape, and byte count.

    data: these bytes, of a tensor that follows from the configuration and is written with the head.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: bytes = b""


class Head(NamedTuple):
    """A file header, tensor offsets in order, and the file size."""

    data: bytes
    begins: Sequence[int]
    size: int


class Use(NamedTuple):
    """Use of a tensor in a file's graph, if it has one.

    kind: what recipes call the type of its layer. operators: of the nodes that it is an input of. reason: why
    it is no weight of such a layer, or None. transposed: whether inputs come before outputs; its row has
    the shape (outputs, inputs). axis: of its inputs; axes before it are outputs, or inputs where it is
    transposed, and axes behind it the others. kernel: values behind the axis of inputs that are inputs, too.
    run: inputs of one matrix where a row holds the inputs of several, else 0. spread: whether outputs lie
    along several axes. part: the quantized layer that it is a part of, and which part. inside: whether a node
    reads it in the body of another one.
    """

    kind: str = "Other"
    operators: tuple[str, ...] = ()
    reason: str | None = None
    transposed: bool = False
    axis: int = 1
    kernel: int = 1
    run: int = 0
    spread: bool = False
    part: tuple[str, str] | None = None
    inside: bool = False


class Found(NamedTuple):
    """A tensor of a read file: its row, and its absolute offset.

    file: name of the file next to it that holds them, or nothing for itself. use: what its graph says.
    """

    row: Row
    begin: int
    file: str = ""
    use: Use | None = None


class GraphFiles(NamedTuple):
    """A model with a graph on a disk.

    graph: its file's bytes besides tensors. files: of each tensor, in the folder.
    """

    graph: bytes
    folder: Path
    files: Mapping[str, str]


Samples: TypeAlias = "Callable[[Sequence[str]], Mapping[str, torch.Tensor]]"
"""Function of input names that returns a tensor (samples, ...) for each, or one unnamed tensor."""


class Container(Protocol):
    """A kind of file.

    name: under which codecs ask for it. suffix: how its files end. indexed: whether an index file next to the
    files says which tensor is where, and the configuration what is quantized. keeps_order: whether tensors
    lie in the order of a source that is such a file, too. has_graph: whether it says how tensors are used.
    """

    name: str
    suffix: str
    indexed: bool
    keeps_order: bool = False
    has_graph: bool = False

    def files(self, shards: Sequence[str]) -> list[str]:
        """Return the output file of each source shard."""

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Return a tensor's bytes; raises CheckpointError for a foreign dtype."""

    def order(self, dtype: str) -> int:
        """Return the rank of a dtype; equal ranks lie by name."""

    def parse(self, read: Read, size: int) -> tuple[list[Found], Metadata]:
        """Return the tensors of a file in byte order, and its metadata.

        read: bytes of the file, which has ``size``. Raises CheckpointError for a file that is not
        well-formed. Safetensors are read as a stream (checkpoint/read/safetensors_file.py).
        """
        raise UnsupportedError(f"{self.name} files are read as a stream; use read_header")

    def graph(self, read: Read, size: int) -> bytes:
        """Return a file's graph, without tensors, from which codecs write.

        read: bytes of the file, which has ``size``. Raises CheckpointError for a file that is not
        well-formed.
        """
        return b""

    def inside(self, graph: bytes) -> list[str]:
        """Return the tensors inside a graph, which stay as they are."""
        return []

    def load_error(self, file: Path) -> str | None:
        """Return why the containers' engine rejects a file, or None.

        file: on this machine, with all that belongs to it.
        """
        return None

    def layer_inputs(
        self, files: GraphFiles, modules: Collection[str], samples: Samples, require: Callable[[int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield modules, each with its float32 input of a batch.

        require: is called with the bytes of all inputs of the first batch, and raises where memory is short.
        Raises CalibrationError for samples that are no inputs of the graph; UnsupportedError where no engine
        runs it here, and for a module whose inputs are not seen.
        """
        raise UnsupportedError(f"{self.name} files have no graph that is run here")

    def head(self, rows: Iterable[Row], metadata: Metadata) -> Head:
        """Return the header for tensors; raises CheckpointError where it cannot.

        rows: those with data come first.
        """
