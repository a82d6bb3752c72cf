"""Divergence of a model from itself under replaced weights, for search.

One pass of the unchanged model is kept, block by block; a question runs the blocks from the first changed one
on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ..checkpoint.model.forward_pass import ForwardPass, Replacing, opened
from ..checkpoint.plan.limits import Limits
from ..checkpoint.read.source import Source
from .estimates import Estimate, mean_of
from .token_scores import TokenScores, scores_of
from .window_probe import WindowProbe


class DivergenceMeter:
    """A model in memory with replaceable weights, and its unchanged logits.

    Args:
        model: with all its weights, see :class:`~zeropoint.checkpoint.model.forward_pass.Replacing`.
        probe: the windows that it runs on.
    """

    def __init__(self, model: Replacing, probe: WindowProbe) -> None:
        self._model, self._probe = model, probe
        with model.outputs({}) as found:
            self._base = [self._read(found, n).clone() for n in range(len(probe.batches))]

    @property
    def modules(self) -> tuple[str, ...]:
        """File names of the Linear layers with replaceable weights."""
        return self._model.modules

    def weight(self, module: str) -> torch.Tensor:
        """Return a copy of an unchanged weight, (out, in).

        Args:
            module: name of a Linear layer.
        """
        return self._model.weight(module)

    def scores(self, weights: Mapping[str, torch.Tensor]) -> TokenScores:
        """Return token scores under replaced weights, against the unchanged model.

        Args:
            weights: (out, in) each, by the names of their modules.

        Raises:
            CalibrationError: for a name or shape that the model has not.
        """
        targets = self._probe.windows.targets
        with self._model.outputs(weights) as found:
            return TokenScores.join(
                scores_of(self._read(found, n), base, targets[n]) for n, base in enumerate(self._base)
            )

    def mean_divergence(self, weights: Mapping[str, torch.Tensor]) -> Estimate:
        """Return the mean KL divergence, in nats, with its standard error.

        Args:
            weights: replaced weights, (out, in) each, by the names of their modules.

        Raises:
            CalibrationError: for a name or shape that the model has not.
        """
        return mean_of(self.scores(weights).kld)

    def _read(self, found: ForwardPass, batch: int) -> torch.Tensor:
        return self._probe.read(found, batch, batch)


@contextmanager
def divergence_meter(
    source: Source,
    probe: WindowProbe,
    *,
    limits: Limits | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Iterator[DivergenceMeter]:
    """Return a context with a checkpoint's model and replaceable weights.

    Logits of all scored tokens, outputs of blocks, and the whole model are in memory: for small models and
    few windows, such as the four of :meth:`~.text_windows.TokenizedText.windows` with ``most=4``.

    Args:
        source: a local checkpoint, quantized or not; its decoded weights are the unchanged model.
        probe: ``WindowProbe(TextTokenizer(source)(text).windows(context, most))``.
        limits: of memory, or None for the default.
        dtype: of weights and activations.

    Raises:
        ZeropointError: what :func:`~zeropoint.checkpoint.model.forward_pass.opened` raises.
    """
    with (
        opened(source, probe.batches, limits or Limits.default(), dtype=dtype) as (model, _),
        Replacing(model) as replacing,
    ):
        yield DivergenceMeter(replacing, probe)
