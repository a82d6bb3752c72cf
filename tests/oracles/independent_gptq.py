"""An independent GPTQ for Llama models of transformers, in plain torch: an oracle, simple rather than fast.

Sublayers are quantized in order (q, k, v; o; gate, up; down), each on the inputs that the sublayers before it
give with their new weights. With H = X^T X / n of these inputs X and its diagonal damped by 1 % of its mean,
inputs in falling order of diag H, and U the upper Cholesky factor of H^-1, for each column i in turn

    q_i = round(w_i / s_i) s_i,   e = (w_i - q_i) / U_ii,   w_j -= e U_ij  for j > i

(GPTQ, arXiv 2210.17323, with static groups: scales s are those of the float weight). GPTAQ (arXiv 2504.02692)
adds w_j += w_i P_ij with P = alpha triu(D^T X / n U^T, 1) U, D the inputs of the float model less X.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From a weight (rows, columns) and the mean squares of its inputs (columns,) to a factor for each weight, of
its shape, and the values that codes mean, in rising order."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """order: of columns. upper: U. correction: P, or None. Columns of both are in their order."""

    order: Tensor
    upper: Tensor
    correction: Tensor | None


def feedback(
    H: Tensor, cross: Tensor | None = None, *, alpha: float = 0.0, damping: float = 0.01
) -> Feedback:
    """Return what errors of columns do to the columns after them; cross: D^T X / n, for a correction."""
    H = H.double().clone()
    H.diagonal()[H.diagonal() == 0] = 1  # an input that is always zero
    order = H.diagonal().argsort(descending=True, stable=True)
    H.diagonal().add_(damping * H.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    correction = None
    if cross is not None:
        correction = alpha * (cross.double()[order][:, order] @ upper.T).triu(1) @ upper
    return Feedback(order=order, upper=upper, correction=correction)


def nearest(w: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """Return the closest of the scaled levels to each weight."""
    return levels[torch.bucketize(w / scale, (levels[1:] + levels[:-1]) / 2)] * scale


def quantized(weight: Tensor, scale: Tensor, levels: Tensor, by: Feedback, block: int = 128) -> Tensor:
    """Return a weight (rows, columns) rounded column by column, errors fed back, in float64."""
    W, S = (x.double()[:, by.order].T.contiguous() for x in (weight, scale))  # (columns, rows)
    S, Q, size = torch.where(S == 0, 1.0, S), torch.empty_like(W), len(W)
    for first in range(0, size, block):
        last = min(first + block, size)
        errors, seen = torch.empty_like(W[first:last]), torch.empty_like(W[first:last])
        for i in range(first, last):
            w = W[i].clone()
            Q[i] = nearest(w, S[i], levels.double())
            e = (w - Q[i]) / by.upper[i, i]
            W[i + 1 : last] -= torch.outer(by.upper[i, i + 1 : last], e)
            if by.correction is not None:
                W[i + 1 : last] += torch.outer(by.correction[i, i + 1 : last], w)
            errors[i - first], seen[i - first] = e, w
        W[last:] -= by.upper[first:last, last:].T @ errors
        if by.correction is not None:
            W[last:] += by.correction[first:last, last:].T @ seen
    return Q[by.order.argsort()].T.contiguous()


def sublayers(block: nn.Module, stream: Tensor, angles: tuple) -> Iterator[tuple[list, Tensor]]:
    """Yield (linear layers, their inputs) of a Llama block, which continue with their weights by then.

    stream: (windows, length, hidden), which is changed in place to what the block gives.
    """
    attention, mlp = block.self_attn, block.mlp
    x = block.input_layernorm(stream)
    yield [attention.q_proj, attention.k_proj, attention.v_proj], x
    out, attention.o_proj = attention.o_proj, nn.Identity()
    x = attention(hidden_states=x, position_embeddings=angles, attention_mask=None)[0]
    attention.o_proj = out
    yield [out], x
    stream += out(x)
    x = block.post_attention_layernorm(stream)
    yield [mlp.gate_proj, mlp.up_proj], x
    x = silu(mlp.gate_proj(x)).mul_(mlp.up_proj(x))
    yield [mlp.down_proj], x
    stream += mlp.down_proj(x)


@torch.no_grad()
def quantize_llama(model: nn.Module, ids: Tensor, scales: Scales, alpha: float = 0.0) -> Tensor:
    """Quantize the linear weights of a LlamaForCausalLM in place; return its last stream.

    ids: (windows, length) tokens. scales: of float weights. alpha: of GPTAQ's correction, 0 for GPTQ.
    """
    stream = model.model.embed_tokens(ids)
    angles = model.model.rotary_emb(stream, torch.arange(ids.shape[1])[None])
    wanted = stream.clone()
    for block in model.model.layers:
        twin = copy.deepcopy(block) if alpha else None
        floats = iter(()) if twin is None else sublayers(twin, wanted, angles)
        for linears, seen in sublayers(block, stream, angles):
            X = seen.flatten(0, 1)
            H, cross = X.T @ X / len(X), None
            if twin is not None:
                cross = (next(floats)[1].flatten(0, 1) - X).T @ X / len(X)
            by = feedback(H, cross, alpha=alpha)
            for linear in linears:
                scale, levels = scales(linear.weight.data, H.diagonal())
                linear.weight.data = quantized(linear.weight.data, scale, levels, by).float()
        next(floats, None)  # the end of the float block, which moves its stream
    return stream
