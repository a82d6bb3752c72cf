"""SlopeMeans: running means of gradients and squares, as in Adam."""

import torch

_KEPT, _SQUARES_KEPT = 0.9, 0.99
"""Shares of the means of earlier gradients, and of their squares, that stay in a mean with a new one."""
_TINY = 2.0**-63
"""The least root that a mean is divided by: smaller numbers have squares that are less than any float32."""


class SlopeMeans:
    """Running means of gradients, and of their squares, of one tensor.

        direction = mean(g) / sqrt(mean(g^2))

    It is 1 or -1 where gradients agree, and close to 0 where their sign changes: the step of Adam.

    Source: Kingma and Ba, Adam, arXiv:1412.6980.

    Example:
        >>> means = SlopeMeans(torch.zeros(2))
        >>> means.direction(torch.tensor([3.0, -0.5]))
        tensor([ 1., -1.])
    """

    NUMBER_BYTES = 8
    """Memory of a number of the tensor."""

    def __init__(self, like: torch.Tensor) -> None:
        self._mean = torch.zeros(like.shape, device=like.device)
        self._square = torch.zeros_like(self._mean)
        self._steps = 0

    def direction(self, slope: torch.Tensor) -> torch.Tensor:
        """Return the direction with one gradient more, float32.

        slope: the gradient; what is not finite counts as 0.
        """
        self._steps += 1
        wide = torch.where(torch.isfinite(slope), slope.float(), 0.0)
        self._mean.lerp_(wide, 1 - _KEPT)
        self._square.lerp_(wide.square_(), 1 - _SQUARES_KEPT)
        mean = self._mean / (1 - _KEPT**self._steps)
        root = (self._square / (1 - _SQUARES_KEPT**self._steps)).sqrt_()
        return mean.div_(root.clamp_min_(_TINY))
