"""Host side of linear layers: integer products, and products with values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from ...formats import CodebookFormat
from ...ops.linear import Layer, refuse_input
from ...ops.registry import Op, Request
from ...params.tensors import Params, parameter_tensors, zero_point_of
from ...schemes import ZeroPoint
from .launches import Launch, value_table_on
from .linear_tiles import FEW, LayerTiles, code_tiles, value_tiles
from .specialization import held_of
from .starts import Start, bits
from .two_passes import new_notes

DECODED = 128
"""Tokens above which a weight of 16-bit floats is dequantized whole, and multiplied by cuBLAS.

Float32 has no faster product of matrices, and is dequantized as soon as tiles have no few tokens. Codebooks,
whose values are loaded from a table, are always dequantized whole: on an H100 a product that decodes them
takes more than twice the time of both.
"""
SHORTEST = 32
"""Columns of the least product of codes on tensor cores."""


class LinearValues:
    """Products with weight values, decoded in tiles, or first for many tokens."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.weight = Launch(replace(request, op=Op.DEQUANTIZE))
        self.values = value_table_on(request.scheme, request.device)
        self._start = functools.lru_cache(maxsize=64)(self._started)
        self._most = FEW if request.dtype is torch.float32 else DECODED
        if isinstance(request.scheme.element, CodebookFormat):
            self._most = 0

    def _started(self, tokens: int, bias: bool) -> Start:
        tiles = value_tiles(self._request, tokens, bias=bias)
        return Start("value_products.multiply_values", tiles, self.weight.given._replace(cut=tiles.shape))

    def linear_values(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
        """Build the layer, which reads these tensors' memory each call."""
        rows, cols = self._request.shape

        def layer(x: torch.Tensor, _: Params | None) -> torch.Tensor:
            tokens = x.numel() // cols
            if tokens > self._most:
                own = None if bias is None else bias.to(x.dtype)
                return torch.nn.functional.linear(x, self.weight.dequantize(weight, params), own)
            out = x.new_empty((*x.shape[:-1], rows))
            if out.numel():
                given = self.weight.scales(params)
                added = given[0] if bias is None else bits(bias.detach())
                start, numbers = self._start(tokens, bias is not None), bits(x)
                if start.constants.cut.paired:
                    odd = numbers.storage_offset() % 2 == 1
                    numbers = (numbers.clone() if odd else numbers).view(torch.int32)
                start(numbers, weight.contiguous(), *given, self.values, added, bits(out))
            return out

        return layer


class LinearCodes:
    """Products of integer codes of a quantized input; tiles: cuts a layer."""

    def __init__(self, request: Request, tiles: Callable[..., LayerTiles] = code_tiles) -> None:
        assert request.source is not None
        self._request, self._source, self._tiles = request, request.source, tiles
        self.weight = Launch(replace(request, op=Op.DEQUANTIZE))
        self._input = functools.lru_cache(maxsize=64)(self._quantizing)
        self._start_for = functools.lru_cache(maxsize=64)(self._started)

    def _quantizing(self, tokens: int) -> Launch:
        return Launch(input_request(self._request, tokens))

    def _started(self, tokens: int, bias: bool) -> Start:
        tiles, source = self._tiles(self._request, tokens, bias=bias), self._source
        zeros = source.zero_point is not ZeroPoint.NONE
        shape = tiles.shape._replace(
            per_token=not self._request.given, zeros=zeros, shifted=zeros or not source.element.signed
        )
        given = self.weight.given._replace(cut=shape)
        return Start("code_products.multiply_codes", tiles._replace(shape=shape), given)

    def _coded(self, x: torch.Tensor, params: Params | None) -> tuple[torch.Tensor, Params, torch.Tensor]:
        """Return codes and parameters of (tokens, cols), and notes: see :func:`.two_passes.new_notes`."""
        launch, data = self._input(len(x)), torch.empty_like(x, dtype=torch.uint8)
        seed = self._source.rounding.seed
        if params is None and launch.chooses:
            made = parameter_tensors(self._source, launch.shape, x.dtype)
            params = [torch.empty(grid, dtype=dtype, device=x.device) for grid, dtype in made]
            notes = new_notes(x.device, launch.blocks_for(x))
            launch.choose_and_encode(x, (data, params), notes, seed=seed)
            return data, params, notes
        params, notes = launch.choose_params(x) if params is None else params, new_notes(x.device)
        launch.encode(x, launch.scales(params), data, notes, seed)
        return data, params, notes

    def linear(self, weight: torch.Tensor, params: Params, bias: torch.Tensor | None) -> Layer:
        """Build the layer, which reads these tensors' memory each call.

        It waits for the device once the product is on its way, and raises what quantizing the input does.
        """

        def layer(x: torch.Tensor, given: Params | None) -> torch.Tensor:
            out = x.new_empty((*x.shape[:-1], self._request.shape[0]))
            if out.numel():
                notes = self.multiply(x, given, (weight, params, bias), out)
                if notes[0].item():
                    refuse_input(self._request, x)
            return out

        return layer

    def multiply(
        self,
        x: torch.Tensor,
        given: Params | None,
        layer: tuple[torch.Tensor, Params, torch.Tensor | None],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the product without synchronizing; nonzero notes: there is none."""
        (weight, params, bias), cols = layer, self._request.shape[1]
        tokens = x.numel() // cols
        codes, own, notes = self._coded(x.reshape(-1, cols).contiguous(), given)
        scales, zero = bits(own[0]), zero_point_of(self._source, own)
        factors, tables, coarse, _ = self.weight.scales(params)
        data = weight.contiguous()
        self._start_for(tokens, bias is not None)(
            codes.view(torch.int8) if self._source.element.signed else codes, scales,
            scales if zero is None else bits(zero),
            data.view(torch.int8) if self._request.scheme.bits == 8 else data, factors, tables, coarse,
            factors if bias is None else bits(bias.detach()), bits(out),
        )  # fmt: skip
        return notes


def input_request(request: Request, tokens: int) -> Request:
    """Request that quantizes the input of a layer on integer codes."""
    assert request.source is not None
    op = Op.QUANTIZE if request.given else Op.QUANTIZE_DYNAMIC
    shape = tokens, request.shape[1]
    return Request(
        op=op,
        scheme=request.source,
        shape=shape,
        dtype=request.dtype,
        own_dtype=request.dtype,
        device=request.device,
    )


def codes_refusal(request: Request) -> str | None:
    """Reason why kernels do not multiply a possible layer's codes, or None."""
    scheme, source, cols = request.scheme, request.source, request.shape[1]
    if source is None:
        return "an input that is not quantized is multiplied by values of the weight"
    group = scheme.granularity.block_shape(request.shape)[1]
    if group < cols and group % SHORTEST:
        return f"groups of {group} are not whole times {SHORTEST}, the least product of codes"
    if source.search is not None and not request.given:
        return f"scales of rule {source.search.text} are chosen by errors"
    held = held_of(source, request.dtype)
    if held is None or held.bytes or held.coarse or source.chained is not None:
        return f"scales of {source} are not floats of one level"
    return None
