"""Text of nodes, as a screen of a given width shows it."""

import io
from collections.abc import Iterable

from rich.console import Console

from zeropoint.report.nodes import Node, on_screen


def as_text(nodes: Iterable[Node], *, whole: bool = False, width: int = 100) -> str:
    """Return nodes as text; ``whole``: with long parts, explanations, all rows."""
    written = io.StringIO()
    Console(file=written, width=width, color_system=None).print(on_screen(nodes, whole=whole))
    return written.getvalue().strip("\n")
