"""What the table of architectures says is what transformers does, and our names are those that it gives."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures.trial import COLUMNS, Trial, planned, problem_of, quiet, save, tried
from tests.architectures.zoo import DTYPES, HIDDEN, INNER, SIDE, VOCABULARY, ZOO, Animal
from tests.checkpoint.written import ONE, tensors_of, weight
from tests.checkpoint.written import save as written
from tests.peers import Peer, transformers

import zeropoint as zp
from zeropoint.architectures import SPLIT_EXPERTS
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import TRANSFORMERS, refusal
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.compressed_tensors.tested import SEVERAL, rows
from zeropoint.loaded_names import loaded_names, loaded_parameters, mapping_rows, transformers_names

conversion_mapping = Peer("transformers.conversion_mapping")
core_model_loading = Peer("transformers.core_model_loading")
base = Peer("transformers.quantizers.base")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.rotating,
]  # transformers warns of its own deprecations

# A dense model, a mixture of experts, an encoder, one without attention, one of images.
QUICK = (
    ("Llama", "several"), ("Mixtral", "w8a8"), ("ModernBERT", "mxfp4a16"), ("Mamba", "w8a16"),
    ("ViT", "w8a8"),
)  # fmt: skip
BY_NAME = {animal.name: animal for animal in ZOO}
FAMILIES = [
    animal if animal.name in dict(QUICK) else pytest.param(animal, marks=pytest.mark.slow) for animal in ZOO
]


def saved(animal: Animal, folder: Path) -> Path:
    number = ZOO.index(animal)
    return save(animal, folder, DTYPES[number % len(DTYPES)], sharded=number % 2 == 1)


def trial(name: str, column: str, folder: Path) -> Trial:
    animal = BY_NAME[name]
    return tried(animal, saved(animal, folder / "in"), column, folder)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *QUICK,
        *(
            pytest.param(animal.name, column, marks=pytest.mark.slow)
            for animal in ZOO
            for column in COLUMNS
            if (animal.name, column) not in QUICK
        ),
    ],
)
def test_a_model_loads_and_computes_as_the_table_says(name: str, column: str, tmp_path: Path) -> None:
    found = trial(name, column, tmp_path)
    (row,) = (row for row in rows() if row["name"] == name)
    assert found.as_said, (found.problem, found.verdict)
    assert found.answer.partition(":")[0] == row["answers"][column].partition(":")[0], found.answer


def test_the_table_has_fifty_models_and_every_scheme() -> None:
    table = rows()
    assert [row["name"] for row in table] == [animal.name for animal in ZOO]
    assert len(table) == 50
    assert all(tuple(row["answers"]) == COLUMNS for row in table)
    assert transformers.__version__.startswith(f"{TRANSFORMERS}.")


def test_no_preset_fails_for_a_reason_that_is_not_stated() -> None:
    failed = [
        f"{row['name']}, {column}: {answer}"
        for row in rows()
        for column, answer in row["answers"].items()
        if not answer.startswith("yes") and ("Error" in answer or "keys" in answer)
    ]
    assert failed == []


def renamed_by_transformers(animal: Animal, names: list[str]) -> dict[str, str]:
    """Return the names that transformers gives the tensors of a file."""
    with quiet():
        model: Any = animal.build(torch.float32)
        mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in mapping if isinstance(t, core_model_loading.WeightRenaming)]
    return {name: core_model_loading.apply_renamings(name, renamings) for name in names}


@pytest.mark.parametrize("animal", FAMILIES, ids=lambda animal: animal.name)
def test_modules_are_known_by_the_names_that_transformers_gives_them(animal: Animal, tmp_path: Path) -> None:
    folder = saved(animal, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    names = [
        name for name, tensor in tensors_of(folder).items() if name.endswith(".weight") and tensor.dim() == 2
    ]
    expected = renamed_by_transformers(animal, names)
    found = {name: f"{transformers_names(name.removesuffix('.weight'), config)[-1]}.weight" for name in names}
    assert found == expected


def _seen(stem: str, head: str = "ForImageClassification", **more: Any) -> Animal:
    given: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 8, **more,
    }  # fmt: skip
    return Animal(
        name=stem, kind="vision", model=stem + head, inputs=BY_NAME["ViT"].inputs,
        config=lambda: getattr(transformers, f"{stem}Config")(**given),
        loader="AutoModelForImageClassification",
    )  # fmt: skip


DEIT = _seen("DeiT")
PHIMOE = Animal(
    name="PhiMoE", kind="text", model="PhimoeForCausalLM", inputs=BY_NAME["Llama"].inputs,
    config=lambda: transformers.PhimoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2,
        bos_token_id=1, eos_token_id=2,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("animal", "column", "ignore"),
    [(DEIT, "w8a8", ("*layer.0.*",)), (PHIMOE, "fp8_dynamic", ())],
    ids=["DeiT", "PhiMoE"],
)
def test_kept_layers_that_the_loader_renames_have_their_weights(
    animal: Animal, column: str, ignore: tuple[str, ...], tmp_path: Path
) -> None:
    source = save(animal, tmp_path / "in", torch.bfloat16)
    made = make_plan(open_source(source), column, selection=Selection(ignore=ignore), limits=ONE)
    run(made, tmp_path / "codes")
    assert problem_of(animal, tmp_path, column) is None


@pytest.mark.parametrize(
    "animal",
    [
        _seen("Beit"), _seen("IJepa", "Model"), _seen("ViTMSN", "Model"), DEIT, PHIMOE,
        _seen("AST", "ForAudioClassification", max_length=64, num_mel_bins=16, patch_size=4),
        _seen("Segformer", depths=[1, 1, 1, 1], hidden_sizes=[32, 32, 64, 128], num_encoder_blocks=4,
              num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=32),
        _seen("Detr", "ForObjectDetection", d_model=64, encoder_layers=1, decoder_layers=1,
              use_timm_backbone=False, backbone=None,
              backbone_config={"model_type": "resnet", "depths": [1], "hidden_sizes": [32],
                                              "embedding_size": 8, "out_features": ["stage1"]}),
    ],
    ids=lambda animal: animal.name,
)  # fmt: skip
def test_every_layer_of_a_file_has_a_name_that_the_model_has(animal: Animal, tmp_path: Path) -> None:
    model = animal.build(torch.float32)
    folder = save(animal, tmp_path, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    there = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    files = [name.removesuffix(".weight") for name, tensor in tensors_of(folder).items() if tensor.dim() == 2]
    assert any(module not in there for module in files)
    assert [
        module
        for module in files
        if there.isdisjoint(loaded_names(module, config))
        and there.isdisjoint(loaded_parameters(f"{module}.weight", config))
    ] == []


def test_names_are_those_of_the_file_where_transformers_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"model_type": "deit", "architectures": ["DeiTModel"]}
    name = "encoder.layer.0.output.dense"
    assert loaded_names(name, config) == (name, "layers.0.mlp.fc2")
    monkeypatch.setattr("zeropoint.loaded_names.is_installed", lambda: False)
    assert loaded_names(name, config) == (name,)


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "granitemoe", "mlcd"])
def test_names_of_a_model_without_parts_need_no_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, models = {"model_type": kind, "num_hidden_layers": 2}, list[Any]()
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(made)

    def built(_: Any) -> Any:
        models.append(model)
        return model

    monkeypatch.setattr("zeropoint.loaded_names._model", built)
    found, expected = mapping_rows(config), conversion_mapping.get_model_conversion_mapping(model)
    assert [(row.source_patterns, row.target_patterns) for row in found] == [
        (row.source_patterns, row.target_patterns) for row in expected
    ]
    assert len(models) == (kind == "mlcd")  # its class has another model_type


def test_experts_are_split_by_the_loader_in_the_families_that_are_listed() -> None:
    assert set(base.MODULES_TO_PATCH_FOR_QUANTIZATION) == {"Llama4TextExperts"}
    assert {"llama4", "llama4_text"} == SPLIT_EXPERTS


@pytest.mark.parametrize("name", ["Qwen2-MoE", "OPT"])
def test_a_model_is_loaded_without_its_head(name: str, tmp_path: Path) -> None:
    # The base model has other names: model.layers.0.mlp.shared_expert_gate is layers.0....
    animal = BY_NAME[name]
    run(planned(animal, saved(animal, tmp_path / "in"), "fp8_dynamic"), tmp_path / "codes")
    with quiet():
        _, info = transformers.AutoModel.from_pretrained(tmp_path / "codes", output_loading_info=True)
    assert info["missing_keys"] == set()


@pytest.mark.parametrize(
    ("name", "column"), [("LLaVA", SEVERAL), ("Mistral 3", "fp8_dynamic"), ("GPT-2", "w4a16")]
)
def test_names_that_the_loader_gives_are_no_problem_of_what_was_written(
    name: str, column: str, tmp_path: Path
) -> None:
    animal = BY_NAME[name]
    source = saved(animal, tmp_path / "in")
    made = planned(animal, source, column)
    run(made, tmp_path / "codes")
    written = json.loads(str(made.texts["config.json"]))["quantization_config"]
    targets = {target for group in written["config_groups"].values() for target in group["targets"]}
    if column == SEVERAL:
        assert {"multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"} <= targets
    assert verify(tmp_path / "codes", source, limits=ONE).problems == ()


@pytest.mark.parametrize(
    ("name", "included", "column"),
    [
        ("Llama", "*embed_tokens", "w8a16"),
        ("Gemma 3 (text)", "*embed_tokens", "mxfp4a16"),
        ("Mixtral", "*.gate", "w8a16"),
        ("Llama", "*embed_tokens", "w8a8"),
        ("Mixtral", "*.gate", "fp8_dynamic"),
    ],
)
def test_embeddings_and_routers_load_where_all_weights_are_decoded(
    name: str, included: str, column: str, tmp_path: Path
) -> None:
    animal = replace(BY_NAME[name], include=(included,))
    found = tried(animal, saved(BY_NAME[name], tmp_path / "in"), column, tmp_path)
    assert (found.problem is None) == (column not in ("w8a8", "fp8_dynamic")), found.problem
    assert found.as_said, (found.problem, found.verdict)
    assert found.refused == (found.problem is not None)


def test_what_loads_nowhere_is_refused_and_what_vllm_loads_is_not(tmp_path: Path) -> None:
    reasons = {}
    for name, column in (("GPT-2", "w8a8"), ("Mixtral", "w8a8"), ("Llama", "w8a8")):
        animal = BY_NAME[name]
        reasons[name] = refusal(planned(animal, saved(animal, tmp_path / name), column))
    assert reasons["Mixtral"] is reasons["Llama"] is None
    assert "of Conv1D" in str(reasons["GPT-2"])


SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip


@pytest.mark.parametrize(("family", "lost"), [("granitemoe", True), ("mixtral", False)])
def test_experts_that_are_decoded_one_by_one_say_where_transformers_does_not_load_them(
    family: str, lost: bool, tmp_path: Path
) -> None:
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    if family == "mixtral":
        expert = "model.layers.0.block_sparse_moe.experts.0.w3.weight"
    source = written(tmp_path / "in", {expert: weight(128, 128)}, {**SMALL, "model_type": family})
    zp.quantize_checkpoint(source, tmp_path / "out", "w8a16", force=True)
    notes = zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats").notes
    assert [f"transformers does not load '{expert}'" in note for note in notes if "experts" in note] == (
        [True] * lost
    )
