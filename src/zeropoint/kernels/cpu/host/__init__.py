"""Host side of kernels: arrays of tensors, threads over rows, errors' places.

Nothing here is compiled: the cache of compiled kernels does not depend on these files.
"""

from numba import config

from ....errors import UnsupportedError

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise UnsupportedError("NUMBA_DISABLE_JIT is set, so that nothing is compiled; unset it")
