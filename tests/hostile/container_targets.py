"""The parsers of files that are no safetensors and are fuzzed: GGUF, importance matrices, ONNX models."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.hostile.gguf_files import DATA, GGUF_FILES, GOOD_GGUF, file, row
from tests.hostile.messages import mutate_message
from tests.hostile.mutations import mutate_numbers
from tests.hostile.target import Target, read_whole, refusal

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.imatrix_file import read_imatrix
from zeropoint.checkpoint.read.source import Source, open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec

NUMBERS = "numbers.bin"
"""The file next to a model in which some of its tensors lie."""


def gguf_target(folder: Path) -> Target:
    """GGUF files of every size and kind of value."""
    path = folder / "model.gguf"

    def decide(content: bytes) -> str:
        path.write_bytes(content)
        return "accepted" if refusal(read_whole, folder) is None else "refused"

    small = [case.content["model.gguf"] for case in GGUF_FILES if isinstance(case.content, dict)]
    seeds = [GOOD_GGUF] * len(small) + [content for content in small if isinstance(content, bytes)]
    return Target(name="gguf", seeds=seeds, decide=decide, mutate=mutate_numbers)


def imatrix_target(folder: Path) -> Target:
    """Importance matrices in both layouts: what is read of them are finite numbers from 0 on."""
    path = folder / "imatrix"

    def decide(content: bytes) -> str:
        path.write_bytes(content)
        if refusal(read_imatrix, path) is not None:
            return "refused"
        for name, values in read_imatrix(path).items():
            assert values.dtype == np.float32, name
            assert values.ndim == 1, name
            assert np.isfinite(values).all(), name
            assert (values >= 0).all(), name
        return "accepted gguf" if content[:4] == b"GGUF" else "accepted"

    old = struct.pack("<i", 2)
    for name, calls in (("blk.0.attn_q.weight", 3), ("output.weight", 0)):
        old += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii4f", calls, 4, 0.5, 0, 7, 1e-9)
    new = file(rows=(row("a.in_sum2", (4, 2), 0, 0), row("a.counts", (1, 2), 0, 32)), data=DATA[:40])
    sums = np.array([1, 2, 3, 4, 5, 6, 7, 8, 2, 0], np.float32).tobytes()
    new = new.replace(DATA[:40], sums)
    return Target(
        name="imatrix", seeds=[old + struct.pack("<ii", 10, 4) + b"text", new], decide=decide,
        mutate=mutate_numbers,
    )  # fmt: skip


def onnx_target(folder: Path) -> Target:
    """ONNX models: messages, graphs inside of nodes, numbers in the file and next to it, and codes.

    What is read of a model must be bytes of the tensors that the package onnx finds in it.
    """
    place = folder / "in"
    place.mkdir()
    (place / NUMBERS).write_bytes(_weight().tobytes())
    path, codec = place / "model.onnx", get_codec("onnx")

    def decide(content: bytes) -> str:
        path.write_bytes(content)
        if refusal(open_source, place) is not None:
            return "refused"
        _compare(open_source(place), content)
        planned = refusal(lambda p: make_plan(open_source(p), "int8:channel", codec=codec), place)
        if planned is None:
            return "accepted"
        return "refused later" if refusal(read_whole, place) is not None else "accepted codes"

    return Target(name="onnx", seeds=list(_models(folder)), decide=decide, mutate=mutate_message)


def _weight() -> Any:
    return np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)


def _model(*, branch: bool) -> Any:
    """Return a model with a weight in an initializer, in a node Constant, next to it, and in a branch."""
    value, node = helper.make_tensor_value_info, helper.make_node
    far = TensorProto(name="far", dims=[32, 8], data_type=TensorProto.FLOAT, data_location=1)
    for key, said in (("location", NUMBERS), ("offset", "0"), ("length", "1024")):
        far.external_data.add(key=key, value=said)
    constant = node("Constant", [], ["held"], value=numpy_helper.from_array(_weight() + 1, "held"))
    nodes = [
        constant, node("MatMul", ["x", "w"], ["a"]), node("Gemm", ["x", "far"], ["b"]),
        node("MatMul", ["x", "held"], ["c"]), node("Sum", ["a", "b", "c"], ["y"]),
    ]  # fmt: skip
    held = [numpy_helper.from_array(_weight() + 2, "w"), far]
    if branch:
        inner = helper.make_graph(
            [node("MatMul", ["x", "v"], ["o"])], "inner", [], [value("o", 1, [1, 8])],
            [numpy_helper.from_array(_weight() + 3, "v")],
        )  # fmt: skip
        nodes.append(node("If", ["on"], ["z"], then_branch=inner, else_branch=inner))
    graph = helper.make_graph(
        nodes, "main", [value("x", 1, [1, 32]), value("on", 9, [])], [value("y", 1, [1, 8])], held
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _models(folder: Path) -> Iterator[bytes]:
    """Yield models of floats, and of codes in both layouts, each in one file but for one tensor."""
    for branch in (False, True):
        yield _model(branch=branch).SerializeToString()
    given = folder / "given"
    given.mkdir()
    (given / NUMBERS).write_bytes(_weight().tobytes())
    onnx.save(_model(branch=False), given / "model.onnx")
    quantized = [("onnx", text) for text in ("int4:g16", "uint4:g16:asym", "int8:channel", "int8:tensor")]
    for at, (layout, text) in enumerate([*quantized, ("onnx-matmulnbits", "uint4:g16:asym")]):
        out = folder / f"out{at}"
        run(make_plan(open_source(given), text, codec=get_codec(layout)), out)
        yield onnx.load(out / "model.onnx").SerializeToString()


def _compare(source: Source, content: bytes) -> None:
    """Raise AssertionError where what is read of a tensor is none that onnx finds."""
    found = [_data(tensor) for tensor in _tensors(onnx.ModelProto.FromString(content).graph)]
    for entry in source.entries.values():
        raw = entry.file.read_bytes()[entry.begin :][: entry.nbytes]  # type: ignore[union-attr]
        assert any(raw in each for each in found), entry.name


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _data(tensor: Any) -> bytes:
    """Return bytes in which the numbers of a tensor lie."""
    return _weight().tobytes() if tensor.data_location else bytes(tensor.SerializeToString())


CONTAINER_TARGETS = (gguf_target, imatrix_target, onnx_target)
