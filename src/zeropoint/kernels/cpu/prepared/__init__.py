"""Prepared calls of the kernels: arguments resolved once, memory held between calls, nothing compiled here.

What a kernel returns or chooses is what :mod:`zeropoint.kernels.cpu.backend` would: the same kernels run with
the same arguments.
"""

from .prepare import prepare

__all__ = ["prepare"]
