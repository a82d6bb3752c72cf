"""Tables of many tensors stay short."""

from __future__ import annotations

import itertools
import string

from zeropoint.report.tables import folded, once


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
