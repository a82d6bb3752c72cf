"""Quantized KV cache of transformers, dequantized for attention.

The rest of zeropoint does without transformers; importing this module asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NonFiniteError, RangeError, SchemeError, ShapeError, UnsupportedError
from ..formats import RoundingMode
from ..functional import quantize, tensors_of
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor

try:
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
except ImportError as error:
    raise ImportError(
        "zeropoint.models.kv_cache needs transformers; install it with pip install 'zeropoint[hf]'"
    ) from error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENS = 2
"""Axis of tokens in keys and values, which are of shape (batch, heads, tokens, head_dim)."""
ENDLESS = 1 << 40
"""More tokens than any cache holds: a block as long spans all tokens, also those to come."""


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """Quantized keys and values for ``model.generate(..., past_key_values=cache)``.

        update    codes of the new tokens are appended; earlier tokens keep their codes
        attention sees dequantize(codes), followed by the newest tokens in full precision

    Attention over a prompt sees the dequantized prompt too, so that results do not depend on how tokens were
    divided among calls. No gradient passes.

    config: the model's, of which every layer must have full attention.
    keys, values: schemes for tensors of shape (batch, heads, tokens, head_dim); the keys' scheme for both
        unless values are given. ``token`` is one scale a token and head, ``g32`` one for each 32 of its
        numbers, ``block32x1`` one a channel for each 32 tokens, as KIVI quantizes keys; tokens that do not
        fill a block wait in full precision.
    residual_length: how many of the newest tokens stay in full precision at least.

    A number takes ``int8:token`` 1 + 4 / head_dim bytes, ``int4:token`` 1 / 2 + 4 / head_dim, where float32
    scales have 4: at head_dim 64, of float32 27 % and 14 %, of bfloat16 53 % and 28 %.

    Raises SchemeError for blocks that span sequences or all tokens, and for stochastic rounding; RangeError
    for a negative length; UnsupportedError for layers of other kinds. An update raises NonFiniteError for NaN
    or Inf, ShapeError for other sequences, heads or head_dim, and then leaves its layer as it was. Source of
    blocks along tokens and of the residual: KIVI, arXiv:2402.02750.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=1)
    >>> cache = QuantizedKVCache(config, keys="uint4:block32x1:asym", values="int8:token")
    >>> k = torch.randn(1, 2, 40, 64)
    >>> keys, values = cache.update(k, k, layer_idx=0)
    >>> torch.equal(keys[:, :, 32:], k[:, :, 32:]), torch.equal(values[:, :, 32:], k[:, :, 32:])
    (True, False)
    >>> cache
    QuantizedKVCache(layers=[keys uint4:block32x1:asym, values int8:token])
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        keys: str | Scheme = "int8:token",
        values: str | Scheme | None = None,
        *,
        residual_length: int = 0,
    ) -> None:
        if type(residual_length) is not int or residual_length < 0:
            raise RangeError(f"residual_length (={residual_length}) must be 0 or more tokens, a whole number")
        if not hasattr(config, "get_text_config"):
            raise UnsupportedError(
                f"config (a {type(config).__name__}) must be one of transformers; pass model.config"
            )
        schemes = _checked("keys", keys), _checked("values", keys if values is None else values)
        layers = DynamicCache(config=config).layers
        others = sorted({type(layer).__name__ for layer in layers} - {DynamicLayer.__name__})
        if others:
            raise UnsupportedError(
                f"config (a {type(config).__name__}) must have full attention in every layer to quantize its "
                f"cache, got {', '.join(others)}; take transformers.DynamicCache for this model"
            )
        super().__init__(layers=[QuantizedCacheLayer(*schemes, residual_length) for _ in layers])

    @property
    def nbytes(self) -> int:
        """Bytes of the cache: codes, scales, zero points, newest tokens."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, QuantizedCacheLayer))


class QuantizedCacheLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer, in the interface of transformers; see :class:`QuantizedKVCache`."""

    def __init__(self, keys: Scheme, values: Scheme, residual_length: int) -> None:
        super().__init__()
        self.states = QuantizedStates(keys, residual_length), QuantizedStates(values, residual_length)
        self.is_initialized = True
        # Whether crop leaves no trace: tokens that have left a residual or a block do not return.
        self.is_croppable = residual_length == 0 and all(states.step == 1 for states in self.states)

    def __repr__(self) -> str:
        keys, values = self.states
        kept = f", residual_length {keys.residual_length}" if keys.residual_length else ""
        return f"keys {keys.scheme}, values {values.scheme}{kept}"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the layer holds."""
        return sum(states.nbytes for states in self.states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer is complete from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values; return all, in the new dtype."""
        keys, values = self.states
        # Both before either is held, or an error in the values would leave more keys than values.
        grown = keys.grown(key_states), values.grown(value_states)
        return keys.hold(grown[0], key_states), values.hold(grown[1], value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.states[0].length

    def reset(self) -> None:
        """Forget all tokens."""
        for states in self.states:
            states.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Crop the cache to a length, or remove ``-n`` newest tokens.

        The rest of a block of tokens that is cut is kept as it was dequantized.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else self.get_seq_length() + tokens_to_remove
        for states in self.states:
            states.crop(max(0, kept))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the sequences in the order of ``beam_idx``, as beam search does."""
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of ``indices``, numbers or one truth value a sequence."""
        self._change(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """Move everything to the host."""
        self._change(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to the device that the newest tokens came from."""
        self._change(lambda t: t.to(self.states[0].device, non_blocking=True))

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for states in self.states:
            states.change(change)


class QuantizedStates:
    """Keys or values of one layer: coded older tokens, plain newest.

    scheme: for tensors of shape (batch, heads, tokens, head_dim); ``step`` tokens at a time fill its blocks.
    residual_length: how many of the newest stay as they came; up to ``step - 1`` more wait for a block.

    Codes have the axis of tokens last where blocks lie along it, such as ``block32x1``: numbers with one
    scale are then neighbors, which kernels are several times quicker with. Values are the same.
    """

    def __init__(self, scheme: Scheme, residual_length: int) -> None:
        self.scheme, self.residual_length = scheme, residual_length
        self.step = max((shape[TOKENS] for shape in _block_shapes(scheme)), default=1)
        along = _along_tokens(scheme)
        self._scheme, self._axis = (scheme, TOKENS) if along is None else (along, -1)
        self.older: QuantizedTensor | None = None
        self.newest: torch.Tensor | None = None
        self.device = torch.device("cpu")

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return self._coded + (0 if self.newest is None else self.newest.shape[TOKENS])

    @property
    def _coded(self) -> int:
        return 0 if self.older is None else self.older.shape[self._axis]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0 if self.newest is None else self.newest.nbytes
        if self.older is not None:
            total += self.older.data.nbytes
            total += sum(tensor.nbytes for tensor in self.older.params.tensors().values())
        return total

    def grown(self, x: torch.Tensor) -> tuple[QuantizedTensor | None, torch.Tensor]:
        """Return codes and newest tokens with ``x`` appended, without storing them.

        Raises ShapeError unless ``x`` is of shape (batch, heads, tokens, head_dim), as the stored tokens.
        """
        x, held = x.detach(), self.newest
        if x.ndim != 4:
            raise ShapeError(f"states (shape {tuple(x.shape)}) must be (batch, heads, tokens, head_dim)")
        if held is not None and (x.shape[:TOKENS], x.shape[-1]) != (held.shape[:TOKENS], held.shape[-1]):
            raise ShapeError(
                f"states (shape {tuple(x.shape)}) must have the sequences, heads and head_dim of what "
                f"is cached (shape {tuple(held.shape)}); reset the cache first"
            )
        newest = x if held is None else torch.cat([held, x], TOKENS)
        leaving = max(0, newest.shape[TOKENS] - self.residual_length) // self.step * self.step
        older = self.older
        if leaving:
            coded = self._quantized(newest[:, :, :leaving])
            older = coded if older is None else _joined(older, coded, self._axis)
        # A copy: a view would keep the memory of the tokens that left.
        return older, newest[:, :, leaving:].clone()

    def hold(self, grown: tuple[QuantizedTensor | None, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Store a result of :meth:`grown`; return all values, like ``like``."""
        self.device, (self.older, self.newest) = like.device, grown
        if self.older is None:
            return self.newest.to(like.dtype)
        older = self._values(self.older, like.dtype)
        return (
            torch.cat([older, self.newest.to(like.dtype)], TOKENS)
            if self.newest.numel()
            else older.contiguous()
        )

    def crop(self, kept: int) -> None:
        """Keep the first ``kept`` tokens; a cut block becomes full precision."""
        if kept >= self.length:
            return
        assert self.newest is not None
        if kept >= self._coded:
            self.newest = self.newest[:, :, : kept - self._coded].clone()
            return
        assert self.older is not None
        whole = kept // self.step * self.step
        block = _between(self.older, self._axis, whole, whole + self.step)
        self.newest = self._values(block, block.dtype)[:, :, : kept - whole].clone()
        self.older = _between(self.older, self._axis, 0, whole) if whole else None

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function to every tensor that keeps its last axes."""
        self.older = None if self.older is None else _changed(self.older, change)
        self.newest = None if self.newest is None else change(self.newest)

    def clear(self) -> None:
        """Forget all tokens."""
        self.older = self.newest = None

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        try:
            return quantize(x.transpose(self._axis, TOKENS), self._scheme)
        except NonFiniteError:
            quantize(x, self.scheme)  # says where in x as it came
            raise

    def _values(self, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        return q.dequantize(dtype).transpose(self._axis, TOKENS)


def _checked(name: str, scheme: str | Scheme) -> Scheme:
    """Return the scheme, or SchemeError if calls would affect codes."""
    parsed = Scheme.parse(scheme)
    if any(shape[0] > 1 or shape[TOKENS] == ENDLESS for shape in _block_shapes(parsed)):
        raise SchemeError(
            f"{name} (={parsed}) must have blocks of one sequence and of so many tokens, because tokens come "
            "one after the other; take token, g32 or block32x1"
        )
    if parsed.rounding.mode is RoundingMode.STOCHASTIC:
        raise SchemeError(
            f"{name} (={parsed}) must not round stochastically, because each token would get the same random "
            "numbers; take round=half_even"
        )
    return parsed


def _block_shapes(scheme: Scheme) -> list[tuple[int, ...]]:
    return [level.granularity.block_shape((2, 2, ENDLESS, 2)) for level in scheme.levels]


def _along_tokens(scheme: Scheme) -> Scheme | None:
    """Return the tokens-last scheme, None unless blocks are byte-aligned tokens."""
    shapes = _block_shapes(scheme)
    if scheme.chained is not None or not all(shape[1] == shape[3] == 1 < shape[TOKENS] for shape in shapes):
        return None
    if scheme.element.per_code > 1 or any(shape[TOKENS] * scheme.bits % 8 for shape in shapes):
        return None
    levels = [
        replace(level, granularity=Granularity.group(shape[TOKENS]))
        for level, shape in zip(scheme.scales, shapes, strict=True)
    ]
    return replace(scheme, scales=tuple(levels)) if levels else None


def _changed(q: QuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    """Return ``q`` with all tensors changed along sequences or tokens."""
    data = change(q.data)
    shape = (*data.shape[:-1], q.shape[-1] * data.shape[-1] // q.data.shape[-1])
    params = QuantizationParams.of(q.scheme, shape, q.params.dtype, list(map(change, q.params.stored)))
    return replace(q, data=data, params=params, shape=shape)


def _between(q: QuantizedTensor, axis: int, start: int, stop: int) -> QuantizedTensor:
    """Return copies of tokens ``start`` to ``stop``, both at block ends."""
    count = q.shape[axis]

    def cut(t: torch.Tensor) -> torch.Tensor:
        per = t.shape[axis]
        first, last = start * per // count, stop * per // count
        return t.narrow(axis, first, last - first).clone()

    return _changed(q, cut)


def _joined(first: QuantizedTensor, second: QuantizedTensor, axis: int) -> QuantizedTensor:
    """Return both tensors joined along an axis, at a block end."""
    rest = iter(tensors_of(second))
    return _changed(first, lambda t: torch.cat([t, next(rest)], axis))
