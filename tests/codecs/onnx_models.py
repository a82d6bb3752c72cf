"""Small ONNX models with weights in every place where they are quantized."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from zeropoint.checkpoint.read.decoding import read_rows
from zeropoint.checkpoint.read.quantized_layers import find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.storage import open_file
from zeropoint.codecs.containers.onnx_graph import initializers, lifted

IDS = np.array([1, 5, 7, 99])
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "fc1": (64, 96), "fc2.weight": (128, 96), "fc2.bias": (128,), "flat": (64, 128),
    "conv.weight": (32, 64, 1, 1), "kernel.weight": (8, 32, 3, 3), "table": (100, 64),
}  # fmt: skip
LAYERS = ("fc1", "fc2", "flat", "conv")


def values(shape: Sequence[int], seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.1).astype(np.float32)


def model(*, dtype: type = np.float32, opset: int = 21, scale: int = 1) -> Any:
    """Gather, MatMul, Gemm, MatMul of a Transpose, Conv of one pixel and of nine."""
    info = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    held = [
        numpy_helper.from_array(values(shape, n).astype(dtype), name)
        for n, (name, shape) in enumerate(WEIGHTS.items())
    ]
    held += [
        numpy_helper.from_array(np.array([-1, 96]), "rows"),
        numpy_helper.from_array(np.array([1, 64, 2, 2]), "pixels"),
    ]
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("MatMul", ["e", "fc1"], ["a"], name="first"),
        node("Reshape", ["a", "rows"], ["b"]),
        node("Gemm", ["b", "fc2.weight", "fc2.bias"], ["c"], transB=1, name="second"),
        node("Relu", ["c"], ["d"]),
        node("Transpose", ["flat"], ["wide"], perm=[1, 0]),
        node("MatMul", ["d", "wide"], ["f"], name="third"),
        node("Reshape", ["f", "pixels"], ["g"]),
        node("Conv", ["g", "conv.weight"], ["h"]),
        node("Conv", ["h", "kernel.weight"], ["out"], pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes, "main", [helper.make_tensor_value_info("ids", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("out", info, [1, 8, 2, 2])], held,
    )  # fmt: skip
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 19 else 10
    )
    onnx.checker.check_model(made)
    return made


def save(proto: Any, folder: Path, *, external: bool = False) -> Path:
    """Write a model as model.onnx, its numbers in it or next to it."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(
        proto,
        path,
        save_as_external_data=external,
        location="numbers.bin" if external else None,
        size_threshold=128,
    )
    return path


def decoded(out: Path) -> dict[str, torch.Tensor]:
    """The values of all quantized weights of a result, as we decode them."""
    stored = find_layers(open_source(out))
    assert not stored.problems
    found = {}
    for layer in stored.layers:
        files = {entry.file: open_file(entry.file) for entry in layer.tensors.values()}
        found[layer.module] = read_rows(layer, files, 0, layer.shape[0]).dequantize()
        for file in files.values():
            file.close()
    return found


def with_values(path: Path, weights: Mapping[str, torch.Tensor]) -> Any:
    """A float model with other values of its weights."""
    proto = onnx.load(path)
    lifted(proto, lambda tensor: tensor.ByteSize() > 160)
    changed = 0
    for each in initializers(proto)[0]:
        value = weights.get(each.name.removesuffix(".weight"))
        if value is not None and each.use.reason is None:
            array = (value.t() if each.use.transposed else value).contiguous().view(each.dims).numpy()
            each.tensor.CopyFrom(numpy_helper.from_array(array, each.tensor.name))
            changed += 1
    assert changed == len(weights)
    return proto


def ran(source: Any, feeds: Mapping[str, Any] | None = None) -> list[Any]:
    """What onnxruntime computes, in floats: by default, it would quantize the inputs of 4-bit weights."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    given = str(source) if isinstance(source, Path) else source.SerializeToString()
    session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"ids": IDS} if feeds is None else dict(feeds)))
