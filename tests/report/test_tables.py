"""Tables of many tensors stay short."""

import io
import itertools
import string
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from zeropoint.checkpoint.measure.tensor_error import TensorError
from zeropoint.report.tables import error_table, folded, once


def outcome(number: int, largest: float) -> Any:
    """Return the result of a weight that is like those of other layers but for its largest error."""
    error = TensorError(
        values=100, squares=(100.0,), errors=(largest**2,), largest=largest, clipped=0, zero_blocks=0,
        lost_blocks=0,
    )  # fmt: skip
    return SimpleNamespace(weight=SimpleNamespace(module=f"model.layers.{number}.mlp.up_proj"), error=error)


def test_weights_that_share_a_line_are_taken_as_one() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(error_table([outcome(0, 0.125), outcome(1, 0.5), outcome(2, 0.25)]))
    assert isinstance(console.file, io.StringIO)
    (line,) = (each for each in console.file.getvalue().splitlines() if "layers.*" in each)
    # The root of (0.125^2 + 0.5^2 + 0.25^2) / 300, and the largest of all.
    assert line.split() == ["model.layers.*.mlp.up_proj", "3", "0.0331", "29.6", "0.5", "0"]


def test_of_many_names_that_share_no_pattern_the_first_thousand_have_lines() -> None:
    names = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    groups = folded(names, str, len, False)
    assert len(groups) == 1001
    assert groups[0][0] == names[0]
    assert groups[-1][0] == "(other names: --all lists them)"
    assert list(groups[-1][1]) == names[1000:]
    assert len(folded(names, str, len, True)) == len(names)


def test_notes_that_differ_in_numbers_of_layers_are_one() -> None:
    notes = [f"'model.layers.{n}.attn.q' is kept, but engines run them as one layer" for n in range(22)]
    other = "transformers 5.23 cannot read 'model.layers.3.mlp'"
    folded_notes = ["'model.layers.*.attn.q' is kept, but engines run them as one layer (22 times)", other]
    assert once([*notes, other], False) == folded_notes
    assert once([*notes, other], True) == [*notes, other]
