"""What a preset of a codec is: how a linear layer is deployed, under a name that the codec's users know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerPreset:
    """What happens to a linear layer: the text forms of its weight's and its input's scheme.

    input: a scheme that is computed from each input at run time, or None to leave inputs alone.
    needs_calibration: why the full preset cannot be written without data, or None.
    """

    weight: str
    input: str | None = None
    needs_calibration: str | None = None
