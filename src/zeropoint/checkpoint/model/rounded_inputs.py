"""Quantized layer inputs in a model that runs on decoded weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import count
from ...models.dynamic_quantize import as_module
from ..read.source import Source
from ..read.storage import OpenFile, Place
from .loading import input_quantizer
from .running_model import RunningModel


@contextmanager
def rounded_inputs(
    model: RunningModel, source: Source, files: Mapping[Place, OpenFile]
) -> Iterator[tuple[str, ...]]:
    """Fake-quantize layer inputs within the context; yield sentences about them.

    Sentences say how many layers have which scheme of inputs, and where inputs are quantized in engines but
    not here. source: the checkpoint with its codes. files: of it, open.
    """
    handles: list[Any] = []
    rounded, left = Counter[str](), Counter[str]()
    hooked: set[str] = set()
    for rows in model.rows:
        found = model.floats.quantized(f"{rows.module}.weight")
        layer, given = found or (None, None)
        if layer is None or given is None or rows.layer in hooked:
            continue
        hooked.add(rows.layer)
        if layer.codec.input_names is None and not given.dynamic:
            left[str(given)] += 1
            continue
        quantizer = as_module(input_quantizer(layer, given, source, files))
        assert quantizer is not None
        quantizer.to(model.device)
        rounded[str(given)] += 1
        handles.append(model.root.get_submodule(rows.layer).register_forward_pre_hook(_Rounding(quantizer)))
    try:
        yield (
            *(f"inputs of {count(n, 'layer')} are quantized to {text}" for text, n in rounded.items()),
            *(
                f"weights only: inputs of {count(n, 'layer')} are {text} in engines, and floats here"
                for text, n in left.items()
            ),
        )
    finally:
        for handle in handles:
            handle.remove()


class _Rounding:
    """Quantizes the first argument of a layer."""

    def __init__(self, quantizer: nn.Module) -> None:
        self._quantizer = quantizer.eval()

    def __call__(
        self,
        layer: nn.Module,  # noqa: ARG002 (the signature of hooks)
        args: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        return (self._quantizer(args[0]), *args[1:])
