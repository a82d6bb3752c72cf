"""Every architecture of transformers: the recorded table, the plan, and what was mended for all of a kind."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures.shrunk import class_of, classes
from tests.architectures.sweep import FIELDS, SWEPT, row_of
from tests.checkpoint.written import ONE, weight
from tests.checkpoint.written import save as written

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import subject_of
from zeropoint.checkpoint.plan.tied import tied_heads
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.compressed_tensors import CODEC
from zeropoint.codecs.compressed_tensors.tested import (
    ASKED,
    ASKED_LATE,
    NO_LINEAR,
    SWEPT_COLUMNS,
    TEXT_ALONE,
    swept,
)
from zeropoint.codecs.engines import TRANSFORMERS, Facts, Loads
from zeropoint.codecs.gptq import CODEC as GPTQ
from zeropoint.codecs.layer_schemes import layer_scheme

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations

TABLE = {row["model_type"]: row for row in swept()}
TRIED = [row for row in TABLE.values() if row["compared"].startswith(("outputs", "weights"))]


def word(answer: str) -> str:
    """Return the word of an answer, without its reason: what no engine is known to load is refused."""
    return answer.partition(":")[0].replace("refused", "no")


def works(answer: str) -> bool:
    """Return whether an answer says that something was written and read."""
    return word(answer) in ("yes", "partly")


def test_every_architecture_has_a_row_and_none_is_wrong_in_silence() -> None:
    assert list(TABLE) == list(classes())
    assert all(tuple(row) == FIELDS for row in TABLE.values())
    assert [row["model_type"] for row in TRIED if "wrong" in {word(row[column]) for column in SWEPT}] == []
    assert [row["model_type"] for row in TRIED if any("Error: " in row[column] for column in SWEPT)] == []


@pytest.mark.parametrize("column", SWEPT)
def test_most_that_could_be_made_small_work(column: str) -> None:
    """GPTQ files of some architectures are read by no release of transformers, whatever wrote them."""
    never = (TEXT_ALONE, ASKED, ASKED_LATE) if column == "gptq" else ()
    answered = [
        row
        for row in TRIED
        if word(row[column]) != "nothing written" and not any(mark in row[column] for mark in never)
    ]
    assert len(answered) > (350 if column == "gptq" else 500)
    assert sum(works(row[column]) for row in answered) >= 0.95 * len(answered)


def facts(row: Mapping[str, str], column: str) -> Facts:
    """Return what an engine looks at in a plan that has nothing unusual."""
    layer = layer_scheme(column, CODEC)
    return Facts(
        family={"model_type": row["model_type"], "architectures": [row["class"]]},
        layers=(layer,),
        section={} if layer.input else {"dequantize": True},
        wider=True,
    )


@pytest.mark.parametrize("column", SWEPT_COLUMNS)
def test_the_plan_says_what_happened(column: str) -> None:
    said = {
        row["model_type"]: not list(CODEC.engines[TRANSFORMERS](facts(row, column)))
        for row in TRIED
        if word(row[column]) != "nothing written"
    }
    assert said == {kind: works(TABLE[kind][column]) for kind in said}


def test_the_plan_says_of_gptq_what_follows_from_the_architecture() -> None:
    def refused(row: Mapping[str, str]) -> bool:
        layer = layer_scheme("w4a16", GPTQ)
        plain = replace(facts(row, "w4a16"), layers=(layer,), section={})
        return Loads.NO in {loads for loads, _ in GPTQ.engines[TRANSFORMERS](plain)}

    wanted = {
        row["model_type"]: any(mark in row["gptq"] for mark in (TEXT_ALONE, NO_LINEAR, ASKED_LATE))
        for row in TRIED
    }
    assert {row["model_type"]: refused(row) for row in TRIED} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TABLE)
def test_an_architecture_does_what_its_row_says(model_type: str, tmp_path: Path) -> None:
    # Reasons why a model is not built or not run name places and packages of a machine.
    found, recorded = (
        row | {"compared": word(row["compared"])} for row in (row_of(model_type, tmp_path), TABLE[model_type])
    )
    assert found == recorded


@pytest.mark.parametrize(
    ("model_type", "name", "kind"),
    [
        ("ctrl", "transformer.w.weight", "Embedding"),
        ("cohere_asr", "log_softmax.mlp.layer0.weight", "Head"),
        ("llama", "model.projection.weight", "Linear"),
    ],
)
def test_matrices_outside_of_blocks_are_what_transformers_makes_of_them(
    model_type: str, name: str, kind: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "architectures": [class_of(model_type)]}
    source = open_source(written(tmp_path, {name: weight(96, 64)}, config))
    assert subject_of(source.entries[name], source.entries, config).type == kind


FROZEN = ("weight", "bias", "running_mean", "running_var")


@pytest.mark.parametrize(("more", "decoded"), [((), False), (("num_batches_tracked",), True)])
def test_models_with_frozen_batch_norms_are_decoded_at_the_first_forward(
    more: tuple[str, ...], decoded: bool, tmp_path: Path
) -> None:
    norm = {f"backbone.norm.{name}": torch.ones(64) for name in (*FROZEN, *more)}
    source = written(tmp_path, {"layers.0.fc1.weight": weight(64, 128)} | norm, {"model_type": "detr"})
    plan = make_plan(open_source(source), "w4a16", limits=ONE)
    section = json.loads(str(plan.texts["config.json"]))["quantization_config"]
    assert section.get("dequantize", False) is decoded


@pytest.mark.parametrize(
    ("scheme", "decoded", "reason"),
    [("w4a16", True, "it makes other layers of"), ("mxfp4a16", False, "pass dtype=torch.bfloat16")],
)
def test_layers_that_transformers_cuts_are_read_where_no_shape_lies_next_to_their_codes(
    scheme: str, decoded: bool, reason: str, tmp_path: Path
) -> None:
    name = "language_model.model.layers.0.block_sparse_moe.shared_experts.gate_proj.weight"
    config = {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    plan = make_plan(open_source(written(tmp_path, {name: weight(384, 128)}, config)), scheme, limits=ONE)
    section = json.loads(str(plan.texts["config.json"]))["quantization_config"]
    (found,) = (v for v in verdicts(plan) if v.engine == TRANSFORMERS)
    assert (section.get("dequantize", False), reason in found.reason) == (decoded, True)


def test_projections_in_one_tensor_are_ignored_as_the_layers_that_loaders_make_of_them(
    tmp_path: Path,
) -> None:
    attention = {"decoder.layers.0.self_attn.in_proj_weight": weight(96, 32), "other.weight": weight(32, 32)}
    config = {"model_type": "rf_detr", "architectures": ["RfDetrModel"]}
    plan = make_plan(open_source(written(tmp_path, attention, config)), "fp8_dynamic", limits=ONE)
    ignored = json.loads(str(plan.texts["config.json"]))["quantization_config"]["ignore"]
    assert "decoder.layers.0.self_attn.q_proj" in ignored


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def test_heads_of_models_that_join_others_are_known_though_no_file_has_them(tmp_path: Path) -> None:
    part: dict[str, Any] = {"model_type": "bert", "intermediate_size": 32, **SMALL}
    decoder = {**part, "is_decoder": True, "add_cross_attention": True}
    config = {
        "model_type": "encoder-decoder", "architectures": ["EncoderDecoderModel"],
        "encoder": part, "decoder": decoder,
    }  # fmt: skip
    source = written(tmp_path, {"decoder.layer.weight": weight(32, 32)}, config)
    assert tied_heads(open_source(source)) == ["decoder.cls.predictions.decoder"]


def test_experts_that_transformers_only_renames_are_not_read_one_by_one(tmp_path: Path) -> None:
    text = {"model_type": "aria_text", "moe_num_experts": 2, "intermediate_size": 64, **SMALL}
    config = {"model_type": "aria", "architectures": ["AriaForConditionalGeneration"], "text_config": text}
    experts = {
        "language_model.model.layers.0.mlp.experts.fc1.weight": weight(2, 32, 128),
        "language_model.model.layers.0.mlp.experts.fc2.weight": weight(2, 64, 32),
    }
    plan = make_plan(open_source(written(tmp_path, experts, config)), "int4:g32", limits=ONE)
    (found,) = (v for v in verdicts(plan) if v.engine == TRANSFORMERS)
    assert found.loads is Loads.NO
    assert "here they are single matrices" in found.reason
