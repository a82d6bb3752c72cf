"""PackedWeight: packed codes and parameters of a matrix, dequantized by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ShapeError, UnsupportedError
from ..methods.method import LowRank
from ..ops.rotation import Rotation
from ..params import QuantizationParams
from ..params.module_buffers import (
    buffered_params,
    check_buffered,
    check_dtypes,
    described,
    keeping_dtypes,
    refusal_of_state,
    register_params,
)
from ..params.tensors import granularities
from ..tensor import QuantizedTensor

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""What takes some rows out of a tensor that has one row for so many rows of the matrix."""

_ROTATION = "rotated_by"
"""Buffer with the text of the rotation, uint8."""
_ALL = 1 << 62
"""The height of a block that has all rows of any matrix; no extent can be as large."""


class PackedWeight(nn.Module):
    """A quantized matrix as buffers, moved and saved like a weight.

    Buffers: ``data`` (packed codes, uint8), ``scale1`` and on, ``zero_point`` where there is one; scales of 8
    bits as their bytes, which any file and process takes. A cast of the model (``half()``) changes none.
    ``state_dict`` also holds the scheme, and loading refuses another one, and damaged scales.

    Args:
        q: a quantized matrix.
        rotation: the rotation of its columns before they were quantized, or None; the buffer
            ``rotated_by`` keeps it in the state. Values that are returned are rotated back, codes are not.
        low_rank: the summand to the codes' values, or None, as buffers ``left`` and ``right``.

    Example:
        >>> from zeropoint.functional import quantize
        >>> weight = PackedWeight(quantize(torch.ones(4, 32), "mxfp4")).half()
        >>> weight.tile(0, 2).shape, weight.get_buffer("scale1").dtype
        (torch.Size([2, 32]), torch.uint8)
    """

    def __init__(
        self, q: QuantizedTensor, rotation: Rotation | None = None, low_rank: LowRank | None = None
    ) -> None:
        super().__init__()
        self.scheme, self.shape, self.dtype = q.scheme, q.shape, q.dtype
        self.rotation = rotation
        self.register_buffer("data", q.data)
        register_params(self, q.params)
        self.has_low_rank = low_rank is not None
        if low_rank is not None:
            self.register_buffer("left", low_rank.left)
            self.register_buffer("right", low_rank.right)
        if rotation is not None:
            self.register_buffer(_ROTATION, torch.tensor(list(str(rotation).encode()), dtype=torch.uint8))
            self.register_buffer("signs", rotation.signs(q.shape[-1]).to(q.data.device), persistent=False)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise UnsupportedError: a packed weight cannot be used as a tensor."""
        own = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls)), None)
        described = "" if own is None else f" ({own.extra_repr()})"
        raise UnsupportedError(
            f"a packed weight{described} is not a tensor, and torch's {func.__name__} was called with it: "
            "the model uses the weight of a quantized layer itself; leave that layer out by a rule"
        )

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, with a remedy for attributes of tensors."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or not hasattr(torch.Tensor, name):
                raise
            raise AttributeError(
                f"a packed weight has no attribute {name!r}, as tensors have: the model uses the weight of a "
                "quantized layer itself; leave that layer out by a rule"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.get_buffer("data").device

    def quantized(self) -> QuantizedTensor:
        """Return the whole as a quantized tensor that shares this memory."""
        params = buffered_params(self, self.scheme, self.shape, self.dtype)
        return QuantizedTensor(
            data=self.get_buffer("data"), params=params, shape=self.shape, dtype=self.dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, parameters and low-rank factors."""
        kept = self.low_rank
        return self.quantized().nbytes + (0 if kept is None else kept.left.nbytes + kept.right.nbytes)

    @property
    def low_rank(self) -> LowRank | None:
        """What is added to the codes' values, in this memory, or None."""
        if not self.has_low_rank:
            return None
        return LowRank(left=self.get_buffer("left"), right=self.get_buffer("right"))

    def low_rank_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the low-rank summand of a layer's product, or None.

        Args:
            x: (..., columns).
        """
        kept = self.low_rank
        if kept is None:
            return None
        return nn.functional.linear(nn.functional.linear(x, kept.right.to(x.dtype)), kept.left.to(x.dtype))

    def coded(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return float rows in the codes' frame: low rank subtracted, rotated.

        Args:
            x: (rows, columns), rows of the float weight.
            start: the number of the first.
        """
        kept = self.low_rank
        if kept is not None:
            x = x - LowRank(left=kept.left[start : start + len(x)], right=kept.right).product(x.dtype)
        return self.rotated(x)

    def _whole(self, values: torch.Tensor, left: Pick) -> torch.Tensor:
        """Return decoded values plus low rank (rows by ``left``), rotated back."""
        kept = self.low_rank
        if kept is not None:
            more = LowRank(left=left(kept.left, 1), right=kept.right).product(torch.float32)
            values = (values.float() + more).to(values.dtype)
        return values if self.rotation is None else self.rotation.unrotate(values, self._buffers["signs"])

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return floats in the codes' frame: rotated if codes are.

        Args:
            x: (..., columns): an input, or rows of the float weight.
        """
        return x if self.rotation is None else self.rotation.rotate(x, self._buffers["signs"])

    def values(self) -> torch.Tensor:
        """Return the whole matrix, in the dtype of the float weight."""
        return self._whole(self.quantized().dequantize(), lambda t, _: t)

    @property
    def block_rows(self) -> int:
        """Row multiple of tiles that keeps blocks whole."""
        return math.lcm(*(height for height in self._heights() if height < self.shape[0]))

    @property
    def rows_are_apart(self) -> bool:
        """Whether each row has its own parameters, matrix-wide ones aside."""
        return set(self._heights()) <= {1, _ALL}

    def _heights(self) -> list[int]:
        """Return how many rows share a number of each parameter."""
        shape = (_ALL, *self.shape[1:])
        return [blocks.block_shape(shape)[0] for blocks in granularities(self.scheme)]

    def tile(self, start: int, stop: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values of rows ``start`` to ``stop``.

        Args:
            start: the first row, a multiple of ``block_rows``.
            stop: the row after the last, a multiple of ``block_rows`` or the number of rows.
            dtype: of the result; the float weight's if None.
        """
        return self._whole(self.codes(start, stop).dequantize(dtype), lambda t, _: t[start:stop])

    def codes(self, start: int, stop: int) -> QuantizedTensor:
        """Return a view of coded rows; ShapeError for partial blocks.

        Args:
            start: the first row, a multiple of ``block_rows``.
            stop: the row after the last, a multiple of ``block_rows`` or the number of rows.
        """
        last, step = self.shape[0], self.block_rows
        if not 0 <= start <= stop <= last or start % step or (stop % step and stop != last):
            raise ShapeError(
                f"rows {start} to {stop} must lie in 0 to {last} and not cut blocks of {step} rows of "
                f"{self.scheme}; take multiples of {step}"
            )
        return self._part(lambda t, height: t[start // height : -(-stop // height)])

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values of rows by int32 or int64 index.

        Args:
            index: numbers of rows, integers of any shape.
            dtype: of the result; the float weight's if None.

        Raises:
            UnsupportedError: where rows share parameters in blocks.
            IndexError: for a number that is no row.
        """
        if not self.rows_are_apart:
            raise UnsupportedError(f"rows of {self.scheme} share blocks; dequantize the whole weight")

        def pick(t: torch.Tensor, height: int) -> torch.Tensor:  # noqa: ARG001 (as Pick)
            return t.index_select(0, index)

        return self._whole(self._part(pick).dequantize(dtype), pick)

    def part(self, index: torch.Tensor) -> QuantizedTensor:
        """Return the rows with the numbers in ``index`` in codes.

        Args:
            index: numbers of rows, integers of any shape.

        Raises:
            UnsupportedError: where rows share parameters, but for whole blocks of rows in their order.
        """
        if self.rows_are_apart:
            return self._part(lambda t, _: t.index_select(0, index))
        start, stop, step = int(index[0]), int(index[-1]) + 1, self.block_rows
        whole = len(index) == stop - start and not start % step and (stop == self.shape[0] or not stop % step)
        if not whole or not torch.equal(index, torch.arange(start, stop)):
            raise UnsupportedError(f"rows of {self.scheme} share blocks, which are not taken apart")
        return self.codes(start, stop)

    def _part(self, pick: Pick) -> QuantizedTensor:
        whole = self.quantized()
        data = pick(whole.data, 1)
        shape = (data.shape[0], *self.shape[1:])

        def own(t: torch.Tensor, height: int) -> torch.Tensor:
            return t if height == _ALL else pick(t, height)

        stored = list(map(own, whole.params.stored, self._heights()))
        params = QuantizationParams.of(self.scheme, shape, whole.params.dtype, stored)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=self.dtype)

    def get_extra_state(self) -> torch.Tensor:
        """Return the scheme's text as bytes, which loading compares."""
        return described(self.scheme)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Do nothing: a loaded scheme equals the module's.

        Args:
            state: as :meth:`get_extra_state` gives it.
        """

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        refusal = refusal_of_state(state_dict, prefix, self.scheme, self._check_state)
        refusal = refusal or self._refusal_of_rotation(state_dict, prefix)
        if refusal is not None:
            rest[-1].append(f"packed weight {refusal}")
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _refusal_of_rotation(self, state: Mapping[str, Any], prefix: str) -> str | None:
        found = state.get(prefix + _ROTATION)
        text = None if found is None else bytes(found.tolist()).decode(errors="replace")
        own = None if self.rotation is None else str(self.rotation)
        if text == own or not any(key.startswith(prefix) for key in state):
            return None
        return f"{prefix.removesuffix('.')}: rotation of the state ({text}) must be that of the module, {own}"

    def _check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_dtypes(self, tensors)
        check_buffered(self.quantized().params, tensors)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedWeight:
        super()._apply(keeping_dtypes(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return scheme and shape."""
        suffix = "" if self.rotation is None else f", rotated by {self.rotation}"
        suffix += f", and rank {self.get_buffer('left').shape[1]}" if self.has_low_rank else ""
        return f"{self.scheme}, shape={self.shape}{suffix}"
