"""Output layout: file and byte offset of every tensor.

Output shards have the names of the input's, and each tensor stays in its shard; experts that a file stacks go
to the first one's, and shards that this leaves without tensors are left out. Inside a file, tensors lie in
the order that safetensors' own writer gives them: falling dtype, then name. What is kept of each tensor is
its offset and what it comes from; the rest follows from that when it is asked for.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...architectures import shared_scale_set
from ...codecs.containers import CONTAINERS
from ...codecs.containers.protocol import Metadata
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.model_format import FileTensor
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.stored_forms import StoredForm
from ...codecs.tensor_fields import TensorSpec
from ...columns import Interned, LazySequence, StringTable, ordered
from ...errors import CheckpointError, printable
from ..read.source import Source
from ..read.tensor_entries import TensorEntry
from .actions import Actions
from .output_files import FiledTensor, OutputShard, joined_rows, model_files, without_gaps
from .output_tensors import Output, OutputTensor
from .row_changes import in_form, in_model_form, matrix_rows
from .row_reader import RowReader, StoredFloats
from .selection import WEIGHT, is_fused_experts, module_of
from .tensor_matrices import WeightMatrix, matrices
from .texts import Text


class Outputs:
    """Outputs by number: kept, restored and added tensors, then weights.

    kept, restored, weights: each of these. added: what is written. all: one after the other; output tensors
    are numbered in the same order. shards: the files. by_name: every output tensor, by name.
    source, actions, codec: what they are made from. Raises CheckpointError when two would have one name, and
    when a header exceeds what loaders read.
    """

    def __init__(self, source: Source, actions: Actions, codec: Codec) -> None:
        self._container, self.codec = CONTAINERS[codec.container], codec
        self._config = actions.floats.source.config or {}
        files = [f"{codec.model_format.prefix}{name}" for name in self._container.files(source.shards)]
        self.actions, self._entries = actions, actions.floats.source.entries
        self.source, self._weight = source, functools.lru_cache(_RECENT)(self._make_weight)
        self._readers = (*actions.restored, *actions.added)
        self._shards = tuple(dict.fromkeys(files))
        self.layers: tuple[LayerScheme, ...] = tuple(
            dict.fromkeys(layer for _, layer, _ in actions.quantized)
        )
        # Of each weight: its tensor, which matrix of that (-1: all of it), scheme, method, set and outputs.
        self._entry, self._matrix, self._layer = array("I"), array("i"), array("I")
        self._methods, self._method = StringTable(), array("I")
        self._shares, self._first = array("b"), array("q")
        # Of each output tensor: what it is, its file, and where it begins there.
        self._specs, self._kind, self._file = Interned(), array("I"), array("I")
        self._draft({name: self._shards.index(file) for name, file in zip(source.shards, files, strict=True)})
        self._begins = array("q", [0]) * len(self._kind)
        self._sizes = [self._spec_bytes(self._specs[n]) for n in range(len(self._specs))]
        kept, self._base = len(actions.kept), len(actions.kept) + len(self._readers)
        renamed = self._gather()
        self.all: Sequence[Output] = LazySequence(self._base + len(self._entry), self._output)
        self.kept: Sequence[Output] = LazySequence(kept, self._written)
        self.restored: Sequence[Output] = LazySequence(
            len(actions.restored), lambda n: self._written(kept + n)
        )
        self.added = actions.added
        self.weights: Sequence[Output] = LazySequence(len(self._entry), self._weight)
        self._order = ordered(range(len(self._kind)), self._name)
        self._require_unique()
        metadata = {
            renamed[file]: codec.model_format.metadata(
                replace(
                    model_files(source, name, actions.mixture),
                    tensors=self._contents(renamed[file]),
                    metadata=actions.floats.source.metadata[name],
                    rewritten=actions.rewrite(codec),
                )
            )
            for name, file in zip(source.shards, files, strict=True)
            if file in renamed
        }
        self.shards = tuple(self._lay_out(metadata))
        self.by_name: Sequence[OutputTensor] = LazySequence(
            len(self._kind), lambda n: self.at(self._order[n])
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outputs):
            return NotImplemented
        return self.shards == other.shards and self.all == other.all

    __hash__ = None  # type: ignore[assignment]

    def with_added(self, added: Sequence[RowReader]) -> Outputs:
        """Return the outputs with some more added tensors."""
        actions = replace(self.actions, added=(*self.actions.added, *added))
        return Outputs(self.source, actions, self.codec)

    @property
    def nbytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(map(self._sizes.__getitem__, self._kind))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the output tensors of all weights."""
        return sum(map(self._sizes.__getitem__, self._kind[self._base :]))

    @property
    def of_weights(self) -> Sequence[OutputTensor]:
        """The output tensors of all weights."""
        return LazySequence(len(self._kind) - self._base, lambda n: self.at(self._base + n))

    def at(self, number: int) -> OutputTensor:
        """Return the output tensor of a number."""
        kind = self._kind[number]
        return OutputTensor(
            name=self._name(number),
            spec=self._specs[kind],
            shard=self._shards[self._file[number]],
            begin=self._begins[number],
            nbytes=self._sizes[kind],
        )

    def module(self, weight: int) -> str:
        """Return the module name of a weight, by the weight's index."""
        entry, matrix = self._entry[weight], self._matrix[weight]
        if matrix < 0:
            return module_of(self._entries.name(entry))
        return self._matrices(self._entries.at(entry), self.layers[self._layer[weight]])[matrix].module

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor name in the files and its file, in order."""
        for number in self._order:
            form = self._filed(number).form
            if form.part is None or form.part[0] == 0:
                yield form.name, self._shards[self._file[number]]

    def owner(self, number: int) -> int:
        """Return the output number of an output tensor, by name order."""
        return self._owner(self._order[number])

    def _owner(self, number: int) -> int:
        return number if number < self._base else self._base + bisect_right(self._first, number) - 1

    def _draft(self, shards: Mapping[str, int]) -> None:
        """Lay down all tensors in columns."""
        actions = self.actions
        for number in range(len(actions.kept) + len(self._readers)):
            entry = self._reader(number).entry
            # Its dtype may be one that torch has not.
            self._put(TensorSpec(suffix="", dtype=entry.dtype, shape=entry.shape), shards[entry.file.name])
        numbers = {layer: n for n, layer in enumerate(self.layers)}
        sets, members = StringTable(), array("i")
        for entry, layer, method in actions.quantized:
            self._methods.add(method)
            whole = not is_fused_experts(entry) or layer.codec.fused_experts
            for at, matrix in enumerate(self._matrices(entry, layer)):
                share = shared_scale_set(matrix.module) if layer.codec.shares_scale(layer) else None
                members.append(-1 if share is None else _numbered(sets, share))
                self._entry.append(self._entries.numbered(entry.name))
                self._matrix.append(-1 if whole else at)
                self._layer.append(numbers[layer])
                self._method.append(self._methods.numbered(method))
                self._first.append(len(self._kind))
                for spec in _specs(layer, matrix, entry):
                    self._put(spec, shards[entry.file.name])
        counts = Counter(members)
        self._shares.extend(member >= 0 and counts[member] > 1 for member in members)

    def _gather(self) -> dict[str, str]:
        """Move parts of stacked tensors into one file; return new names."""
        files: dict[str, int] = {}
        if not self.codec.model_format.stack or len(self._shards) == 1:
            return {name: name for name in self._shards}
        for number, file in enumerate(self._file):
            form = self._filed(number).form
            if form.part is not None:
                self._file[number] = files.setdefault(form.name, file)
        left = sorted(set(self._file))
        self._file = array("I", map({old: new for new, old in enumerate(left)}.__getitem__, self._file))
        before = [self._shards[number] for number in left]
        self._shards = without_gaps(before)
        return dict(zip(before, self._shards, strict=True))

    def _matrices(self, entry: TensorEntry, layer: LayerScheme) -> list[WeightMatrix]:
        return _matrices(entry, fused=layer.codec.fused_experts)

    def _put(self, spec: TensorSpec, file: int) -> None:
        self._kind.append(self._specs.number(spec))
        self._file.append(file)

    def _output(self, number: int) -> Output:
        return self._written(number) if number < self._base else self._weight(number - self._base)

    def _reader(self, number: int) -> RowReader:
        """Return the reader of floats or bytes that are written without quantization."""
        kept = self.actions.kept
        if number < len(kept):
            reader = in_model_form(StoredFloats(entry=kept[number]))
        else:
            reader = self._readers[number - len(kept)]
        return self._formed(reader, reader.entry.name)

    def _formed(self, reader: RowReader, name: str) -> RowReader:
        """Return a reader in the file form of a tensor's name."""
        form = self._form(name, reader.entry.shape)
        return reader if form is None else in_form(reader, form)

    def _form(self, name: str, shape: tuple[int, ...]) -> StoredForm | None:
        return self.codec.model_format.stored_form(name, shape, self._config)

    def _written(self, number: int) -> Output:
        return Output.written(self._reader(number), self.at(number))

    def _make_weight(self, number: int) -> Output:
        entry, layer = self._entries.at(self._entry[number]), self.layers[self._layer[number]]
        matrix = self._matrices(entry, layer)[max(0, self._matrix[number])]
        first = self._first[number]
        end = self._first[number + 1] if number + 1 < len(self._first) else len(self._kind)
        name = entry.name if self._matrix[number] < 0 else f"{matrix.module}{WEIGHT}"
        return Output(
            module=matrix.module,
            reader=matrix_rows(self._formed(self.actions.floats.reader(entry), name), matrix),
            shape=matrix.shape,
            to=layer,
            tensors=tuple(map(self.at, range(first, end))),
            share=shared_scale_set(matrix.module) if self._shares[number] else None,
            method=self._methods[self._method[number]],
        )

    def _name(self, number: int) -> str:
        at = self._owner(number) - self._base
        if at < 0:
            return self._reader(number).entry.name
        layer, suffix = self.layers[self._layer[at]], self._specs[self._kind[number]].suffix
        return layer.codec.separator.join((self.module(at), suffix))

    def _require_unique(self) -> None:
        for (a, name), (b, other) in itertools.pairwise((n, self._name(n)) for n in self._order):
            if name == other:
                first, second = (printable(self._source(number)) for number in sorted((a, b)))
                raise CheckpointError(
                    f"tensor {printable(name)} would be written twice, from {first} and from {second}; "
                    "rename one, or ignore the weight"
                )

    def _source(self, number: int) -> str:
        """Return the name of the tensor that an output tensor comes from."""
        at = self._owner(number) - self._base
        return self._name(number) if at < 0 else self._entries.name(self._entry[at])

    def _contents(self, file: str) -> Iterator[FileTensor]:
        """Yield the tensors of the model in a file, kept ones first."""
        shard = self._shards.index(file)
        for number in range(self._base):
            if self._file[number] == shard:
                spec = self._specs[self._kind[number]]
                yield FileTensor(self._name(number), None, spec.shape, TORCH_DTYPES.get(spec.dtype))
        for at, first in enumerate(self._first):
            if self._file[first] == shard:
                entry, layer = self._entries.at(self._entry[at]), self.layers[self._layer[at]]
                matrix = self._matrices(entry, layer)[max(0, self._matrix[at])]
                yield FileTensor(f"{matrix.module}{WEIGHT}", layer, matrix.shape, TORCH_DTYPES[entry.dtype])

    def _lay_out(self, metadata: Mapping[str, Metadata]) -> Iterator[OutputShard]:
        """Assign each tensor its offset, and yield the files with headers."""
        by_shard = [array("I") for _ in self._shards]
        for number, file in enumerate(self._file):
            by_shard[file].append(number)
        for name, numbers in zip(self._shards, by_shard, strict=True):
            found = ordered(numbers, self._in_file)
            fixed, counts = self.codec.model_format.fixed(self._config), array("I")
            rows = joined_rows(found, self._filed, counts)
            head = self._container.head(itertools.chain(fixed, rows), metadata[name])
            left = iter(found)
            for parts, begin in zip(counts, head.begins[len(fixed) :], strict=True):
                for at, number in enumerate(itertools.islice(left, parts)):
                    self._begins[number] = begin + at * self._sizes[self._kind[number]]
            yield OutputShard(name=name, head=Text.of(head.data), size=head.size)

    def _rank(self, number: int) -> int:
        """Return the primary sort key: dtype, or position in the source."""
        if not self._container.keeps_order or self.source.container is not self._container:
            return self._container.order(self._specs[self._kind[number]].dtype)
        at = self._owner(number) - self._base
        found = self._entries.number(self._reader(number).entry.name) if at < 0 else self._entry[at]
        return len(self._entries) if found is None else found

    def _spec_bytes(self, spec: TensorSpec) -> int:
        return self._container.nbytes(spec.dtype, spec.shape)

    def _in_file(self, number: int) -> tuple[int, str, int]:
        """Return a tensor's sort key within its file; stacked parts are adjacent."""
        name = self._name(number)
        form = self._form(name, self._specs[self._kind[number]].shape)
        if form is None or form.part is None:
            return self._rank(number), name, 0
        return self._rank(number), form.name, form.part[0]

    def _filed(self, number: int) -> FiledTensor:
        name, kind = self._name(number), self._kind[number]
        spec = self._specs[kind]
        form = self._form(name, spec.shape) or StoredForm(name)
        return FiledTensor(form=form, dtype=spec.dtype, shape=spec.shape, nbytes=self._sizes[kind])


def _numbered(names: StringTable, name: str) -> int:
    """Return the index of a name, added if it is missing."""
    added = names.add(name)
    return names.numbered(name) if added is None else added


def _specs(layer: LayerScheme, matrix: WeightMatrix, entry: TensorEntry) -> Sequence[TensorSpec]:
    """Return the output tensors of a matrix, with any expert axis."""
    specs = layer.codec.tensors(layer, matrix.shape, TORCH_DTYPES[entry.dtype])
    if matrix.experts is None:
        return specs
    return [
        replace(spec, shape=(matrix.experts, spec.shape[0] // matrix.experts, *spec.shape[1:]), stacked=True)
        for spec in specs
    ]


_matrices, _RECENT = functools.lru_cache(maxsize=8)(matrices), 32
