"""The kernels of packed rows as Python calls them; see :mod:`.entries`."""

from .machine.bit_moves import move_rows
from .machine.team import over_rows
from .machine.transposition import turn_panels

move_bits = over_rows(move_rows)
"""Join or split blocks."""
turn_words = over_rows(turn_panels)
"""Transpose words; rows are panels of words."""
