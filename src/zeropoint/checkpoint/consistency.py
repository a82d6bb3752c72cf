"""What the files of a quantized checkpoint say of each other: index, configuration, layers and their scales.

This module needs no original. It reads small files and small tensors; layers are decoded in proofs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..architectures import loaded_name
from ..codecs.compressed_tensors_config import QUANT_METHOD, Targets
from ..codecs.fp8_block import QUANT_METHOD as FP8
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..errors import CheckpointError, printable
from .entries import TensorEntry
from .index import IndexMap
from .origin import ATTENDANTS
from .problems import Problem
from .proofs import Check, OpenFiles
from .quantize import Scratch
from .selection import WEIGHT, Selection, Why, choose, module_of
from .source import SINGLE_FILE, Source
from .storage import exists, shown
from .stored import Stored, configuration

# Scales of a quantized cache of keys and values, which belong to the attention and not to a linear layer.
_CACHE = frozenset(f"{what}_{kind}" for what in "qkv" for kind in ("scale", "zero_point", "global_scale"))
_SMALL_BYTES = 1 << 20
"""Most bytes of a scale of inputs, of which there is one for a layer or for a channel."""

# Methods that config.json names, and the files by which other tools say it.
_METHODS = {
    "gptq": "GPTQ (AutoGPTQ, GPTQModel)", "awq": "AWQ (AutoAWQ)", "auto-round": "AutoRound",
    "quark": "AMD Quark", "modelopt": "NVIDIA ModelOpt", "bitsandbytes": "bitsandbytes", "hqq": "HQQ",
    "torchao": "torchao", "quanto": "Quanto", "aqlm": "AQLM", "vptq": "VPTQ", "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM", "mxfp4": "gpt-oss (MXFP4)", "spqr": "SpQR", "bitnet": "BitNet",
}  # fmt: skip
_FILES = {
    "hf_quant_config.json": "NVIDIA ModelOpt", "quantize_config.json": "GPTQ (AutoGPTQ)",
    "quant_config.json": "AWQ (AutoAWQ)",
}  # fmt: skip


def require_readable(source: Source) -> None:
    """Raise CheckpointError, with the tool's name, for layouts that are not read here: no half check."""
    tool = other_tool(source)
    if tool is not None:
        raise CheckpointError(
            f"{shown(source.root)} is quantized by {tool}, whose layout is not read here, so nothing was "
            f"checked; read are {QUANT_METHOD} and {FP8}: verify it with the tool that wrote it"
        )


def other_tool(source: Source) -> str | None:
    """Return what quantized a checkpoint, and what says so, where its layout is not read here."""
    config = configuration(source)
    if config is not None:
        method = str(config.get("quant_method", config.get("quant_algo", "unknown")))
        if method in (QUANT_METHOD, FP8):
            return None
        tool = _METHODS.get(method, "a tool that is not known here")
        return f"{tool} (quant_method is {printable(method)})"
    found = next((str(path) for path in source.companions if str(path) in _FILES), None)
    return None if found is None else f"{_FILES[found]} ({found})"


def is_attendant(name: str, stored: Stored) -> bool:
    """Return whether a tensor belongs to a layer or a cache: a scale of inputs, outputs, keys or values."""
    module, _, last = name.rpartition(".")
    return last in _CACHE or (last in ATTENDANTS and stored.modules.number(module) is not None)


class AttendantCheck(Check):
    """Check that a scale of inputs or of a cache is finite and positive."""

    def __init__(self, entry: TensorEntry, files: OpenFiles) -> None:
        super().__init__(entry.name, entry.nbytes)
        self.entry = entry
        self.file = files[entry.file]

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (it needs a few numbers)
        """See :class:`Task`."""
        dtype = TORCH_DTYPES.get(self.entry.dtype)
        if dtype is None or not self.nbytes or self.nbytes > _SMALL_BYTES:
            self.report(
                f"{self.entry.dtype} of shape {list(self.entry.shape)} is neither a scale nor a zero point"
            )
            return
        if self.name.endswith("zero_point"):
            return
        buffer = bytearray(self.nbytes)
        self.file.read_into(memoryview(buffer), self.entry.begin)
        values = torch.frombuffer(buffer, dtype=dtype).double()
        bad = ~(torch.isfinite(values) & (values > 0))
        if bool(bad.any()):
            self.report(f"the scale {float(values[bad][0])} must be finite and positive")


def unlisted(source: Source, stored: Stored) -> list[Problem]:
    """Return linear weights that are neither quantized nor ignored, which loaders leave uninitialized."""
    found = []
    ignored, selection = Targets(stored.ignore), Selection()
    groups = [Targets(group.targets) for group in stored.groups]
    for entry in stored.others:
        module = module_of(entry.name)
        choice = choose(entry, source.entries, selection, source.config or {})
        linear = choice.why is Why.LINEAR or module.rpartition(".")[2] == "lm_head"
        unquantized = linear and entry.name.endswith(WEIGHT) and not ignored.match(module)
        if unquantized and any(group.match(module, linear=True) for group in groups):
            what = "neither quantized nor ignored by the configuration"
            found.append(Problem(where=module, what=what))
    return found


def idle_targets(source: Source, stored: Stored) -> list[Problem]:
    """Return modules that a group names one by one and that are not there, such as a layer that got lost."""
    broken = {problem.where for problem in stored.problems}
    idle = [
        target
        for target in dict.fromkeys(target for group in stored.groups for target in group.targets)
        if "." in target
        and not target.startswith("re:")
        and target not in broken
        and stored.modules.number(target) is None
        and source.entries.number(target) is None
        and source.entries.number(f"{target}{WEIGHT}") is None
    ]
    if not idle:
        return []
    # Groups also hold the names that a loader gives to modules.
    loaded = {loaded_name(module, source.config or {}) for module in stored.modules}
    return [
        Problem(where=target, what="a group of the configuration names it, but it is not there")
        for target in idle
        if target not in loaded
    ]


def index_problems(source: Source) -> Sequence[Problem]:
    """Return where an index is wrong: of shards, its total size; beside a single file, all that it says."""
    name = source.index or SINGLE_FILE + ".index.json"
    path = source.root / name
    if (source.index is None and source.shards != (SINGLE_FILE,)) or not exists(path):
        return []
    table = IndexMap(path)
    try:
        wrong = _misplaced(source, table)
    except (ValueError, RecursionError) as error:
        return [Problem(where=name, what=f"it is not an index: {error!r:.200}")]
    problems = [Problem(where=tensor, what=f"{name} does not say where it is") for tensor in sorted(wrong)]
    if table.total_size is not None and table.total_size != source.entries.nbytes:
        what = f"total_size is {table.total_size!r:.40}, but the tensors have {source.entries.nbytes} bytes"
        problems.append(Problem(where=name, what=what))
    return problems


def _misplaced(source: Source, table: IndexMap) -> set[str]:
    """Return the tensors of one file of which an index says something else; that of shards was checked."""
    wrong, named = set(), bytearray(len(source.entries))
    for tensor, shard in table:
        number = source.entries.number(tensor)
        if number is not None:
            named[number] = True
        if number is None or shard != SINGLE_FILE:
            wrong.add(tensor)
    wrong |= {name for name, found in zip(source.entries, named, strict=True) if not found}
    return wrong if source.index is None else set()
