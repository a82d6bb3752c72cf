"""Kernel entry points of elements that few formats have; see :mod:`.entries`."""

from .decode.lookup_rows import lookup_rows
from .encode.table_rows import digit_rows, table_rows
from .machine.team import over_rows

look_up = over_rows(lookup_rows)
"""Decode rows of codes whose values are looked up."""
encode_tables = over_rows(table_rows)
"""Encode rows under tables of their blocks."""
join_digits = over_rows(digit_rows)
"""Join digits to codes."""
