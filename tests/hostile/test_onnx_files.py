"""ONNX files that are damaged, lie, or lead elsewhere: each gives one sentence, and nothing is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import zeropoint as zp
from zeropoint.checkpoint.read.source import open_source
from zeropoint.errors import ZeropointError

from ..codecs.onnx_models import model, save

NAME = "fc2.weight"


def tensor(proto: Any, name: str = NAME) -> Any:
    return next(each for each in proto.graph.initializer if each.name == name)


def says(key: str, value: str) -> Callable[[Any], None]:
    """Say something else of where a tensor's numbers lie."""

    def change(proto: Any) -> None:
        next(each for each in tensor(proto).external_data if each.key == key).value = value

    return change


def without(key: str) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        entries = tensor(proto).external_data
        entries.remove(next(each for each in entries if each.key == key))

    return change


def dims(*sides: int) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        tensor(proto).dims[:] = sides

    return change


def typed(kind: int) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        tensor(proto).data_type = kind

    return change


def twice(proto: Any) -> None:
    proto.graph.initializer.append(tensor(proto))


def two_offsets(proto: Any) -> None:
    tensor(proto).external_data.add(key="offset", value="0")


def both_places(proto: Any) -> None:
    tensor(proto).raw_data = bytes(4 * 128 * 96)


def neither_place(proto: Any) -> None:
    del tensor(proto).external_data[:]
    both_places(proto)


def of_another_type(proto: Any) -> None:
    del tensor(proto).external_data[:]
    tensor(proto).data_location = 0
    tensor(proto).double_data.extend([0.0] * (64 * 96))


def unfinished(proto: Any) -> None:
    del proto.graph.node[:]
    node = proto.graph.node.add(op_type="DequantizeLinear")
    node.input.extend([NAME, NAME])


def of_old_operators(proto: Any) -> None:
    proto.opset_import[0].version = 3


def product_without_output(proto: Any) -> None:
    """Make onnx infer shapes, for a newer set of operators, of a product that has no place to go."""
    proto.opset_import[0].version = 17
    proto.graph.node.append(helper.make_node("MatMul", ["e", "fc1"], []))


def missing_output(proto: Any) -> None:
    """Let no node give what the graph gives: translating such a model, onnx 1.22 ends the process."""
    proto.opset_import[0].version = 17
    proto.graph.node[-1].output[0] = "elsewhere"


def unnamed(proto: Any) -> None:
    tensor(proto).name = ""


def without_graph(proto: Any) -> None:
    proto.ClearField("graph")


def without_nodes(proto: Any) -> None:
    del proto.graph.node[:]


def sparse(proto: Any) -> None:
    held = TensorProto(name="s", dims=[4], data_type=1, data_location=1)
    proto.graph.sparse_initializer.add().values.CopyFrom(held)


def nested(proto: Any) -> None:
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], [])
    for _ in range(20):
        graph = helper.make_graph([helper.make_node("If", ["x"], ["y"], then_branch=graph)], "g", [], [])
    proto.graph.node.append(helper.make_node("If", ["ids"], ["z"], then_branch=graph))


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "offset behind the end": (says("offset", "9999999"), "ends at byte 10049151"),
    "offset above 63 bits": (says("offset", str(2**63)), "ends at byte"),
    "offset of many digits": (says("offset", "9" * 5000), "must be a number of bytes"),
    "negative offset": (says("offset", "-1"), "must be a number of bytes"),
    "offset that is no number": (says("offset", "1e3"), "must be a number of bytes"),
    "offset in other digits": (says("offset", "١٢"), "must be a number of bytes"),
    "two offsets": (two_offsets, "says its 'offset' twice"),
    "length too small": (says("length", "4"), "has 4 bytes, but F32 of shape [128, 96] takes 49152"),
    "length too large": (says("length", "99999999999"), "has 99999999999 bytes, but F32"),
    "length that is no number": (says("length", "all"), "must be a number of bytes"),
    "parent folder": (says("location", "../numbers.bin"), "must lie in the same directory"),
    "folder below": (says("location", "a/numbers.bin"), "must lie in the same directory"),
    "absolute path": (says("location", "/etc/passwd"), "must lie in the same directory"),
    "path of another system": (says("location", "..\\numbers.bin"), "must lie in the same directory"),
    "dots": (says("location", ".."), "must lie in the same directory"),
    "name with a null byte": (says("location", "a\0b"), "must lie in the same directory"),
    "the model itself": (says("location", "model.onnx"), "must lie in the same directory"),
    "a journal of ours": (says("location", ".zeropoint.journal"), "must lie in the same directory"),
    "a name too long": (says("location", "n" * 300), "must lie in the same directory"),
    "missing file": (says("location", "gone.bin"), "No such file"),
    "no location": (says("location", ""), "does not say in which"),
    "no location at all": (without("location"), "does not say in which"),
    "huge extents": (dims(2**62, 2**62), "overflows 63 bits"),
    "a huge extent": (dims(2**40, 96), "has 49152 bytes, but F32"),
    "negative extent": (dims(-128, 96), "must be an unsigned integer"),
    "many axes": (dims(*[1] * 70), "above the limit of 64"),
    "another dtype": (typed(TensorProto.DOUBLE), "has 49152 bytes, but F64"),
    "unknown dtype": (typed(77), "has the type 77"),
    "text": (typed(TensorProto.STRING), "has the type 8"),
    "a name twice": (twice, "two tensors of the name"),
    "no name": (unnamed, "two tensors of the name"),
    "numbers in two places": (both_places, "in two places"),
    "numbers here that are said to be elsewhere": (neither_place, "in two places"),
    "numbers of another type": (of_another_type, "type 1 has double_data, which is for other"),
    "a node without outputs": (unfinished, "nothing would be quantized"),
    "operators of 2016": (of_old_operators, "the model has operator set 3, and 7 or newer are translated"),
    "a product without an output": (product_without_output, "cannot translate the model from operator set"),
    "an output that no node gives": (missing_output, "Graph output 'out' is not an output of any node"),
    "no graph": (without_graph, "it has no graph"),
    "no nodes": (without_nodes, "it has no graph with nodes"),
    "sparse numbers elsewhere": (sparse, "sparse tensor"),
    "nested graphs": (nested, "nested deeper"),
}  # fmt: skip


def refusal(path: Path) -> str:
    """Return the sentence of the error; nothing may be written or changed."""

    def files() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in path.parent.iterdir() if each.is_file()}

    before, out = files(), path.parent.parent / "out"
    with pytest.raises(ZeropointError) as caught:
        zp.quantize_checkpoint(path, out, "int4:g32", format="onnx")
    assert before == files()
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    path = save(model(), tmp_path_factory.mktemp("honest"), external=True)
    return path.read_bytes(), (path.parent / "numbers.bin").read_bytes()


def written(folder: Path, head: bytes, numbers: bytes) -> Path:
    folder.mkdir()
    (folder / "numbers.bin").write_bytes(numbers)
    (folder / "model.onnx").write_bytes(head)
    return folder / "model.onnx"


@pytest.mark.parametrize("kind", LIES)
def test_a_model_that_lies_gives_one_sentence(kind: str, honest: tuple[bytes, bytes], tmp_path: Path) -> None:
    change, said = LIES[kind]
    proto = onnx.ModelProto.FromString(honest[0])
    change(proto)
    assert said in refusal(written(tmp_path / "in", proto.SerializeToString(), honest[1]))


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "it is empty"),
    "cut": (lambda head: head[:-100], "truncated"),
    "cut in a number": (lambda head: head + b"\x3a\xff", "truncated"),
    "a number of 80 bits": (lambda head: head + b"\x08" + b"\xff" * 11, "more than 64 bits"),
    "a group": (lambda head: head + b"\x0b", "begins no field"),
    "a name that is no text": (lambda head: head.replace(b"fc1", b"fc\xff"), "is not UTF-8"),
    "field 0": (lambda head: head + b"\x02\x00", "truncated or damaged"),
    "a length of 2 ** 63": (lambda head: head + b"\x3a" + b"\xff" * 9 + b"\x01", "truncated"),
    "text": (lambda _: b"<html>not found</html>", "cannot be read"),
    "a pickle": (lambda _: b"\x80\x02}q\x00.", "cannot be read"),
    "a Git LFS pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "cannot be read"),
}


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_that_are_no_model_give_one_sentence(
    kind: str, honest: tuple[bytes, bytes], tmp_path: Path
) -> None:
    change, said = BYTES[kind]
    assert said in refusal(written(tmp_path / "in", change(honest[0]), honest[1]))


def test_numbers_that_end_too_early_are_named(honest: tuple[bytes, bytes], tmp_path: Path) -> None:
    path = written(tmp_path / "in", honest[0], honest[1][:-1])
    assert "it is truncated, or belongs to another model" in refusal(path)


def test_a_link_that_leads_out_of_the_directory_is_not_followed(
    honest: tuple[bytes, bytes], tmp_path: Path
) -> None:
    path = written(tmp_path / "in", *honest)
    (tmp_path / "secret").write_bytes(honest[1])
    (path.parent / "numbers.bin").unlink()
    (path.parent / "numbers.bin").symlink_to(tmp_path / "secret")
    assert "outside of the checkpoint's directory" in refusal(path)


def test_a_pipe_in_the_place_of_numbers_is_not_waited_for(
    honest: tuple[bytes, bytes], tmp_path: Path
) -> None:
    path = written(tmp_path / "in", *honest)
    (path.parent / "numbers.bin").unlink()
    os.mkfifo(path.parent / "numbers.bin")
    with pytest.raises(ZeropointError, match=r"numbers\.bin"):
        open_source(path)


@pytest.mark.parametrize("at", range(0, 1000, 37))
def test_no_cut_of_a_model_is_read(at: int, honest: tuple[bytes, bytes], tmp_path: Path) -> None:
    with pytest.raises(ZeropointError):
        open_source(written(tmp_path / "in", honest[0][:at], honest[1]))
