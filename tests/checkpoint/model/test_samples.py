"""Models that read images or sounds learn from samples of their own inputs, by name."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import tensors_of
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.cluster.statistics_parts import _in_parts
from zeropoint.checkpoint.model.forward_pass import compared
from zeropoint.checkpoint.model.samples import entering, samples_of
from zeropoint.checkpoint.model.tokens import Windows
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.schemes import Scheme

SHAPE = (8, 3, 32, 32)
INT4 = Scheme.parse("int4:g32")


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        patch_size=8, num_labels=5,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=128, num_mel_bins=16, max_source_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path / "whisper")
    return tmp_path / "whisper"


def heard() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(8, 16, 64, generator=made),
        "decoder_input_ids": torch.randint(3, 128, (8, 6), generator=made),
    }


def test_codes_are_those_of_the_model_in_memory(whisper: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(
        whisper, tmp_path / "out", "int4:g32", method="gptq", calibration=heard(), force=True
    )
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    names = [weight.module for weight in result.plan.weights]
    batches = [{name: x[n : n + 1] for name, x in heard().items()} for n in range(8)]
    rules = tuple(Rule(name=name, gives=Assignment(weight=INT4, method="gptq")) for name in names)
    recipe = Recipe(rules=rules, default=Rule(gives=None))
    known = zp.dequantize_model(zp.quantize_model(model, recipe, calibration=batches).model)
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats", dtype="float32")
    written = tensors_of(tmp_path / "floats")
    assert len(names) == 6 + 2 * 10
    for name in names:
        assert torch.equal(written[f"{name}.weight"], known.get_submodule(name).weight)


def test_an_image_model_is_solved_and_compared(vit: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(
        vit, tmp_path / "out", "int4:g32", quality="good", calibration={"pixel_values": images()}
    )
    assert {weight.method for weight in result.plan.weights} == {"shift+gptq"}
    assert result.notes[-1].startswith("outputs are off by")
    assert zp.verify_checkpoint(tmp_path / "out", vit).ok


def test_samples_are_rows_of_a_file_or_of_a_mapping_or_numbered(vit: Path, tmp_path: Path) -> None:
    save_file({"pixel_values": images()}, tmp_path / "rows.safetensors")
    save_file(
        {f"{n}.pixel_values": x[None].clone() for n, x in enumerate(images())}, tmp_path / "n.safetensors"
    )
    asked = {
        "mapping": {"pixel_values": images()}, "rows": tmp_path / "rows.safetensors",
        "numbered": tmp_path / "n.safetensors",
    }  # fmt: skip
    found = []
    for name, calibration in asked.items():
        zp.quantize_checkpoint(vit, tmp_path / name, "int4:g32", method="gptq", calibration=calibration)
        found.append((tmp_path / name / "model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2]
    few = zp.quantize_checkpoint(
        vit, tmp_path / "few", "int4:g32", method="gptq", calibration=asked["rows"], samples=4
    )
    assert (few.path / "model.safetensors").read_bytes() != found[0]


def test_a_model_of_sounds_is_solved_with_both_of_its_inputs(whisper: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(
        whisper, tmp_path / "out", "int4:g32", quality="good", calibration=heard(), force=True
    )
    assert {weight.method for weight in result.plan.weights} == {"shift+gptq"}
    assert any("encoder" in weight.module for weight in result.plan.weights)
    assert result.notes[-1].startswith("outputs are off by")
    assert zp.verify_checkpoint(tmp_path / "out", whisper).ok


def test_static_inputs_take_their_scale_from_samples(whisper: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(whisper, tmp_path / "out", "w8a8_static", calibration=heard(), force=True)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    extremes: dict[str, tuple[float, float]] = {}

    def seen(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            low, high = extremes.get(name, (0.0, 0.0))
            extremes[name] = min(low, float(given[0].min())), max(high, float(given[0].max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(seen(name))
    with torch.no_grad():
        for n in range(8):
            model(**{name: x[n : n + 1] for name, x in heard().items()})
    written = tensors_of(tmp_path / "out")
    scales = {name: x for name, x in written.items() if name.endswith("input_scale")}
    assert len(scales) == 6 + 2 * 10
    for name, scale in scales.items():
        low, high = extremes[name.removesuffix(".input_scale")]
        assert float(scale) == pytest.approx((high - low) / 255, rel=1e-5)


def test_statistics_of_images_solve_weights_later(vit: Path, tmp_path: Path) -> None:
    written = []
    for seed, name in enumerate(("a", "b")):
        file = tmp_path / f"{name}.safetensors"
        zp.gather_statistics(vit, file, calibration={"pixel_values": images(seed)}, gram=True)
        result = zp.quantize_checkpoint(vit, tmp_path / name, "int4:g32", method="gptq", statistics=file)
        assert {weight.method for weight in result.plan.weights} == {"gptq"}
        written.append((result.path / "model.safetensors").read_bytes())
    assert written[0] != written[1]


@pytest.mark.parametrize("if_exists", ["resume", "skip"])
def test_a_finished_run_is_kept_for_the_same_samples_alone(vit: Path, tmp_path: Path, if_exists: str) -> None:
    options = {"method": "gptq", "report": False, "if_exists": if_exists}
    for _ in range(2):
        zp.quantize_checkpoint(
            vit, tmp_path / "out", "int4:g32", calibration={"pixel_values": images()}, **options
        )
    with pytest.raises(zp.CheckpointError, match="choose an empty directory"):
        zp.quantize_checkpoint(
            vit, tmp_path / "out", "int4:g32", calibration={"pixel_values": images(1)}, **options
        )


def test_a_result_whose_outputs_are_others_is_said_to_be_another_model(vit: Path, tmp_path: Path) -> None:
    batch = {"pixel_values": images()[:1]}
    result = zp.quantize_checkpoint(vit, tmp_path / "out", "int4:g32", method="gptq", calibration=batch)
    assert re.match(r"outputs are off by [\d.]+% of their squares", result.notes[-1])
    path = vit / "model.safetensors"
    save_file({n: -x if n.startswith("classifier") else x for n, x in load_file(path).items()}, path)
    note = compared(result, open_source(vit), batch, result.plan.limits).notes[-1]
    found = re.fullmatch(
        r"THE RESULT IS ANOTHER MODEL: outputs are off by ([\d.]+)% of their squares .*", note
    )
    assert found is not None
    assert float(found[1]) == pytest.approx(400, rel=0.1)  # outputs of the other sign


def test_parts_of_a_cluster_have_all_inputs_once() -> None:
    ids, rows = torch.arange(300).reshape(50, 6), torch.rand(50, 3, 4, 4)
    of_ids = list(_in_parts([{"input_ids": window[None]} for window in ids]))
    assert [len(part) for part in of_ids] == [32, 18]
    assert torch.equal(torch.cat(of_ids), ids)
    of_rows = list(_in_parts([{"pixel_values": row[None]} for row in rows]))
    found = [x["pixel_values"] for part in of_rows for x in samples_of(Windows.of(part), 1 << 20) or ()]
    assert len(of_rows) == 2
    assert torch.equal(torch.cat(found), rows)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pixel_value": images()},
            "ViTForImageClassification takes no 'pixel_value'; did you mean pixel_values",
        ),
        (
            {"pixel_values": images(), "head_mask": torch.ones(3, 2)},
            "3 rows of 'head_mask', 8 rows of 'pixel_values'; give each input a row for each sample",
        ),
        ({"pixel_values": torch.tensor(1.0)}, "0 rows of 'pixel_values'"),
        ({"pixel_values": torch.empty(0, 3, 32, 32)}, "'pixel_values' of calibration must be a tensor"),
        ({"pixel_values": [1.0]}, "'pixel_values' of calibration must be a tensor"),
        ({}, "calibration has no tensor"),
        (torch.zeros(4, 8, dtype=torch.int64), "is no model of tokens .* with inputs by name"),
    ],
)
def test_what_are_no_samples_is_said(given: object, message: str, vit: Path, tmp_path: Path) -> None:
    with pytest.raises(zp.ZeropointError, match=message):
        zp.quantize_checkpoint(vit, tmp_path / "out", "int4:g32", method="gptq", calibration=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"samples": 9}, "samples=9 asks for more than the 8"), ({"length": 4}, "length=4 counts tokens")],
)
def test_numbers_that_samples_do_not_have_are_refused(
    options: dict[str, int], message: str, vit: Path, tmp_path: Path
) -> None:
    with pytest.raises(zp.CalibrationError, match=message):
        zp.quantize_checkpoint(
            vit,
            tmp_path / "out",
            "int4:g32",
            method="gptq",
            calibration={"pixel_values": images()},
            **options,
        )


def test_a_file_of_samples_that_does_not_fit_into_memory_is_not_read(vit: Path, tmp_path: Path) -> None:
    save_file({"pixel_values": torch.zeros(4096, 3, 32, 32)}, tmp_path / "many.safetensors")
    options = {"method": "gptq", "calibration": tmp_path / "many.safetensors"}
    least = Limits.default().base_memory
    with pytest.raises(zp.CalibrationError, match=r"holds 48 MiB of samples, above the limit of 16"):
        zp.quantize_checkpoint(vit, tmp_path / "out", "int4:g32", max_memory=least + (16 << 20), **options)
    assert not (tmp_path / "out").exists()


def test_what_passes_between_blocks_is_known_before_the_model_runs(vit: Path, whisper: Path) -> None:
    model = transformers.ViTForImageClassification.from_pretrained(vit)
    batches = [{"pixel_values": image[None]} for image in images()]
    assert entering(model, "vit.layers.0", batches) == ([17] * 8, 64)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper)
    batches = [{name: x[n : n + 1] for name, x in heard().items()} for n in range(2)]
    assert entering(model, "model.decoder.layers.0", batches) == ([6, 6], 64)
    assert entering(model, "model.encoder.layers.0", batches) == ([32, 32], 64)
