"""Codec protocol: tensors and metadata of one checkpoint layout.

A codec is a stateless value. It turns a quantized weight, or a part of one, into tensors and back; it knows
the names of these tensors, the configuration files, which checkpoints are its own and which engines load
it. It opens no file. How files are laid out is the container's business (containers/), which tensors are
quantized checkpoint's, and what a codec reads is in records.py.

A weight is cut along one axis, the codec's: a tensor has an axis too, the weight's axis along which a part
of the weight gives whole lines of the tensor, so that each part writes one run of bytes in each tensor.

A new codec says its ``name``, ``title``, ``presets``, ``engines`` and ``methods``, and defines ``layout``,
``reader``, ``fields`` and ``documents``. The rest has defaults, which hold for matrices in safetensors files
whose tensors are called ``module.suffix``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ..architectures import HEAD, Config, layer_type
from ..errors import CheckpointError, UnsupportedError, printable
from ..loaded_names import loaded_names
from ..params import QuantizationParams
from ..recipes import Activation, Assignment
from ..schemes import Preset, Scheme
from ..tensor import QuantizedTensor
from .block_extents import blocks, no_matrix, partial_group
from .containers.protocol import Found, Use
from .data_scales import CacheScales, InputNames
from .engines import TRANSFORMERS, VLLM, EngineRule
from .known import CONFIG_KEYS
from .model_format import ModelFormat
from .tensor_fields import CODES, COLUMNS, ROWS, Field, Tensors, TensorSpec, WeightPart, decoded


@dataclass(frozen=True, kw_only=True)
class LayerScheme:
    """Quantization of a linear layer in a checkpoint.

    Args:
        codec: whose files hold it.
        name: of the preset, or the text of the weight scheme.
        weight: how its weight is quantized.
        input: how its inputs are quantized, or None.

    Raises:
        UnsupportedError: when the codec cannot hold such a layer.
    """

    codec: Codec = field(repr=False)
    name: str
    weight: Scheme
    input: Activation | None = None

    def __post_init__(self) -> None:
        self.codec.layout(self)

    @property
    def assignment(self) -> Assignment:
        """Assignment of a recipe for it."""
        return Assignment(weight=self.weight, input=self.input)

    @functools.cached_property
    def layout(self) -> str:
        """Layout name of its tensors in the codec."""
        return self.codec.layout(self)

    def __str__(self) -> str:
        return self.name


class Module(NamedTuple):
    """A matrix of the result.

    Args:
        name: dotted name of its layer.
        layer: how it is quantized, or None where it is not.
        keeps: whether it is copied with the codes that the source has for it.
    """

    name: str
    layer: LayerScheme | None
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Content of a checkpoint that its documents describe.

    Args:
        modules: returns an iterator over all matrices, in the order of the files.
        kept, nonlinear: modules that no loader must take for quantized; quantized ones that are not linear.
        tensors, graph: returns an iterator over the tensors of the result; what the source's container gives.
        family: config.json of the model.
        previous: what the source's configuration said of quantization; layers may keep its codes.
    """

    modules: Callable[[], Iterator[Module]]
    kept: Sequence[str]
    nonlinear: Sequence[str]
    family: Config
    previous: Mapping[str, Any]
    tensors: Callable[[], Iterator[Found]]
    graph: bytes = b""

    @property
    def left_out(self) -> list[str]:
        """Kept modules by the names in files and in transformers."""
        return list(dict.fromkeys(name for m in self.kept for name in loaded_names(m, self.family)))

    @property
    def heads(self) -> list[str]:
        """Quantized heads by the names in files and in transformers."""
        quantized = (n for m in self.modules() if m.layer for n in loaded_names(m.name, self.family))
        return [name for name in quantized if layer_type(name, self.family) == HEAD]

    def only_layer(self, title: str) -> LayerScheme:
        """Return the only layer scheme; raises CheckpointError for several.

        Args:
            title: what the codec calls its files, for the message.
        """
        layers = dict.fromkeys(m.layer for m in self.modules() if m.layer is not None)
        if len(layers) > 1:
            raise CheckpointError(
                f"{title} has one scheme in a checkpoint, and here are {', '.join(map(str, layers))}; "
                "give one to all layers, or keep some"
            )
        (layer,) = layers
        return layer

    def require_distinct(self, title: str) -> None:
        """Raise CheckpointError where a kept name occurs in quantized ones.

        Args:
            title: of files whose loaders take such a name for all modules with it in theirs.
        """
        made = "\n".join(n for m in self.modules() if m.layer for n in loaded_names(m.name, self.family))
        mistaken = next((name for name in self.left_out if name in made), None)
        if mistaken is not None:
            raise CheckpointError(
                f"{printable(mistaken)} is kept, but loaders of {title} would keep all modules with it in "
                "their names, and some of which are quantized; quantize it, too, or ignore them all"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The files without tensors.

    Args:
        section: ``quantization_config`` of config.json, or None for a layout that needs none.
        keys: of config.json under which it stands.
        files: contents of further files, by file name: bytes, or what is written as JSON.
        notes: sentences about how they were made.
    """

    section: Mapping[str, Any] | None
    keys: tuple[str, ...] = CONFIG_KEYS[:1]
    files: Mapping[str, Mapping[str, Any] | bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def _specs(
    fields: tuple[Field, ...], weight: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[TensorSpec, ...]:
    """Tensors of a weight, kept: checkpoints have few schemes and shapes."""
    return tuple([each.spec(weight, shape, dtype) for each in fields])


class Codec(Protocol):
    """Protocol of codecs; the module says what has no default.

    Of methods, ``layer`` is how a weight is quantized, and ``shape`` its (out_features, in_features).

    Args:
        name: what users write in ``--format``.
        title: what sentences call its files.
        presets: schemes under the names that its users know.
        engines: what each says of a result; :func:`~zeropoint.codecs.engines.rules` fills in the others.
        methods: values of ``quant_method`` in configurations of its own.
        container: name of the container, in ``containers.CONTAINERS``.
        defaults: options that a weight scheme takes where it does not say otherwise.
        parts: suffixes of its tensors, and whether one alone says that a weight is in this layout.
        code_dtypes: dtypes of a ``weight`` that is in this layout, even without its other tensors.
        negative_scales: whether engines decode negative scales, as auto-round and bitsandbytes write them.
        input_names: of tensors for static inputs, or None where it holds none.
        cache: where scales of a cache of keys and values lie, or None where it holds none.
        usual: engines that its files are for, the first of which may refuse a result.
        candidates: presets, of weights alone, between which a search chooses where nobody names others.
        use: how the graph of the source uses the weight, in files with graphs.
        model_format: what its files say of a model besides its weights.
        reader: class of its readers, made of a listing that it claims and itself; raises where none is read.
        fused_experts: whether a layer's experts stay in one tensor, and are no modules of their own.
            :meth:`refusal` sees a first axis of experts; elsewhere their rows form one matrix.
        separator: between a module's name and a suffix, in the name of a tensor.
        keeps_codes: whether its documents can describe layers with codes kept from a source of its own.
        divisible: layouts that transformers cuts and joins; None for all, () where it puts other layers in.
        replaces_conv1d: whether transformers puts quantized layers in the place of its Conv1D, too.
        replaces_numbered: whether also in the place of layers that are called by a number.
    """

    name: str
    title: str
    presets: Mapping[str, Preset]
    engines: Mapping[str, EngineRule]
    methods: tuple[str, ...]
    container: str = "safetensors"
    defaults: Mapping[str, str] = MappingProxyType({})
    parts: Mapping[str, bool] = MappingProxyType({})
    code_dtypes: tuple[str, ...] = ()
    negative_scales: bool = False
    input_names: InputNames | None = None
    cache: CacheScales | None = None
    usual: tuple[str, ...] = (TRANSFORMERS, VLLM)
    candidates: tuple[str, ...] = ()
    use: Use | None = None
    model_format: ModelFormat = ModelFormat()
    reader: type[Any]
    fused_experts: bool = False
    separator: str = "."
    keeps_codes: bool = False
    divisible: tuple[str, ...] | None = None
    replaces_conv1d: bool = False
    replaces_numbered: bool = True

    def __hash__(self) -> int:
        """Return one hash for all values of a stateless codec."""
        return hash(type(self))

    def used(self, use: Use | None) -> Codec:
        """Return the codec for a weight's use in a graph, usually itself.

        Args:
            use: what the graph says of the weight, or None where the source has none.
        """
        return self

    def layout(self, layer: LayerScheme) -> str:
        """Return the name of the layout of a layer's tensors.

        Args:
            layer: the layer that is to be written.

        Raises:
            UnsupportedError: with the reason, for a layer that it cannot hold.
        """

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """Return why a weight's shape cannot be held, or None.

        By default, matrices of whole groups and words can.

        Args:
            shape: any shape that a checkpoint may have.
        """
        problem = no_matrix(shape) or partial_group(layer.weight, shape)
        if problem is not None:
            return problem
        for axis, count in sorted(filter(None, [each.fills(layer.weight) for each in self.fields(layer)])):
            if shape[axis] % count:
                what = ("first", "last")[axis]
                return f"{what} axis {shape[axis]} does not fill whole words, of {count} codes"
        return None

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """Return the named divisors of a device's part along ``axis``.

        Args:
            axis: ROWS or COLUMNS.
        """
        extents = blocks(layer.weight)
        found = [(extents[axis] or 1, "the group" if axis == COLUMNS and extents[ROWS] == 1 else "the block")]
        for each in self.fields(layer):
            filled, what = each.fills(layer.weight), "codes" if each.level == CODES else "zero points"
            if filled is not None and filled[0] == axis:
                found.append((filled[1], f"the {what} that fill whole words"))
        return found

    def shares_scale(self, layer: LayerScheme) -> bool:
        """Return whether fused layers must share one tensor scale."""
        return False

    def needs_mean(self, layer: LayerScheme) -> bool:
        """Return whether the mean scale of the whole weight comes first."""
        return False

    def with_mean(self, layer: LayerScheme, mean: float) -> LayerScheme:
        """Return the scheme of parts under a known mean scale.

        Args:
            mean: of the scales of all its blocks.
        """
        return layer

    def fields(self, layer: LayerScheme) -> tuple[Field, ...]:
        """Return the fields of a weight, its codes first."""
        return ()

    def axis(self, layer: LayerScheme) -> int:
        """Return the axis along which weights are cut: ROWS or COLUMNS.

        By default, COLUMNS where fields have lines of inputs.
        """
        fields = self.fields(layer)
        return fields[0].along if fields else ROWS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """Return the multiple of independent parts along that axis.

        By default, they give whole lines of all tensors, and columns whole bytes of packed codes.
        """
        axis = self.axis(layer)
        own = blocks(layer.weight)[ROWS] or 1 if axis == ROWS else 8 // math.gcd(8, layer.weight.bits)
        specs = self.tensors(layer, shape, torch.float32)
        return math.lcm(own, *[spec.per for spec in specs if spec.axis == axis])

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors of a weight, its codes first.

        Args:
            dtype: of the weight before it is quantized, which scales have under ``scale=input``.
        """
        return _specs(self.fields(layer), layer.weight, shape, dtype)

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """Return, by suffix, a part's lines of each cut tensor.

        Args:
            q: the whole weight, or a part of it along the codec's axis.
        """
        fields = self.fields(layer)
        return {each.suffix: lines for each in fields if (lines := each.lines(q)) is not None}

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """Return, by suffix, the tensors shared by all parts.

        Args:
            params: of any part: what they have for the whole tensor, all parts have.
            shape: (out_features, in_features) of the whole weight.
        """
        fields = self.fields(layer)
        return {each.suffix: x for each in fields if (x := each.whole(params, shape)) is not None}

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        """Return a part of a weight; ``params.validate()`` checks its parameters.

        Args:
            tensors: the lines of each tensor that the part touches, by suffix, or of whole blocks.
            part: where it lies in the weight.
        """
        return decoded(self.fields(layer), tensors, layer.weight, part)

    def drift(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> torch.Tensor | None:
        """Return the possible drift of scales since choosing codes, or None.

        Args:
            layer, tensors, part: as :meth:`decode` has them.
        """
        return None

    def damage(self, layer: LayerScheme, tensors: Tensors) -> str | None:
        """Return damage in stored values that decoding ignores, or None.

        Args:
            tensors: those that :meth:`decode` was given.
        """
        return None

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """Return a tensor's weight key, part, and certainty, or None.

        A part that is not sure belongs to the weight where another one does. By default, the key is the
        module and the part one of ``parts``.

        Args:
            name: full name of the tensor in a file.
            dtype: in the container's spelling.
        """
        module, dot, part = name.rpartition(".")
        if not dot or part not in self.parts:
            return None
        return module, part, self.parts[part] or (part == "weight" and dtype in self.code_dtypes)

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this ``quantization_config`` is its own.

        Args:
            quantization: ``quantization_config`` of config.json.
        """
        return quantization.get("quant_method") in self.methods

    def documents(self, contents: Contents) -> Documents:
        """Return the files without tensors of a result.

        Args:
            contents: the matrices of the result and what is known of the model.
        """

    def with_cache(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration with a float8 cache of keys and values.

        Args:
            document: the configuration of a checkpoint that it claims, in whichever file that stands.
        """
        return document

    def describe(
        self, modules: Mapping[LayerScheme, Sequence[str]], kept: Sequence[str]
    ) -> Mapping[str, Any]:
        """Return ``quantization_config`` of a model in memory.

        Args:
            modules: names of the quantized modules in the model, under the scheme of each.
            kept: names of modules that are not quantized.

        Raises:
            UnsupportedError: where the codec writes checkpoints only, as by default.
        """
        raise UnsupportedError(
            f"models in memory are not written in {self.title}; quantize a checkpoint instead"
        )
