"""What a new codec need not say: the defaults of the protocol, and what several codecs share."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from zeropoint.codecs.engines import (
    ENGINES,
    ONNXRUNTIME,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Facts,
    Loads,
    always,
    no_safetensors,
    rules,
)
from zeropoint.codecs.protocol import Codec, Contents, LayerScheme, Module
from zeropoint.codecs.records import Known, record_of
from zeropoint.codecs.tensor_fields import COLUMNS, ROWS, TensorSpec
from zeropoint.errors import CheckpointError, UnsupportedError
from zeropoint.schemes import Scheme

vllm = always(Loads.PARTLY, "a reason")


@dataclass(frozen=True)
class Short(Codec):
    name = "short"
    title = "the short layout"
    presets = MappingProxyType({})
    engines = rules(vllm=vllm)
    methods = ("short",)
    parts = MappingProxyType({"codes": True, "scales": False})

    def layout(self, layer: LayerScheme) -> str:  # noqa: ARG002
        return "short"

    def tensors(
        self,
        layer: LayerScheme,
        shape: tuple[int, ...],
        dtype: torch.dtype,  # noqa: ARG002
    ) -> tuple[TensorSpec, ...]:
        grid = layer.weight.granularity.grid(shape)
        codes = TensorSpec(suffix="codes", dtype="I8", shape=shape)
        return codes, TensorSpec(suffix="scales", dtype="F32", shape=grid)


class Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


CODEC = Short()


def layer(text: str) -> LayerScheme:
    return LayerScheme(codec=CODEC, name=text, weight=Scheme.parse(text))


@pytest.mark.parametrize(
    ("text", "shape", "why"),
    [
        ("int8:g32", (8, 64), None),
        ("int8:block32x32", (40, 40), None),
        ("int8:channel", (8, 5), None),
        ("int8:g32", (8, 40), "last axis 40 is not a multiple of the group, 32"),
        ("int8:g32", (2, 8, 64), "has 3 axes, and the layout stores matrices"),
        ("int8:g32", (0, 64), "is empty"),
    ],
)
def test_matrices_of_whole_groups_are_held(text: str, shape: tuple[int, ...], why: str | None) -> None:
    assert CODEC.refusal(layer(text), shape) == why


def test_parts_are_whole_blocks() -> None:
    block, group, channel = layer("int8:block64x32"), layer("int8:g32"), layer("int8:channel")
    assert [CODEC.alignment(one, (128, 128)) for one in (block, group, channel)] == [64, 1, 1]
    assert [CODEC.multiples(block, axis) for axis in (ROWS, COLUMNS)] == [
        [(64, "the block")], [(32, "the block")]
    ]  # fmt: skip
    assert [CODEC.multiples(one, COLUMNS) for one in (group, channel)] == [
        [(32, "the group")], [(1, "the group")]
    ]  # fmt: skip


def test_a_part_has_the_name_of_its_module_before_the_last_dot() -> None:
    assert CODEC.part_of("a.b.codes", "I8") == ("a.b", "codes", True)
    assert CODEC.part_of("a.b.scales", "F32") == ("a.b", "scales", False)
    assert (CODEC.part_of("codes", "I8"), CODEC.part_of("a.weight", "I8")) == (None, None)


def test_each_engine_has_a_rule_and_sglang_follows_vllm() -> None:
    assert tuple(CODEC.engines) == ENGINES
    assert CODEC.engines[SGLANG] is CODEC.engines[VLLM]
    assert CODEC.engines[ONNXRUNTIME] is no_safetensors
    facts = Facts(family={}, layers=())
    assert [loads for loads, _ in CODEC.engines[TRANSFORMERS](facts)] == [Loads.UNCHECKED]
    assert list(CODEC.engines[VLLM](facts)) == list(vllm(facts))


def test_models_in_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="models in memory are not written in the short layout"):
        CODEC.describe({}, ())


def contents(*layers: LayerScheme | None) -> Contents:
    def modules() -> Iterator[Module]:
        return (Module(str(n), one) for n, one in enumerate(layers))

    return Contents(modules=modules, kept=(), nonlinear=(), family={}, previous={}, tensors=())


def test_documents_that_name_one_scheme_refuse_two() -> None:
    one, other = layer("int8:g32"), layer("int4:g32")
    assert contents(one, None, one).only_layer("it") == one
    with pytest.raises(CheckpointError, match=r"it has one scheme in .* int8:g32, int4:g32; give"):
        contents(one, other).only_layer("it")


GOOD = {"codes": Entry("a.codes", "I8", (8, 64)), "scales": Entry("a.scales", "F32", (8, 2))}


def test_tensors_as_the_codec_writes_them_are_a_record() -> None:
    found = record_of(layer("int8:g32"), "a", GOOD, Known((8, 64), torch.float32))
    assert (found.module, found.parts, found.shape) == ("a", ("codes", "scales"), (8, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "scales is missing, which short needs"),
        ({"scales": Entry("s", "F16", (8, 2))}, r"scales is F16 of shape \[8, 2\], but must be F32 of"),
        ({"codes": Entry("c", "I8", (8, 32))}, r"codes is I8 of shape \[8, 32\], but must be I8 of"),
        ({"more": Entry("m", "I8", (1,))}, "more has no place in short"),
    ],
)
def test_other_tensors_are_refused(change: dict[str, Entry | None], message: str) -> None:
    tensors = {name: entry for name, entry in {**GOOD, **change}.items() if entry is not None}
    with pytest.raises(CheckpointError, match=message):
        record_of(layer("int8:g32"), "a", tensors, Known((8, 64), torch.float32))


def test_what_is_optional_may_be_missing() -> None:
    tensors = {"codes": GOOD["codes"]}
    found = record_of(layer("int8:g32"), "a", tensors, Known((8, 64), torch.float32), ("scales",))
    assert found.parts == ("codes",)
