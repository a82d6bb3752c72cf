"""What ``verify`` compares with a source besides tensors, and whether it is the original at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint import manifests, mixture
from tests.checkpoint.written import CONFIG, LINEAR, quantize, save, weight

from zeropoint import loaded_names
from zeropoint.checkpoint.plan.float_view import as_floats
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.errors import CheckpointError, UnsupportedError, ZeropointError

MODEL = CONFIG | {"eos_token_id": 2}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(tmp_path / "in", {LINEAR: weight(64, 128), "model.norm.weight": torch.ones(64)}, MODEL)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    quantize(source, tmp_path / "out", "w4a16")
    return tmp_path / "out"


@pytest.mark.parametrize("with_experts", [False, True])
def test_names_that_the_original_has_are_not_asked_of_transformers(
    with_experts: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modules, and a model of it with experts, take half of the least memory of a process."""

    def asked(config: Any) -> None:
        raise AssertionError(config)

    source = mixture.write(tmp_path / "experts", experts=2, layers=1) if with_experts else source
    quantize(source, tmp_path / "quantized", "nvfp4a16")
    monkeypatch.setattr(loaded_names, "_asked", asked)
    assert verify(tmp_path / "quantized", source).ok


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(out: Path) -> None:
        table = json.loads((out / name).read_text())
        change(table)
        (out / name).write_text(json.dumps(table))

    return edit


def arguments(**changes: Any) -> Callable[[Path], object]:
    """Change what the configuration says of quantized weights."""

    def change(table: dict[str, Any]) -> None:
        for group in table["quantization_config"]["config_groups"].values():
            group["weights"].update(changes)

    return edited("config.json", change)


@pytest.mark.parametrize(
    ("damage", "where", "what"),
    [
        (lambda out: (out / "tokenizer.json").write_text('{"version": "6.6"}'), "tokenizer.json",
         "its bytes are not those of the original"),
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json", "it is missing"),
        (lambda out: (out / "modeling_x.py").write_text("1"), "modeling_x.py",
         "the original has no such file"),
        (lambda out: (out / "pytorch_model.bin").write_bytes(b"1"), "pytorch_model.bin",
         "the original has no such file"),
        (edited("config.json", lambda c: c.update(auto_map={"AutoModel": "x.Y"})), "config.json",
         "'auto_map' is {'AutoModel': 'x.Y'}, but absent in the original"),
        (edited("config.json", lambda c: c.pop("eos_token_id")), "config.json",
         "'eos_token_id' is absent, but 2 in the original"),
    ],
)  # fmt: skip
def test_companions_and_keys_are_those_of_the_original(
    damage: Callable[[Path], object], where: str, what: str, source: Path, out: Path
) -> None:
    assert verify(out, source).ok
    damage(out)
    manifests.write(out)  # by somebody who can make hashes, too
    found = verify(out, source).problems
    assert [problem.where for problem in found] == [where]
    assert what in found[0].what


def test_a_lost_manifest_hides_no_damaged_tokenizer(source: Path, out: Path) -> None:
    (out / manifests.NAME).unlink()
    assert verify(out, source).ok
    assert not verify(out, source, require_manifest=True).ok
    (out / "tokenizer.json").write_text("{}")
    assert [problem.where for problem in verify(out, source).problems] == ["tokenizer.json"]


def test_keys_that_a_tool_may_have_added_are_a_note_where_there_is_no_manifest(
    source: Path, out: Path
) -> None:
    (out / manifests.NAME).unlink()
    edited("config.json", lambda c: c.update(use_bias=False))(out)
    found = verify(out, source)
    assert found.ok
    assert any("defaults that a tool added or left out: 'use_bias'" in note for note in found.notes)


def test_weights_and_code_that_the_manifest_does_not_name_are_problems(out: Path) -> None:
    (out / "consolidated.safetensors").write_bytes(b"1")
    (out / "modeling_x.py").write_text("1")
    (out / "README.md").write_text("A note of somebody.")
    assert {problem.where for problem in verify(out).problems} == {
        "consolidated.safetensors",
        "modeling_x.py",
    }


def test_swapped_arguments_are_said_in_a_sentence(source: Path, out: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is the original of .*out', not its result; pass the result first"
    ):
        verify(source, out)


def test_another_model_is_said_in_a_sentence(out: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", {"model.layers.0.mlp.down_proj.weight": weight(8, 128)})
    with pytest.raises(CheckpointError, match=r"other' is not the original of .*out', whose manifest names"):
        verify(out, other)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (edited("config.json", lambda c: c["quantization_config"].update(transform_config={"x": 1})),
         "transform_config is not empty"),
        (edited("config.json", lambda c: c["quantization_config"].update(sparsity_config={"x": 1})),
         "sparsity_config is not empty"),
        (arguments(dynamic=True), "are dynamic"),
        (arguments(actorder="columns"), "have actorder 'columns'"),
        (arguments(rotation="hadamard"), "have the key 'rotation'"),
    ],
)  # fmt: skip
def test_verify_refuses_what_dequantize_refuses(
    damage: Callable[[Path], object], what: str, out: Path
) -> None:
    damage(out)
    (out / manifests.NAME).unlink()
    with pytest.raises(UnsupportedError, match=what):
        verify(out)
    with pytest.raises(UnsupportedError, match=what):
        as_floats(open_source(out))


@pytest.mark.parametrize("to", ["mxfp4:scale=floor", "mxfp4_e2m1", "mxfp8_e4m3", "mxfp4:scale=rceil"])
def test_blocks_that_the_rule_of_their_scale_clips_are_within_its_bound(
    to: str, source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path / "out", to)
    assert verify(tmp_path / "out", source).problems == ()


def test_an_unknown_rule_of_scales_is_refused(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "mxfp4:scale=floor")
    arguments(observer_kwargs={"scale_rule": "largest"})(tmp_path / "out")
    (tmp_path / "out" / manifests.NAME).unlink()
    with pytest.raises(ZeropointError, match="scale_rule 'largest' is unknown; known are floor, even"):
        verify(tmp_path / "out", source)
