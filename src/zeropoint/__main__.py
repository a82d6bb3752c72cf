"""``python -m zeropoint``: the command line."""

from zeropoint.cli.main import run

run()
