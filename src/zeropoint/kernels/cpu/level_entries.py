"""Kernel entry points of scales of several levels; see :mod:`.entries`."""

from typing import Any

from .decode.level_products import level_rows
from .encode.chained_rows import stored_rows
from .encode.power_levels import PowerArrays, power_level_rows
from .machine.descriptor import unpack
from .machine.team import bundled, over_rows

dequantize_levels = over_rows(level_rows)
"""Decode rows under two levels of scales."""


@bundled
def quantize_powers(args: Any, first: Any, last: Any) -> Any:
    """Quantize under two levels of powers of two.

    A descriptor, :class:`.encode.power_levels.Powers`, :class:`.encode.power_levels.PowerArrays`.
    """
    return power_level_rows(PowerArrays(*args[2:]), unpack(args[0]), args[1], first, last)


store_levels = over_rows(stored_rows)
"""Store numbers of blocks level by level."""
