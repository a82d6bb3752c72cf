"""Files of which one layer is wrong, whatever their layout."""

import re
from pathlib import Path

import zeropoint as zp


def assert_wrong(folder: Path, where: str, rule: str) -> None:
    """Verify a checkpoint: problems are of one layer, and ``rule`` is in the first one's sentence."""
    found = zp.verify_checkpoint(folder).problems
    assert {problem.where for problem in found} == {where}
    assert re.search(rule, found[0].what), found[0].what
