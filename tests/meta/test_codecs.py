"""Only codecs know file layouts: the stream, its reports and the command line find them in the registry."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.registry import CODECS
from zeropoint.methods import methods, steps

SOURCE = Path(__file__).resolve().parents[2] / "src" / "zeropoint"
HOUSES = ("checkpoint", "report", "cli", "schemes")
NEUTRAL = frozenset((
    "act_order", "block_extents", "containers", "data_scales", "divided_tensors", "engine_records",
    "engines", "held_schemes", "known", "layer_schemes", "model_format", "names", "protocol",
    "records", "registry", "stored_forms", "tensor_fields", "word_layers", "words",
))  # fmt: skip
"""Modules of codecs/ that are about no codec."""
COMMON = frozenset((
    "weight", "scales", "biases", "_blocks", "_scales", "", "scale", "zero", "shape", "axis", "packing",
    "group_size", "optimize",
))  # fmt: skip
"""Names of tensors that are words of other things, too."""
# Dialects are named after implementations, whatever files these write, and presets follow one. The command
# line answers names of layouts in the place of schemes before it loads codecs, and torch with them. A package
# of torch that exports models is called like what it writes.
EXCUSED = frozenset((
    "schemes/dialects.py", "schemes/presets.py", "cli/arguments.py", "checkpoint/model/graph_export.py",
))  # fmt: skip
_IMPORT = re.compile(r"(?:from|import)\s+(?:zeropoint|\.\.+)\.?codecs(?:\.(\w+)|\s+import\s+(\w+))")


def words() -> frozenset[str]:
    """Return the names of codecs and of the tensors that only they have."""
    suffixes = {
        spec.suffix
        for codec in CODECS.values()
        for layer in preset_layers(codec)
        for spec in codec.tensors(layer, (256, 256), torch.float32)
    }
    # Some methods and steps have the name of their authors' layout.
    return frozenset(CODECS) - methods().keys() - steps().keys() | {
        suffix for suffix in suffixes if suffix not in COMMON
    }


def named(text: str, forbidden: Iterable[str]) -> list[str]:
    """Return what a source says of codecs: imports of their modules, and their words."""
    found = [a or b for a, b in _IMPORT.findall(text) if (a or b) not in NEUTRAL | {"registry"}]
    return found + [word for word in forbidden if re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text)]


@pytest.mark.parametrize(
    "text",
    [
        "from ..codecs.fp8_block import CODEC", "from ..codecs import fp8_block",
        "import zeropoint.codecs.compressed_tensors", 'x = "weight_packed"', "# as compressed-tensors has it",
    ],
)  # fmt: skip
def test_a_planted_name_is_found(text: str) -> None:
    assert named(text, words())


def test_what_is_neutral_is_not_found() -> None:
    text = "from ..codecs.registry import DEFAULT\nfrom ..codecs.protocol import Codec\nweight = 'x.weight'\n"
    assert not named(text, words())


@pytest.mark.parametrize("house", HOUSES)
def test_no_codec_is_named_outside_of_codecs(house: str) -> None:
    forbidden = words()
    found = {
        name: said
        for path in sorted((SOURCE / house).rglob("*.py"))
        if (name := str(path.relative_to(SOURCE))) not in EXCUSED
        and (said := named(path.read_text(encoding="utf-8"), forbidden))
    }
    assert found == {}
