"""The command ``zeropoint doctor``."""

from __future__ import annotations

from zeropoint import __version__

from . import lazy
from .options import AsJson
from .output import show, show_json


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, and which kernels run.

    Versions, the processor and engines are listed. Paste it into a report of a problem.

    \b
    Examples:
      zeropoint doctor
      zeropoint doctor --json
    """  # noqa: D301
    found = {"zeropoint": __version__, **lazy.checkup()}
    show_json(found) if as_json else show(lazy.checkup_table(found))
