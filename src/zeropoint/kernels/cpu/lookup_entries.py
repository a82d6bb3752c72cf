"""Kernel entry points of elements that few formats have; see :mod:`.entries`."""

from typing import Any

from .decode.level_products import level_rows
from .decode.lookup_rows import lookup_rows
from .encode.chained_rows import stored_rows
from .encode.power_levels import PowerArrays, power_level_rows
from .encode.table_rows import digit_rows, table_rows
from .machine.descriptor import unpack
from .machine.intrinsics import device, kernel
from .machine.team import run_bundled, run_parts


@kernel
def look_up(*args: Any) -> Any:
    """Decode rows of codes whose values are looked up; see :func:`.decode.lookup_rows.lookup_rows`."""
    return run_parts(lookup_rows, args)


@kernel
def dequantize_levels(*args: Any) -> Any:
    """Decode rows under two levels of scales; see :func:`.decode.level_products.level_rows`."""
    return run_parts(level_rows, args)


@kernel
def encode_tables(*args: Any) -> Any:
    """Encode rows under tables of their blocks; see :func:`.encode.table_rows.table_rows`."""
    return run_parts(table_rows, args)


@kernel
def join_digits(*args: Any) -> Any:
    """Join digits to codes; see :func:`.encode.table_rows.digit_rows`."""
    return run_parts(digit_rows, args)


@device
def _powers(args: Any, first: Any, last: Any) -> Any:
    return power_level_rows(PowerArrays(*args[2:]), unpack(args[0]), args[1], first, last)


@kernel
def quantize_powers(*args: Any) -> Any:
    """Quantize under two levels of powers of two.

    A descriptor, :class:`.encode.power_levels.Powers`, :class:`.encode.power_levels.PowerArrays`.
    """
    return run_bundled(_powers, args)


@kernel
def store_levels(*args: Any) -> Any:
    """Store numbers of blocks level by level; see :func:`.encode.chained_rows.stored_rows`."""
    return run_parts(stored_rows, args)
