"""The original of a quantized checkpoint as floats, by module."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.protocol import Codec
from ...codecs.records import Known
from ...codecs.registry import codec_of
from ...codecs.stored_forms import OMITTED
from ..plan.as_loaded import as_loaded
from ..plan.carried_scales import replacements
from ..plan.converted_layers import same_inputs
from ..plan.decisions import TensorDecision
from ..plan.float_view import Floats, as_floats
from ..plan.gathered import replaced
from ..plan.rescaled import folds_of, folds_text, rescaled_floats
from ..plan.rotated import rotated_floats, saved_rotation
from ..plan.row_changes import decoded_to, in_form, matrix_rows
from ..plan.row_reader import RowReader
from ..plan.selection import WEIGHT, Why, is_fused_experts
from ..plan.tensor_matrices import WeightMatrix, matrices, with_axes
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration
from ..read.source import Source, open_source
from ..read.storage import Place
from ..read.tensor_entries import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A checkpoint seen as floats.

    source: as it lies in its files. floats: seen as if it were not quantized. carried: what goes with
    its layers where they were converted, by name.
    """

    source: Source
    floats: Floats
    carried: Mapping[str, RowReader] = field(default_factory=dict)

    def converted(self, stored: StoredLayers) -> Original:
        """Return the original with scales and biases converted as in ``stored``."""
        made = {}
        for layer in stored.layers:
            weight, wanted = self.weight_of(layer), stored.reader.input_of(layer.module)
            found = None if weight is None else self.floats.quantized(weight.entry.name)
            if weight is None or found is None:
                continue
            static = wanted is not None and found[1] is not None and same_inputs(found[1], wanted)
            made[weight.entry.name] = TensorDecision(
                entry=self.floats.source.entries[weight.entry.name],
                layer=replace(layer.layer, input=wanted if static else None),
                why=Why.LINEAR,
                reason="",
            )
        if not made:
            return self
        codec = stored.layers[0].codec
        more = replacements(self.floats, list(made.values()), codec, requantize=True)
        floats = self.floats.without(more.gone)
        return replace(self, floats=floats, carried={reader.entry.name: reader for reader in more.added})

    def changed(self, source: Source) -> Original:
        """Return the original with the rotation and rescaling of ``source``."""
        floats, own = self.floats, self.source
        rotation, folds = saved_rotation(source), folds_of(source)
        if rotation is not None and saved_rotation(own) is None:
            floats = rotated_floats(floats, rotation)
            own = replace(own, config=floats.source.config, config_text=floats.source.config_text)
        if folds and folds_text(folds) != folds_text(folds_of(self.source)):
            floats = rescaled_floats(floats, folds)
        return replace(self, source=own, floats=floats)

    def placed(self, source: Source) -> Original:
        """Return the original with the tensors and names of files like ``source``."""
        codec = codec_of(source.container.name, source.metadata[source.shards[0]])
        floats = as_loaded(self.floats.in_pieces(codec), source.entries)
        floats = floats.without(floats.omitted(codec))
        # Published checkpoints and those that transformers saves have several names for one place in a file.
        other = [entry for name, entry in floats.source.entries.items() if name not in source.entries]
        known = {_place(codec, e, source): e.name for e in source.entries.values()} if other else {}
        made = {}
        for entry in other:
            name, reader = known.get(_place(codec, entry, floats.source)), floats.reader(entry)
            if name is not None and name not in floats.source.entries:
                made[entry.name] = [replace(reader, entry=replace(reader.entry, name=name))]
        return replace(self, floats=replaced(floats, made, set(made)))

    def matrix(self, module: str) -> RowReader | None:
        """Return the matrix of a module or an expert, or None."""
        for name in (f"{module}{WEIGHT}", module):
            entry = self.floats.source.entries.get(name)
            if entry is not None and len(entry.shape) == 2 and entry.dtype in TORCH_DTYPES:
                return self.floats.reader(entry)
        found = OF_EXPERT.fullmatch(module)
        if found is None:
            return None
        fused = self.stack(found["holder"], found["part"])
        matrix = None if fused is None else _by_module(fused).get(module)
        return None if fused is None or matrix is None else matrix_rows(self.floats.reader(fused), matrix)

    def weight_of(self, layer: StoredLayer) -> RowReader | None:
        """Return the original weight of a layer, or None without equal shape.

        Codes are decoded to float32, which holds each of their values that the layer may hold, too.
        """
        if layer.experts is None:
            weight = self.matrix(layer.module)
        else:
            entry = self._fused(layer.module)
            whole = [] if entry is None else matrices(entry, fused=True)
            weight = self.floats.reader(entry) if entry is not None and whole else None
        rows, columns = (layer.experts or 1) * layer.shape[0], layer.shape[1]
        if weight is None or weight.shape != (rows, columns):
            return None
        weight = weight if weight.layer is None else decoded_to(weight, "F32")
        return weight if layer.codes.form is None else in_form(weight, layer.codes.form)

    def known(self, module: str) -> Known | None:
        """Return shape and dtype of the weight of a module."""
        weight = self.matrix(module)
        return None if weight is None else Known(shape=weight.shape, dtype=weight.dtype)

    def stack(self, holder: str | None, part: str) -> TensorEntry | None:
        """Return the tensor with a part of all experts, or None."""
        entries = self.floats.source.entries
        name = entries.stacks.get((holder or "", part))
        return None if name is None or entries[name].dtype not in TORCH_DTYPES else entries[name]

    def _fused(self, module: str) -> TensorEntry | None:
        for name in (module, f"{module}{WEIGHT}"):
            entry = self.floats.source.entries.get(name)
            if entry is not None and is_fused_experts(entry) and entry.dtype in TORCH_DTYPES:
                return entry
        return None


OF_EXPERT = re.compile(r"(?:(?P<holder>.*)\.)?\d+\.(?P<part>[^.]+)", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _by_module(entry: TensorEntry) -> dict[str, WeightMatrix]:
    return {matrix.module: matrix for matrix in matrices(entry)}


def _place(codec: Codec, entry: TensorEntry, source: Source) -> object:
    """Return a tensor's name and part in a file, or its name."""
    form = codec.model_format.stored_form(entry.name, entry.shape, source.config or {})
    return entry.name if form is None or form is OMITTED else (form.name, form.part)


def open_original(path: Place | str) -> Original:
    """Open the original checkpoint, of floats or readable codes.

    Raises CheckpointError, UnsupportedError.
    """
    source = open_source(path)
    if configuration(source) is None:
        return Original(source=source, floats=Floats(source=with_axes(source), readers={}, config=None))
    return Original(source=source, floats=as_floats(source))
