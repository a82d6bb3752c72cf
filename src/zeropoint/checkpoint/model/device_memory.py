"""Parameters and buffers on a device while their modules run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...ops.devices import CPU


@contextmanager
def parameters_on(device: torch.device, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Move parameters and buffers of modules to ``device`` for the context.

    On the CPU nothing is moved. Parameters that modules share stay shared. At the end the modules have their
    parameters on the CPU again; memory of these may be given back meanwhile.
    """
    if device.type == CPU.type:
        yield
        return
    moved: dict[int, nn.Parameter] = {}
    before: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None]]] = []
    try:
        for module in modules:
            before.append((module._parameters, dict(module._parameters)))
            for name, own in module._parameters.items():
                if own is not None:
                    there = moved.get(id(own))
                    if there is None:
                        there = moved[id(own)] = nn.Parameter(own.detach().to(device), requires_grad=False)
                    module._parameters[name] = there
            for name, buffer in module._buffers.items():
                # Few and small: once moved, they stay.
                module._buffers[name] = None if buffer is None else buffer.to(device)
        yield
    finally:
        for own_place, own_parameters in before:
            own_place.update(own_parameters)
