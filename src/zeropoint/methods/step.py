"""Steps: pure functions that change a method's target, or correct the layer.

To add one, write a module in this package that defines ``STEP``; its name is the module's name. A chain is
spelled with the names of its steps, of the method that rounds, and of corrections: ``shift+gptq+bias``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..schemes import Scheme
from .method import LayerData, LowRank, Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The result of a step.

    target: what the method rounds, in float64. note: what the step found, for reports, such as ``"strength
    0.625"``. low_rank: what the layer adds to the product with its codes, or None.
    """

    target: torch.Tensor
    note: str = ""
    low_rank: LowRank | None = None


class ChainPart(Protocol):
    """A step's place in a chain; a step is a stateless value.

    name: its module's name. rank: steps of a chain stand in rising order of it. reason: why it stands there.
    formula, source: as for a :class:`~zeropoint.methods.Method`.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (see the class)

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def reason(self) -> str: ...  # noqa: D102

    @property
    def formula(self) -> str: ...  # noqa: D102

    @property
    def source(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """The result of a correction.

    added: what is added to the parameter, (rows,) float32. note: what it found, for reports.
    """

    added: torch.Tensor
    note: str = ""


class Correction(ChainPart, Protocol):
    """A change of another parameter, once a weight's codes are known.

    parameter: its name in the layer. takes: as for a :class:`~zeropoint.methods.Method`.
    """

    @property
    def parameter(self) -> str: ...  # noqa: D102 (see the class)

    @property
    def takes(self) -> Needs: ...  # noqa: D102

    def corrected(self, weight: torch.Tensor, values: torch.Tensor, data: LayerData) -> Corrected:
        """Return the summand to the parameter.

        weight: the float weight, (rows, columns). values: the values of its codes. data: statistics of the
        inputs. Raises CalibrationError where statistics are missing.
        """


class Step(ChainPart, Protocol):
    """A change of the target of one weight.

    takes: as for a :class:`~zeropoint.methods.Method`.
    """

    @property
    def takes(self) -> Needs: ...  # noqa: D102

    def __call__(self, weight: torch.Tensor, target: torch.Tensor, data: LayerData, scheme: Scheme) -> Moved:
        """Return the new target.

        weight: the float weight, (rows, columns). target: the target after earlier steps, in float64. data:
        statistics of the inputs. scheme: the scheme of the codes. Raises CalibrationError where statistics
        are missing.
        """
