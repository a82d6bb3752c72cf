"""Statistics as an importance matrix of llama.cpp, in either layout of read/imatrix_file.py."""

from __future__ import annotations

import struct
from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch

from ...codecs.containers.gguf import GGUF
from ...codecs.containers.protocol import Row
from ...codecs.registry import CODECS
from ...codecs.stored_forms import RowOrder, StoredForm
from ...errors import CalibrationError
from ..read.source import Source
from .importance import name_in_llama_cpp
from .statistics_file import SavedStatistics

GGUF_ENDING = ".gguf"


def imatrix_pieces(saved: SavedStatistics, source: Source, *, as_gguf: bool) -> tuple[list[bytes], list[str]]:
    """Return the bytes of an importance matrix, and the modules without inputs.

    These are left out. Weights have llama.cpp's names, where these are known, and experts stand
    together. as_gguf: the newer layout. Raises CalibrationError where nothing is left.
    """
    parts = defaultdict[str, dict[int, str]](dict)
    counts, orders = dict[str, int](), dict[str, RowOrder | None]()
    for module in saved.owners:
        form = _form(module, source)
        name = form.name if form is not None else name_in_llama_cpp(module) or f"{module}.weight"
        at, counts[name] = (0, 1) if form is None or form.part is None else form.part
        parts[name][at] = module
        orders[name] = None if form is None else form.columns
    entries, without = list[tuple[str, np.ndarray, np.ndarray]](), list[str]()
    for name, own in parts.items():
        states = {at: saved.squares(saved.owners[module]) for at, module in own.items()}
        columns = max(len(state["squares"]) for state in states.values())
        sums = np.zeros((counts[name], columns), np.float32)
        vectors = np.zeros((counts[name], 1), np.float32)
        for at, state in states.items():
            sums[at], vectors[at] = state["squares"].to(torch.float32).numpy(), int(state["vectors"])
        if not vectors.any():
            without += own.values()
            continue
        if (order := orders[name]) is not None:
            sums = sums[:, order.model_rows(torch.arange(columns)).numpy()]
        entries.append((name, sums, vectors))
    if not entries:
        raise CalibrationError(
            "the statistics are of no vectors, of which no importance follows; give more data"
        )
    return (_gguf if as_gguf else _dat)(entries), without


def _form(module: str, source: Source) -> StoredForm | None:
    entry = source.entries.get(f"{module}.weight")
    shape = (1, 1) if entry is None else tuple(entry.shape)
    codec = next(each for each in CODECS.values() if each.model_format.of_importance)
    form = codec.model_format.stored_form(f"{module}.weight", shape, source.config or {})
    return form if form is not None and form.name else None


def _dat(entries: list[tuple[str, np.ndarray, np.ndarray]]) -> list[bytes]:
    """Return the older layout: means as one call's sums, else 1."""
    pieces = [struct.pack("<i", len(entries))]
    for name, sums, vectors in entries:
        means = np.where(vectors > 0, sums / np.maximum(vectors, 1), 1).astype("<f4")
        text = name.encode()
        pieces.append(
            struct.pack("<i", len(text)) + text + struct.pack("<ii", 1, means.size) + means.tobytes()
        )
    return [*pieces, struct.pack("<ii", 1, 0)]


def _gguf(entries: list[tuple[str, np.ndarray, np.ndarray]]) -> list[bytes]:
    tensors = sorted(
        (f"{name}.{kind}", values)
        for name, sums, vectors in entries
        for kind, values in (("in_sum2", sums), ("counts", vectors))
    )
    rows = [Row(name, "F32", values.shape, values.nbytes) for name, values in tensors]
    chunk = max(int(vectors.max()) for _, _, vectors in entries)
    head = GGUF.head(
        rows,
        {
            "general.type": "imatrix",
            "imatrix.datasets": ["zeropoint statistics"],
            "imatrix.chunk_count": 1,
            "imatrix.chunk_size": chunk,
        },
    )
    pieces = [head.data]
    ends = [*head.begins[1:], head.size]
    for (_, values), (begin, end) in zip(tensors, pairwise([head.begins[0], *ends]), strict=True):
        data = values.astype("<f4").tobytes()
        pieces.append(data + bytes(end - begin - len(data)))
    return pieces
