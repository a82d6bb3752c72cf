"""Groups of parameters for an optimizer: weights, and what quantizers learn."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..training import Quantizer


def parameter_groups(
    model: nn.Module, *, lr: float, scale_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return optimizer groups: the model's parameters, and its quantizers'.

    Args:
        model: prepared.
        lr, weight_decay: of the first group.
        scale_lr: of the second group, a tenth of ``lr`` unless given; decay would pull scales towards 0, and
            is 0 there. Parameters that do not train are left out.

    Example:
        >>> from zeropoint.models import prepare
        >>> prepared = prepare(nn.Sequential(nn.Linear(64, 8)), "w4a16", qat="lsq")
        >>> [(len(group["params"]), group["lr"]) for group in parameter_groups(prepared, lr=0.5)]
        [(2, 0.5), (1, 0.05)]
    """
    learned = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, Quantizer)
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    rate = lr / 10 if scale_lr is None else scale_lr
    return [
        {"params": weights, "lr": lr, "weight_decay": weight_decay},
        {"params": list(learned.values()), "lr": rate, "weight_decay": 0.0},
    ]
