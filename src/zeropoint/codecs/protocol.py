"""What a codec answers: how quantized layers lie in the files that an engine reads, and what says so there.

A codec is a stateless value. It turns a quantized weight, or a part of one, into tensors and back; it knows
the names of these tensors, the configuration files, which checkpoints are its own and which engines load
it. It opens no file: what it needs of one, it asks of a :class:`Listing`. How files are laid out is the
container's business (containers/), and which tensors are quantized that of checkpoint/.

A weight is cut along one axis, the codec's: a tensor has an axis too, that of the weight along which a part
of the weight gives whole lines of the tensor, so that each part writes one run of bytes in each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ..architectures import Config
from ..errors import UnsupportedError
from ..params import QuantizationParams
from ..recipes import Activation, Assignment
from ..schemes import Granularity, Preset, Scheme
from ..tensor import QuantizedTensor
from .containers.protocol import Metadata
from .engines import TRANSFORMERS, VLLM, EngineRule

ROWS, COLUMNS = 0, 1
"""The axes of a weight, (outputs, inputs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a layout.

    Args:
        suffix: its part of the name.
        dtype: as the container spells it.
        shape: its shape.
        axis: that of the weight which the tensor's first axis follows, or None for a tensor that no part of a
            weight gives alone.
        lines, per: each ``per`` values of the weight along that axis give ``lines`` lines along the tensor's
            first axis.
        across: the same, (lines, per), of the weight's other axis and the tensor's second one; it is looked
            at where a weight is read across the axis along which it is cut.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None = ROWS
    lines: int = 1
    per: int = 1
    across: tuple[int, int] = (1, 1)

    def span(self, start: int, count: int) -> tuple[int, int]:
        """Return the first line, and how many, that ``count`` values from ``start`` on touch.

        Args:
            start: the first value.
            count: of values.
        """
        if self.axis is None:
            return 0, self.shape[0]
        first = start // self.per * self.lines
        return first, min(self.shape[0], -(-(start + count) // self.per) * self.lines) - first


@dataclass(frozen=True, kw_only=True)
class LayerScheme:
    """How a linear layer is quantized in a checkpoint.

    Args:
        codec: in whose files.
        name: the preset's name, or the weight scheme's text.
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
        """What a recipe gives for it."""
        return Assignment(weight=self.weight, input=self.input)

    @functools.cached_property
    def layout(self) -> str:
        """What the codec calls the layout of its tensors."""
        return self.codec.layout(self)

    def __str__(self) -> str:
        return self.name


class Known(NamedTuple):
    """What is known of a weight from elsewhere: its shape and dtype before it was quantized.

    Args:
        shape: of the tensor.
        dtype: of the result; that of the parameters if None.
    """

    shape: tuple[int, int]
    dtype: torch.dtype


class Entry(Protocol):
    """A tensor of a file, as its header describes it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """Its dtype, as the container spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


class Listing(Protocol):
    """A checkpoint, as a codec that reads it sees it."""

    @property
    def config(self) -> Config:
        """The model's config.json, or an empty mapping."""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """What the configuration says of quantization, or an empty mapping."""

    def read(self, entry: Entry) -> bytes:
        """Return the bytes of a small tensor.

        Args:
            entry: a tensor of a header.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A quantized weight of a checkpoint.

    Args:
        module: its name.
        layer: how it is quantized.
        shape, dtype: of the weight that was quantized.
        parts: the names that its codec has for its tensors, that of the codes first.
        experts: how many matrices of ``shape`` lie one after the other in each tensor, or None for one
            matrix.
    """

    module: str
    layer: LayerScheme
    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[str, ...]
    experts: int | None = None


class Reader:
    """What a codec reads in one checkpoint; by default, a configuration that says little.

    Args:
        ignore: modules that the configuration says are not quantized.
    """

    ignore: tuple[str, ...] = ()

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """Return what the tensors of a weight are; ``key`` and their names are those of ``part_of``.

        Args:
            key: the key of a weight, from ``part_of``.
            tensors: entries by their names in ``part_of``.
            known: what the original says of the weight.

        Raises:
            CheckpointError: where they contradict each other or the configuration.
            UnsupportedError: where they are not read.
            NotImplementedError: in the base class.
        """
        raise NotImplementedError

    def expects(self, module: str) -> bool:
        """Return whether loaders take the linear layer ``module`` for a quantized one.

        Args:
            module: dotted name of a layer.
        """
        return False

    def named(self) -> Iterable[str]:
        """Return the modules that the configuration names one by one as quantized."""
        return ()

    def input_of(self, module: str) -> Activation | None:
        """Return how the inputs of a layer are quantized, or None.

        Args:
            module: dotted name of a layer.
        """
        return None


class Module(NamedTuple):
    """A matrix of the result: its scheme, or None; and whether it keeps the codes that it has.

    Args:
        name: dotted name.
        layer: how it is quantized, or None.
        keeps: whether it keeps its codes.
    """

    name: str
    layer: LayerScheme | None
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the documents of a checkpoint describe.

    Args:
        modules: all matrices, in their order, each time anew.
        kept: modules that a loader must not take for quantized.
        nonlinear: quantized modules that are no linear layers.
        family: the model's configuration.
        previous: what the source's said of quantization, whose layers may keep their codes.
    """

    modules: Callable[[], Iterator[Module]]
    kept: Sequence[str]
    nonlinear: Sequence[str]
    family: Config
    previous: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The files without tensors: ``quantization_config``, or None, and further files with their JSON.

    Args:
        section: ``quantization_config`` of config.json, or None.
        files: other JSON files, by name.
    """

    section: Mapping[str, Any] | None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class InputNames(NamedTuple):
    """Names of the tensors that hold the parameters of static inputs.

    Args:
        scale: name of the scale.
        zero_point: name of the zero point.
        global_scale: name of the scale of the tensor.
    """

    scale: str
    zero_point: str
    global_scale: str


class Codec(Protocol):
    """How quantized layers lie in files; see the module. Defaults are those of a layout of rows.

    Args:
        name: under which users ask for it.
        title: what sentences call its files.
        container: name of the container.
        presets: what its users know by name.
        defaults: options that a weight scheme takes where it does not say otherwise.
        input_names: of tensors for static inputs, or None where it holds none.
        engines: what each says of a result.
        usual: those that its files are for, the first of which may refuse one.
        methods: values of ``quant_method`` in configurations of its own.
    """

    name: str
    title: str
    container: str
    presets: Mapping[str, Preset]
    defaults: Mapping[str, str]
    input_names: InputNames | None
    engines: Mapping[str, EngineRule]
    usual: tuple[str, ...] = (TRANSFORMERS, VLLM)
    methods: tuple[str, ...]

    def __hash__(self) -> int:
        """Return one number for all values of a codec: it has no state."""
        return hash(type(self))

    # What it holds.

    def layout(self, layer: LayerScheme) -> str:
        """Return what the codec calls the layout of a layer's tensors.

        Args:
            layer: the quantized layer.

        Raises:
            UnsupportedError: with the reason, for a layer that it cannot hold.
        """

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of ``shape`` cannot be held, or None when it can.

        Args:
            layer: the quantized layer.
            shape: (out_features, in_features).
        """

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        """Return of what a device's part of a weight must hold a multiple along ``axis``, with its name.

        Args:
            layer: the quantized layer.
            axis: ROWS or COLUMNS.
        """

    def shares_scale(self, layer: LayerScheme) -> bool:
        """Return whether layers that engines run as one must have one tensor scale.

        Args:
            layer: the quantized layer.
        """
        return False

    def needs_extremes(self, layer: LayerScheme) -> bool:
        """Return whether the smallest and the largest value of the whole weight must be known first.

        Args:
            layer: the quantized layer.
        """
        return any(level.granularity == Granularity.tensor() for level in layer.weight.scales)

    # Its tensors.

    def axis(self, layer: LayerScheme) -> int:
        """Return the axis of the weight along which it may be cut: ROWS or COLUMNS.

        Args:
            layer: the quantized layer.
        """
        return ROWS

    def alignment(self, layer: LayerScheme, shape: tuple[int, ...]) -> int:
        """Return of what a part of a weight must hold a multiple, along that axis, to be written alone.

        Args:
            layer: the quantized layer.
            shape: of the tensor.
        """

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors that a weight of ``shape`` and ``dtype`` becomes, that of its codes first.

        Args:
            layer: the quantized layer.
            shape: of the tensor.
            dtype: of the result; that of the parameters if None.
        """

    def tensor_name(self, module: str, suffix: str) -> str:
        """Return the name of a tensor in the file.

        Args:
            module: dotted name of the layer.
            suffix: the tensor's part of the name.
        """
        return f"{module}.{suffix}"

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        """Return, by suffix, the lines that ``q``, a whole weight or a part of one, gives of each tensor.

        Args:
            layer: the quantized layer.
            q: a whole weight or a part of one.
        """

    def constants(
        self, layer: LayerScheme, params: QuantizationParams, shape: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """Return, by suffix, the tensors without an axis, of a weight of ``shape``.

        Args:
            layer: the quantized layer.
            params: those of any part.
            shape: of the tensor.
        """
        return {}

    def decode(
        self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor], *, start: int, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:  # fmt: skip
        """Return the part of a weight, of ``shape``, that begins at ``start`` along the codec's axis.

        Args:
            layer: the quantized layer.
            tensors: the lines of each tensor that the part touches, by suffix; the lines of a block may come
                with it whole.
            start: the first row.
            shape: of the tensor.
            dtype: of the weight before it was quantized. Parameters are not judged.
        """

    def damage(self, layer: LayerScheme, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Return what is wrong with stored values that decoding does not look at, or None.

        Args:
            layer: the quantized layer.
            tensors: by suffix.
        """
        return None

    # Its files.

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        """Return whose part a tensor may be: a key of the weight, the part, and whether that is sure.

        A part that is not sure belongs to the weight where another one does.

        Args:
            name: the name.
            dtype: of the result; that of the parameters if None.
        """

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this ``quantization_config`` is its own.

        Args:
            quantization: ``quantization_config`` of config.json.
        """
        return quantization.get("quant_method") in self.methods

    def read(self, listing: Listing) -> Reader:
        """Return what reads a checkpoint of its own; raises for a configuration that is not understood.

        Args:
            listing: the checkpoint.
        """

    def metadata(self, family: Config, metadata: Mapping[str, str]) -> Metadata:
        """Return the metadata of a file with some tensors; ``metadata`` is that of the source.

        Args:
            family: config.json of the model.
            metadata: of the source file.
        """
        return metadata

    def documents(self, contents: Contents) -> Documents:
        """Return the files without tensors of a result.

        Args:
            contents: what the files describe.
        """

    def describe(
        self, modules: Mapping[LayerScheme, Sequence[str]], kept: Sequence[str]
    ) -> Mapping[str, Any]:
        """Return ``quantization_config`` of a model in memory, by the names of files and model.

        Args:
            modules: the quantized modules.
            kept: modules that are not quantized.

        Raises:
            UnsupportedError: where the codec writes checkpoints only.
        """
        raise UnsupportedError(
            f"models in memory are not written in {self.title}; quantize a checkpoint instead"
        )

    def keeps(self, quantization: Mapping[str, Any]) -> bool:
        """Return whether its documents can describe layers that keep the codes of this configuration.

        Args:
            quantization: ``quantization_config`` of config.json.
        """
        return False
