"""Replace ``save_pretrained`` of a converted model by an error.

transformers would write packed codes under names that it does not know, and load random weights from them.
"""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedError

_NAME = "save_pretrained"


class Refusal:
    """Refusal to save a converted model as floats; picklable value."""

    def __call__(self, *_: object, **__: object) -> None:
        """Raise UnsupportedError with what to call instead."""
        raise UnsupportedError(
            "save_pretrained would write packed weights that from_pretrained cannot load; call "
            "zeropoint.save_checkpoint(model, directory), or dequantize_model(model) first"
        )


def guarded(model: nn.Module) -> nn.Module:
    """Guard all parts of a packed model against transformers' saving."""
    for module in model.modules():
        if callable(getattr(type(module), _NAME, None)):
            vars(module)[_NAME] = Refusal()
    return model


def unguarded(model: nn.Module) -> nn.Module:
    """Undo :func:`guarded`."""
    for module in model.modules():
        vars(module).pop(_NAME, None)
    return model
