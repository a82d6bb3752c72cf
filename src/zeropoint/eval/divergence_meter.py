"""How far a model gets from itself when some of its weights are replaced: what a search over formats asks.

One pass of the model as it is is kept, block by block; a question runs the blocks from the first changed one
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
    """A model in memory whose weights can be replaced, and the logits of the model as it is.

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
        """Names in the files of the Linear layers whose weights can be replaced."""
        return self._model.modules

    def weight(self, module: str) -> torch.Tensor:
        """Return a copy of a weight of the model as it is: (out, in), in the dtype of the pass.

        Args:
            module: name of a Linear layer.
        """
        return self._model.weight(module)

    def scores(self, weights: Mapping[str, torch.Tensor]) -> TokenScores:
        """Return the scores of all tokens with some weights replaced, next to the model as it is.

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
        """Return the mean KL divergence, in nats, from the model as it is, with its standard error.

        Args:
            weights: those that are replaced, (out, in) each, by the names of their modules.

        Raises:
            CalibrationError: for a name or shape that the model has not.
        """
        return mean_of(self.scores(weights).kld)

    def _read(self, found: ForwardPass, batch: int) -> torch.Tensor:
        return self._probe.read(found, batch, batch)


@contextmanager
def divergence_meter(
    source: Source, probe: WindowProbe, *, limits: Limits | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Iterator[DivergenceMeter]:  # fmt: skip
    """Return a context in which weights of a checkpoint's model can be replaced, to see what that changes.

    Logits of all scored tokens, what each block gives, and the whole model are in memory: for small models
    and few windows, such as the four of :meth:`~.text_windows.TokenizedText.windows` with ``most=4``.

    Args:
        source: a local checkpoint, quantized or not; its decoded weights are the model as it is.
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
