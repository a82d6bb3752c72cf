"""MultiheadAttention as four linear layers, so that each can be quantized.

torch's own module multiplies with its weights itself, in one function: there is no layer to replace.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import UnsupportedError
from .shared_linear import linear_on
from .state_dict_hooks import State, add_state_hooks

_OPTIONS: dict[str, Any] = {
    "key_padding_mask": None,
    "need_weights": True,
    "attn_mask": None,
    "average_attn_weights": True,
    "is_causal": False,
}
"""Parameters of ``nn.MultiheadAttention.forward`` after query, key and value, in order, with defaults."""


class SplitAttention(nn.Module):
    """What ``nn.MultiheadAttention`` computes, with linear layers for its projections.

        softmax(q_proj(query) k_proj(key)^T / sqrt(head_dim) + mask) v_proj(value), heads joined, out_proj

    Arguments, shapes and results of the call are the same; weights and biases share memory.

    Args:
        whole: the module to unfuse.

    Example:
        >>> whole = nn.MultiheadAttention(8, 2).eval()
        >>> x = torch.randn(3, 1, 8)
        >>> torch.allclose(SplitAttention(whole)(x, x, x)[0], whole(x, x, x)[0], atol=1e-6)
        True
    """

    # Read by nn.TransformerEncoderLayer: without them it goes no short way past the modules.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = whole.embed_dim, whole.num_heads
        self.dropout, self.batch_first = whole.dropout, whole.batch_first
        self.add_zero_attn = whole.add_zero_attn
        joined, biases = whole._parameters["in_proj_weight"], whole._parameters["in_proj_bias"]
        apart = (whole.q_proj_weight, whole.k_proj_weight, whole.v_proj_weight)
        weights = apart if joined is None else joined.chunk(3)
        shifts = [None] * 3 if biases is None else biases.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(linear_on, weights, shifts)
        self.out_proj = linear_on(whole.out_proj.weight, whole.out_proj.bias)
        self.bias_k, self.bias_v = whole.bias_k, whole.bias_v
        self._joined = joined is not None
        self.train(whole.training)
        names = _Names(joined=self._joined)
        add_state_hooks(self, names.out, names.back)

    def fused(self) -> nn.Module:
        """Return the original module with the current weights."""
        with torch.device("meta"):
            whole = nn.MultiheadAttention(
                self.embed_dim, self.num_heads, dropout=self.dropout, bias=self.out_proj.bias is not None,
                add_zero_attn=self.add_zero_attn, kdim=self.k_proj.in_features,
                vdim=self.v_proj.in_features, batch_first=self.batch_first,
            )  # fmt: skip
        for name, parameter in self.fused_parameters().items():
            setattr(whole, name, parameter)
        whole.out_proj.weight, whole.out_proj.bias = self.out_proj.weight, self.out_proj.bias
        return whole

    def fused_parameters(self) -> dict[str, nn.Parameter | None]:
        """Return current fused parameters, without the output projection."""
        own = dict(self.named_parameters())
        state = _Names(joined=self._joined).out({name: p.detach() for name, p in own.items()})
        names = (*_JOINED, *_APART, "bias_k", "bias_v")
        return {name: nn.Parameter(state[name], False) if name in state else None for name in names}

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, shaped like ``query``, and weights (N, L, S).

        Args:
            query: shape (L, N, E), or (N, L, E) with ``batch_first``; (L, E) without a batch.
            key: as ``query``, of S tokens.
            value: as ``key``.
            rest, named: ``key_padding_mask``, ``need_weights``, ``attn_mask``, ``average_attn_weights`` and
                ``is_causal``, as ``nn.MultiheadAttention`` takes them, in this order or by name.

        Raises:
            UnsupportedError: for ``is_causal`` without the mask that it describes.
            TypeError: for others.
        """
        options = {**_OPTIONS, **dict(zip(_OPTIONS, rest, strict=False)), **named}
        if len(rest) + len(named) > len(_OPTIONS) or len(options) > len(_OPTIONS):
            raise TypeError(f"options {rest} {sorted(named)} must be among {', '.join(_OPTIONS)}")
        attn_mask, need_weights = options["attn_mask"], options["need_weights"]
        if options["is_causal"] and attn_mask is None:
            raise UnsupportedError("is_causal describes attn_mask, which is None; pass the causal mask")
        batched = query.dim() == 3
        turn = batched and not self.batch_first
        inner = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        inner = [x.transpose(0, 1) if turn else x for x in inner]
        q, k, v = self.q_proj(inner[0]), self.k_proj(inner[1]), self.v_proj(inner[2])
        k, v = self._more(k, self.bias_k), self._more(v, self.bias_v)
        mask = self._mask(attn_mask, options["key_padding_mask"], k.size(0), q, k.size(1) - inner[1].size(1))
        y, weights = self._attend((self._heads(q), self._heads(k), self._heads(v)), mask, need_weights)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and options["average_attn_weights"]:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if turn else y, weights

    def _more(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (N, S, E) with the positions that ``add_bias_kv`` and ``add_zero_attn`` append."""
        count = x.size(0)
        parts = [x] if bias is None else [x, bias.expand(count, 1, -1).to(x.dtype)]
        if self.add_zero_attn:
            parts.append(x.new_zeros(count, 1, x.size(2)))
        return torch.cat(parts, 1) if len(parts) > 1 else x

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _mask(
        self,
        attend: torch.Tensor | None,
        padding: torch.Tensor | None,
        count: int,
        q: torch.Tensor,
        appended: int,
    ) -> torch.Tensor | None:
        """Return both masks as one summand to scores, (N, heads, L, S)."""
        parts = []
        if attend is not None:
            added = _additive(attend, q)
            parts.append(
                added.reshape(count, self.num_heads, *added.shape[1:]) if added.dim() == 3 else added
            )
        if padding is not None:
            parts.append(_additive(padding, q).reshape(count, 1, 1, -1))
        whole = sum(parts[1:], parts[0]) if parts else None
        return whole if whole is None or not appended else functional.pad(whole, (0, appended))

    def _attend(
        self,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (q, k, v), dropout = heads, self.dropout if self.training else 0.0
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = (q * math.sqrt(1.0 / q.size(-1))) @ k.transpose(-2, -1)
        weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_JOINED = ("in_proj_weight", "in_proj_bias")
_APART = tuple(f"{name}_weight" for name in _PROJECTIONS)
"""Names of the fused module's weights, in one tensor or in three."""


class _Names:
    """Conversion between states of three projections and the fused module."""

    def __init__(self, *, joined: bool) -> None:
        self.joined = joined

    def out(self, state: State) -> State:
        """Join what belongs together, where all of it is floats."""
        weights, biases = (tuple(f"{name}.{kind}" for name in _PROJECTIONS) for kind in ("weight", "bias"))
        if not all(name in state for name in weights):
            return state
        found = {name: value for name, value in state.items() if name not in (*weights, *biases)}
        if self.joined:
            found[_JOINED[0]] = torch.cat([state[name] for name in weights])
        else:
            found |= {whole: state[name] for whole, name in zip(_APART, weights, strict=True)}
        if biases[0] in state:
            found[_JOINED[1]] = torch.cat([state[name] for name in biases])
        return found

    def back(self, state: State) -> State:
        """Take apart what is joined."""
        found = dict(state)
        for whole, kind in zip(_JOINED, ("weight", "bias"), strict=True):
            if whole in found:
                parts = found.pop(whole).chunk(3)
                found |= {f"{name}.{kind}": part for name, part in zip(_PROJECTIONS, parts, strict=True)}
        for whole, name in zip(_APART, _PROJECTIONS, strict=True):
            if whole in found:
                found[f"{name}.weight"] = found.pop(whole)
        return found


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask as minus infinity where true."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
