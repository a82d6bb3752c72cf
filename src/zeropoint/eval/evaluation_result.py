"""Results of an evaluation: statistics of each model, with their errors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ..errors import CalibrationError
from ..ops.devices import CPU
from ..results import Result
from .estimates import mean_of
from .language_statistics import Samples, Statistics

_SAID = 4
"""Statistics of a model that a line about it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuality:
    """What was found of a model.

    Args:
        name: where it lies, or what the noise floor is.
        nbytes: of its weights in files.
        statistics: by name; shares are shares, not percent.
        notes: sentences, such as how inputs are quantized.
        is_noise_floor: whether it is the reference in another dtype.
        samples: the numbers of each token, sentence or choice whose means are among the statistics.
    """

    name: str
    nbytes: int
    statistics: Statistics
    notes: tuple[str, ...] = ()
    is_noise_floor: bool = False
    samples: Samples = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        first = itertools.islice(self.statistics.items(), _SAID)
        return f"{self.name}: " + ", ".join(f"{key} {found.value:.5g}" for key, found in first)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as values that JSON holds."""
        numbers = {
            key: {"value": found.value, "error": found.error} for key, found in self.statistics.items()
        }
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "noise_floor": self.is_noise_floor,
            "notes": list(self.notes),
            "statistics": numbers,
        }

    def difference(self, other: ModelQuality) -> Statistics:
        """Return this model's means minus another's, with paired errors.

        What both find hard does not count, so that the error is often far below the errors of the two means.

        Args:
            other: a model of the same evaluation, or of one on the same data.

        Raises:
            CalibrationError: where the two were evaluated on other data.
        """
        if {key: len(x) for key, x in self.samples.items()} != {
            key: len(x) for key, x in other.samples.items()
        }:
            raise CalibrationError(
                f"{self.name} and {other.name} were evaluated on other data; compare models of one evaluation"
            )
        return {key: mean_of(own - other.samples[key]) for key, own in self.samples.items()}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation(Result):
    """What was found of models.

    Args:
        reference: where it lies.
        reference_bytes: of its weights in files.
        encoder: whether they are embedding models.
        data: sentences about what they ran on.
        models: the noise floor first, if any, then the models in their order.
        notes: sentences about what was left out.
        device: where models ran, ``cpu`` or ``cuda``.
    """

    reference: str
    reference_bytes: int
    encoder: bool
    data: tuple[str, ...]
    models: tuple[ModelQuality, ...]
    notes: tuple[str, ...] = ()
    device: str = CPU.type

    @property
    def lines(self) -> tuple[str, ...]:
        """See :class:`Result`: of each model the first statistics."""
        return (*map(str, self.models), *self.data, *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """See :class:`Result`: numbers by the names of statistics, shares as shares."""
        return {
            "reference": self.reference,
            "reference_bytes": self.reference_bytes,
            "encoder": self.encoder,
            "data": list(self.data),
            "notes": list(self.notes),
            "device": self.device,
            "models": [model.to_dict() for model in self.models],
        }

    @property
    def noise_floor(self) -> ModelQuality | None:
        """The reference in bfloat16, or None."""
        return next((model for model in self.models if model.is_noise_floor), None)
