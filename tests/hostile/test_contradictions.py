"""Configurations that say something else than the tensors next to them, of which each is right alone.

``inspect`` and ``verify`` must both say it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hostile.case import Case
from tests.hostile.eight_bit_layouts import wrapped
from tests.hostile.gguf_files import NAME, ROWS, file, row, value
from tests.hostile.layout import Layout
from tests.hostile.layouts import LAYOUTS
from tests.hostile.quantized import CONFIG, WEIGHTS

from zeropoint.checkpoint.verify.inspection import inspect_checkpoint
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError

ALL: Mapping[str, Layout] = {**LAYOUTS, "compressed-tensors": Layout(section=CONFIG, tensors=WEIGHTS)}
_INTX = {"mapping_type": wrapped("MappingType", "SYMMETRIC")}
_KEPT = "it is quantized, but the configuration leaves it out, so loaders would not find it"


def _torchao(kind: str, **data: object) -> dict[str, Any]:
    return {"quant_type": {"default": wrapped(kind, {**_INTX, **data})}}


def _of(name: str, **more: object) -> dict[str, Any]:
    """Return the configuration of a layout with an entry of Quark changed."""
    found = LAYOUTS[name].section["global_quant_config"]
    return {"global_quant_config": {**found, **more}}


_INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
# A layout, what its configuration says, and words of the problem.
CLAIMS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("bitsandbytes", {"load_in_8bit": True}, "are of the 4-bit layout of bitsandbytes, but"),
    ("bitsandbytes", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type of the configuration is 'fp4'"),
    ("bitsandbytes", {"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant of the configuration"),
    ("bitsandbytes", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage of the configuration"),
    ("bitsandbytes", {"llm_int8_skip_modules": ["a"]}, _KEPT),
    ("llm-int8", {"load_in_8bit": False, "load_in_4bit": True}, "of the 8-bit layout of bitsandbytes, but"),
    ("llm-int8", {"load_in_4bit": True}, "load_in_4bit of the configuration is true, too, but its codes"),
    ("llm-int8", {"llm_int8_skip_modules": ["a"]}, _KEPT),
    ("torchao", _torchao("Float8WeightOnlyConfig"), "has 'Float8WeightOnlyConfig', but its tensors are"),
    ("torchao", _torchao("Int8WeightOnlyConfig"), "has 'Int8WeightOnlyConfig', but its tensors are"),
    (
        "torchao",
        _torchao("IntxWeightOnlyConfig", weight_dtype=wrapped("torch.dtype", "int8")),
        "weight_dtype of the configuration is 'int8', but its codes have 4 bits",
    ),
    (
        "torchao",
        _torchao("IntxWeightOnlyConfig", granularity=wrapped("PerGroup", {"group_size": 64})),
        "group_size of the configuration is 64, but its scales are of 32 inputs",
    ),
    ("torchao", {"modules_to_not_convert": ["a"]}, _KEPT),
    ("gptq", {"lm_head": True}, "'lm_head': the configuration says that it is quantized, but it is not"),
    ("gptq", {"bits": 8}, "g_idx is I32 of shape [64], but must be"),
    ("gptq", {"group_size": 64}, "but there are 0 to 0"),
    ("gptq", {"dynamic": {"-:a": {}}}, "it is quantized, but dynamic leaves it out"),
    ("awq", {"group_size": 16}, "qzeros is I32 of shape [2, 4], but must be"),
    ("awq", {"modules_to_not_convert": ["a"]}, _KEPT),
    ("modelopt", {"quant_algo": "FP8"}, "weight is U8 of shape [32, 32], but must be F8_E4M3"),
    ("modelopt", {"group_size": 32}, "group_size is 32, but W4A16_NVFP4 has 16"),
    ("modelopt", {"quant_algo": "NVFP4"}, "its inputs have a fixed scale in the configuration, but"),
    ("modelopt", {"ignore": ["a"]}, "it is quantized, but the configuration ignores it"),
    ("fp8-block", {"weight_block_size": [8, 8]}, "its factors have shape [2, 2], but must have [4, 4]"),
    ("fp8-block", {"modules_to_not_convert": ["a"]}, _KEPT),
    ("fp8-block", {"ignored_layers": ["a"]}, _KEPT),
    ("gpt-oss", {"modules_to_not_convert": ["m.experts"]}, _KEPT),
    ("quark", _of("quark", weight=_INT8), "weight is F8_E4M3 of shape [32, 32], but must be I8"),
    ("quark", {"exclude": ["a"]}, "it is quantized, but exclude names it"),
    ("quark",
     _of("quark", input_tensors={"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}),
     "its inputs have a fixed scale in the configuration, but input_scale is missing"),
    ("compressed-tensors", {"ignore": ["a"]}, "it is quantized, but the configuration ignores it"),
)  # fmt: skip


def problems(folder: Path, content: Mapping[str, bytes]) -> tuple[str, str]:
    """Return what inspect and verify say of a checkpoint."""
    path = Case(topic="quantized", name="contradiction", content=content, refusal=None).write(folder)
    try:
        verified = "; ".join(map(str, verify(path).problems))
    except CheckpointError as error:
        verified = str(error)
    return "; ".join(map(str, inspect_checkpoint(path).problems)), verified


@pytest.mark.parametrize(("name", "section", "said"), CLAIMS)
def test_what_a_configuration_says_and_tensors_are_not_is_a_problem(
    name: str, section: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    layout = ALL[name]
    inspected, verified = problems(tmp_path, layout.files(config=layout.config(**section)))
    assert said in inspected
    assert said in verified


@pytest.mark.parametrize("name", ALL)
def test_a_configuration_over_weights_of_floats_is_a_problem(name: str, tmp_path: Path) -> None:
    inspected, verified = problems(tmp_path, ALL[name].files(tensors={"a.weight": torch.ones(32, 32)}))
    assert "it says that weights are quantized in" in inspected
    assert "it says that weights are quantized in" in verified


@pytest.mark.crossed
@pytest.mark.parametrize("other", ALL)
@pytest.mark.parametrize("name", ALL)
def test_a_configuration_over_the_tensors_of_another_tool_is_a_problem(
    name: str, other: str, tmp_path: Path
) -> None:
    layout = ALL[name]
    more = {f"model.b.{key}": tensor.clone() for key, tensor in ALL[other].tensors.items()}
    inspected, verified = problems(tmp_path, layout.files(tensors={**layout.tensors, **more}))
    if name == other != "torchao":  # whose metadata does not describe the second layer
        assert (inspected, verified) == ("", "")
    else:
        assert "model.b." in inspected
        assert "model.b." in verified


@pytest.mark.parametrize(("factor", "rounded"), [(0.5, False), (3.0, True), (1e-40, True)])
def test_factors_that_are_no_powers_of_two_under_ue8m0_are_a_problem(
    factor: float, rounded: bool, tmp_path: Path
) -> None:
    layout = LAYOUTS["fp8-block"]
    tensors = {**layout.tensors, "a.weight_scale_inv": torch.tensor([[1.0, 2.0], [4.0, factor]])}
    for name, section in (("said", {"scale_fmt": "ue8m0"}), ("unsaid", {})):
        files = layout.files(config=layout.config(**section), tensors=tensors)
        (tmp_path / name).mkdir()
        for found in problems(tmp_path / name, files):
            assert ("some of its factors are no powers of two" in found) == (rounded and name == "said")


def test_a_quantized_head_that_the_configuration_of_gptq_promises_is_no_problem(tmp_path: Path) -> None:
    layout = LAYOUTS["gptq"]
    head = {name.replace("a.", "lm_head."): tensor.clone() for name, tensor in layout.tensors.items()}
    files = layout.files(config=layout.config(lm_head=True), tensors={**layout.tensors, **head})
    assert problems(tmp_path, files) == ("", "")


@pytest.mark.parametrize(("number", "wrong"), [(7, ""), (2, "Q4_0"), (15, "Q4_K"), (0, ""), (1024, "")])
def test_a_type_of_a_gguf_file_that_no_tensor_has_is_a_problem(
    number: int, wrong: str, tmp_path: Path
) -> None:
    said = value("general.file_type", 4, number.to_bytes(4, "little"))
    rows = (row("a", (3, 1), 0, 0), ROWS[1])
    for found in problems(tmp_path, {"model.gguf": file(values=(NAME, said), rows=rows)}):
        words = f"general.file_type is {number}, which is a file of {wrong}, but no tensor" if wrong else ""
        assert words in found
        assert bool(found) == bool(wrong)
