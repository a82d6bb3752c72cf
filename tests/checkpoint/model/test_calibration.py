"""Checkpoints whose methods need data: the bytes of the model in memory, resumed runs, and bad data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama, tiny_models
from tests.peers import transformers
from typer.testing import CliRunner

import zeropoint as zp
from zeropoint.checkpoint.model import own_tokens
from zeropoint.checkpoint.model import running_model as door
from zeropoint.checkpoint.model.calibration import calibrated
from zeropoint.checkpoint.model.tokens import CheckpointTokenizer, Windows
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.identity import identity
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.plan.recipe import KEEP, RecipeText
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.cli.app import app
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CalibrationError, CheckpointError, OptionError, UnsupportedError, ZeropointError
from zeropoint.recipes import Assignment, Recipe, Rule

pytestmark = pytest.mark.rotating


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 512, shape or (4, 24), generator=torch.Generator().manual_seed(0))


def plan_of(
    source: Path, to: str = "w4a16", limits: Limits | None = None, codec: str | None = None
) -> CheckpointPlan:
    written = {} if codec is None else {"codec": get_codec(codec)}
    return make_plan(open_source(source), RecipeText.of(to).by("mse_weighted"), limits=limits, **written)


def test_a_checkpoint_gets_the_bytes_of_its_model_quantized_in_memory(source: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(
        source, tmp_path / "files", "w4a16", method="mse_weighted", calibration=ids()
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    gives = Assignment(weight=result.plan.weights[0].layer.weight, method="mse_weighted")
    recipe = Recipe(rules=(Rule(name="lm_head", gives=None),), default=Rule(gives=gives))
    found = zp.calibrate(model, recipe, [{"input_ids": window[None]} for window in ids()])
    assert result.plan.statistics == found.statistics
    zp.save_checkpoint(zp.quantize_model(model, recipe, calibration=found), tmp_path / "model")
    files, memory = tensors_of(tmp_path / "files"), tensors_of(tmp_path / "model")
    assert files.keys() == memory.keys()
    assert all(torch.equal(tensor, memory[name]) for name, tensor in files.items())
    plain = zp.quantize_checkpoint(source, tmp_path / "plain", "w4a16", method="mse")
    assert digests(tmp_path / "plain") != digests(tmp_path / "files")
    assert zp.verify_checkpoint(tmp_path / "files").ok
    assert plain.error.relative < result.error.relative  # plain errors of weights are what mse minimizes


def test_random_tokens_take_the_place_of_data(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    length = min(512, config["max_position_embeddings"])
    tokens = torch.randint(0, config["vocab_size"], (8, length), generator=torch.Generator().manual_seed(0))
    for name, given in {"random": "random", "ids": tokens}.items():
        zp.quantize_checkpoint(
            source, tmp_path / name, "w4a16", method="mse_weighted", calibration=given
        )  # fmt: skip
    assert digests(tmp_path / "random") == digests(tmp_path / "ids")
    arguments = ["quantize", str(source), str(tmp_path / "cli"), "--to", "w4a16", "--method", "mse_weighted"]
    found = CliRunner().invoke(app, [*arguments, "--calibration", "random"])
    assert found.exit_code == 0, found.output
    assert digests(tmp_path / "cli") == digests(tmp_path / "ids")


def test_a_file_called_random_is_one_by_its_path(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"calibration '?.*random'? cannot be read"):
        calibrated(plan_of(source), str(tmp_path / "random"))
    with pytest.raises(CalibrationError, match="cannot be read"):
        calibrated(plan_of(source), Path("random"))


def test_a_file_alone_is_no_model_that_runs(source: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[0]
    with pytest.raises(
        UnsupportedError, match=r"is one file, and a model runs on data by its config\.json; pass"
    ):
        calibrated(plan_of(file), "random")


def test_random_tokens_give_no_scales_of_inputs_or_of_a_cache(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match="static inputs take their scales from calibration, and random"
    ):
        zp.quantize_checkpoint(source, tmp_path / "out", "fp8", calibration="random")
    zp.quantize_checkpoint(source, tmp_path / "codes", "fp8_dynamic")
    with pytest.raises(CalibrationError, match="scales of a cache need keys and values of text"):
        zp.add_kv_scales(tmp_path / "codes", tmp_path / "out", "random")
    assert not (tmp_path / "out").exists()


def test_numbers_of_positions_in_the_files_do_not_say_what_weights_are(tmp_path: Path) -> None:
    tiny_models.write(tmp_path / "bert", "bert", dtype=torch.float32)
    path, config = tmp_path / "bert/model.safetensors", tmp_path / "bert/config.json"
    positions = {"embeddings.position_ids": torch.arange(32)[None]}
    save_file(positions | load_file(path), path, {"format": "pt"})
    said = {key: value for key, value in json.loads(config.read_text()).items() if "dtype" not in key}
    config.write_text(json.dumps(said))
    options = {"method": "mse_weighted", "calibration": ids(4, 16) % 64}
    zp.quantize_checkpoint(tmp_path / "bert", tmp_path / "out", "int4:g32", **options)
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "bert").ok
    assert torch.equal(tensors_of(tmp_path / "out")[next(iter(positions))], next(iter(positions.values())))


def test_any_cut_stop_and_second_calibration_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    run(calibrated(plan_of(source), ids()), tmp_path / "golden")
    golden = digests(tmp_path / "golden")
    for name, limits in {"tiles": Limits(workers=3, tile_values=3000), "one": Limits(workers=1)}.items():
        stop_after(calibrated(plan_of(source, limits=limits), ids()), tmp_path / name, 2)
        run(calibrated(plan_of(source, limits=limits), ids()), tmp_path / name)
        assert digests(tmp_path / name) == golden


def test_a_run_is_not_resumed_with_other_data(source: Path, tmp_path: Path) -> None:
    plan = calibrated(plan_of(source), ids())
    stop_after(plan, tmp_path / "out", 2)
    with pytest.raises(CheckpointError, match="calibration"):
        run(calibrated(plan_of(source), ids(2, 24)), tmp_path / "out")
    assert "calibration" in identity(plan)
    assert "calibration" not in identity(plan_of(source))


def test_a_layout_that_is_cut_along_inputs_takes_weights_as_a_whole(source: Path, tmp_path: Path) -> None:
    found = []
    for name, limits in {"small": Limits(workers=2, tile_values=5000), "large": Limits(workers=1)}.items():
        plan = plan_of(source, "int4:g128", limits, "gptq")
        assert all(weight.alignment == weight.extent for weight in plan.weights)
        run(calibrated(plan, ids()), tmp_path / name)
        found.append(digests(tmp_path / name))
    assert found[0] == found[1]


def test_experts_whose_files_hold_them_apart_have_the_statistics_of_the_model_in_memory(
    tmp_path: Path,
) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=512,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "in")
    found = calibrated(plan_of(tmp_path / "in", "int4:g32"), ids()).statistics
    gives = Assignment.of(weight="int4:g32", method="mse_weighted")
    recipe = Recipe(
        rules=(Rule(name="*.layers.*", types=("Linear",), gives=gives),), default=Rule(gives=None)
    )
    memory = zp.calibrate(model, recipe, [{"input_ids": window[None]} for window in ids()]).statistics
    layers = "model.layers.1.mlp.experts"
    for own, name in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
        for expert in range(4):
            seen = found[f"{layers}.{expert}.{own}"]["mean_square"]
            assert torch.equal(seen["squares"], memory[f"{layers}.{name}.{expert}"]["mean_square"]["squares"])


def test_only_one_block_has_memory_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    load = door._Weights.block

    def block(self: door._Weights, name: str) -> object:
        blocks = {k: t for k, t in self._state.items() if ".layers." in k}
        sizes.append(sum(t.untyped_storage().nbytes() for t in blocks.values()))
        return load(self, name)

    monkeypatch.setattr(door._Weights, "block", block)
    calibrated(plan_of(source), ids())
    assert sizes == [0, 0]


def test_without_data_a_plan_is_made_and_a_run_says_what_to_pass(source: Path, tmp_path: Path) -> None:
    assert zp.plan_checkpoint(source, "w4a16", method="mse_weighted").weights
    with pytest.raises(CalibrationError, match="_proj': method mse_weighted needs the mean_square of"):
        zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", method="mse_weighted")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CalibrationError, match="no method of this plan takes calibration data"):
        zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", calibration=ids())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 8), "must be token ids: integers"),
        (torch.zeros(0, 8, dtype=torch.int64), "fewer tokens than one window of 128"),
        (torch.zeros(100, dtype=torch.int64), "fewer tokens than one window of 128"),
        (torch.zeros(1, 129, dtype=torch.int64), "has windows of 129 tokens, and the model takes 128"),
        (torch.full((1, 8), 512), r"has token 512, and the model knows 0\.\.511"),
        (torch.full((1, 8), -1), "has token -1"),
        ("absent.txt", "cannot be read: .*give text in UTF-8"),
        ("image.txt", "cannot be read: .*utf-8"),
        ("two.safetensors", "LlamaForCausalLM takes no 'a'; known are attention_mask, input_ids"),
    ],
    ids=str,
)
def test_data_that_are_none_are_named(
    given: torch.Tensor | str, message: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "image.txt").write_bytes(b"\xff\xd8\xff")
    save_file({"a": ids(), "b": ids()}, tmp_path / "two.safetensors")
    with pytest.raises(CalibrationError, match=message):
        calibrated(plan_of(source), tmp_path / given if isinstance(given, str) else given)


def test_text_needs_a_tokenizer_and_ids_in_a_file_need_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 400)
    with pytest.raises(UnsupportedError, match="has no tokenizer that transformers reads"):
        calibrated(plan_of(source), tmp_path / "a.txt")
    save_file({"input_ids": ids()}, tmp_path / "ids.safetensors")
    found = calibrated(plan_of(source), tmp_path / "ids.safetensors")
    assert found.statistics == calibrated(plan_of(source), ids()).statistics


@pytest.mark.parametrize("kind", ["bert", "t5", "qwen3", "gemma3_text", "xlnet"])
def test_a_tokenizer_without_files_is_none(kind: str, tmp_path: Path) -> None:
    """Transformers makes one all the same, to which each word is the unknown token or none."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 100}))
    save_file({"w": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path) is not None
    with pytest.raises(
        UnsupportedError, match=r"has no files of a tokenizer; copy its files there, or give token"
    ):
        CheckpointTokenizer(open_source(tmp_path))


def test_text_on_the_command_line_is_cut_by_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    source = synthetic_llama.write(tmp_path / "in")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(source)
    (tmp_path / "a.txt").write_text("a b b c " * 100)
    options = ["--to", "w4a16", "--method", "mse_weighted"]
    shown = CliRunner().invoke(
        app,
        ["quantize", str(source), str(tmp_path / "out"), *options, "--calibration", str(tmp_path / "a.txt")],
    )
    assert shown.exit_code == 0, shown.output
    expected = torch.tensor([0, 1, 1, 2] * 96).reshape(3, 128)
    other = zp.quantize_checkpoint(
        source, tmp_path / "ids", "w4a16", method="mse_weighted", calibration=expected
    )
    assert digests(tmp_path / "out") == digests(tmp_path / "ids")
    assert int(other.plan.statistics["model.layers.0.mlp.up_proj"]["mean_square"]["vectors"]) == 3 * 128


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, UnsupportedError, "does not build 'NoSuchModel'"),
        ({"architectures": None}, UnsupportedError, "no config.json with architectures"),
        ({"intermediate_size": 640}, CheckpointError, "does not fit the model"),
        ({"num_hidden_layers": 3}, CheckpointError, "is not in the files under the name"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_no_model_of_transformers_is_refused(
    change: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = synthetic_llama.write(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=message):
        calibrated(plan_of(source), ids())


def test_a_model_that_does_not_fit_the_memory_is_refused_with_the_size_that_does(source: Path) -> None:
    plan = plan_of(source, limits=Limits(workers=1, max_memory=410 << 20))
    with pytest.raises(CheckpointError, match=r"the model takes about .* use max_memory='\d+M', or fewer"):
        calibrated(plan, ids(128, 128).repeat(4, 1))


def test_the_verbs_take_the_memory_that_a_calibration_may_use(source: Path, tmp_path: Path) -> None:
    too_little, data = 410 << 20, ids(128, 128).repeat(4, 1)
    with pytest.raises(CheckpointError, match="the model takes about") as refused:
        zp.quantize_checkpoint(
            source, tmp_path / "out", "w4a16", method="mse_weighted", calibration=data, max_memory=too_little
        )
    enough = int(re.findall(r"max_memory='(\d+)M'", str(refused.value))[0]) << 20
    result = zp.quantize_checkpoint(
        source, tmp_path / "out", "w4a16", method="mse_weighted", calibration=ids(), max_memory=enough
    )
    assert result.plan.limits.max_memory == enough
    assert zp.plan_checkpoint(source, "w4a16", max_memory=enough).limits.max_memory == enough
    with pytest.raises(CheckpointError, match="max_memory='1M' is too little"):
        zp.plan_checkpoint(source, "w4a16", max_memory=1 << 20)


def test_a_quantized_checkpoint_is_calibrated_on_its_decoded_weights(source: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(source, tmp_path / "codes", "w8a16")
    floats = Selection(dequantize=DequantizePolicy.EVERY)
    run(make_plan(open_source(tmp_path / "codes"), KEEP, selection=floats), tmp_path / "floats")
    first = Selection(dequantize=DequantizePolicy.FIRST)
    recipe = RecipeText.of("w4a16").by("mse_weighted")
    plan = calibrated(make_plan(open_source(tmp_path / "codes"), recipe, selection=first), ids())
    assert plan.statistics == calibrated(plan_of(tmp_path / "floats"), ids()).statistics
    assert plan.statistics != calibrated(plan_of(source), ids()).statistics
    run(plan, tmp_path / "out")
    zp.quantize_checkpoint(
        tmp_path / "floats", tmp_path / "same", "w4a16", method="mse_weighted", calibration=ids()
    )
    found, wanted = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "same")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


STATIC = {
    "fp8": {"input_scale"}, "nvfp4": {"input_global_scale"},
    "w8a8_static": {"input_scale", "input_zero_point"},
}  # fmt: skip


@pytest.mark.parametrize("to", STATIC)
def test_static_inputs_have_the_scales_of_the_model_in_memory(to: str, source: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(source, tmp_path / "files", to, calibration=ids())
    layer = result.plan.weights[0].layer
    recipe = Recipe(
        rules=(Rule(name="lm_head", gives=None),),
        default=Rule(gives=Assignment(weight=layer.weight, input=layer.input)),
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    found = zp.calibrate(model, recipe, [{"input_ids": window[None]} for window in ids()])
    zp.save_checkpoint(zp.quantize_model(model, recipe, calibration=found), tmp_path / "model")
    files, memory = tensors_of(tmp_path / "files"), tensors_of(tmp_path / "model")
    assert files.keys() == memory.keys()
    own = {name for name in files if name.rpartition(".")[2].startswith("input_")}
    assert {name.rpartition(".")[2] for name in own} == STATIC[to]
    assert len(own) == 14 * len(STATIC[to])
    # Layers that engines run as one share the tensor scale of nvfp4 in files, which the model does not know.
    same = {name for name in files if to != "nvfp4" or name in own}
    assert all(torch.equal(files[name], memory[name]) for name in same)
    sections = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("files", "model")]
    groups = [section["quantization_config"]["config_groups"] for section in sections]
    assert groups[0] == groups[1]
    assert zp.verify_checkpoint(tmp_path / "files", source).problems == ()
    again = zp.load_checkpoint(
        transformers.AutoModelForCausalLM.from_config(model.config), tmp_path / "files"
    )
    assert again.model is not None


def test_static_inputs_have_the_range_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    asked: tuple[str | None, ...] = (None, "minmax", "percentile:99", "headroom:1000")
    found = {}
    for number, name in enumerate(asked):
        out = tmp_path / str(number)
        zp.quantize_checkpoint(
            source, out, "nvfp4", format="modelopt", calibration=ids(), input_range=name, report=False
        )
        found[name] = {name: x for name, x in tensors_of(out).items() if name.endswith("input_scale")}
        assert zp.verify_checkpoint(out, source).problems == ()
    assert found[None] == found["minmax"]
    for name, scale in found["minmax"].items():
        # Ranges of these layers span less than a factor of 1000, so that 1000 anchors are above the largest.
        assert found["percentile:99"][name] < scale < found["headroom:1000"][name]


def test_a_finished_run_with_another_range_of_inputs_is_not_resumed(source: Path, tmp_path: Path) -> None:
    def write(input_range: str | None) -> str:
        result = zp.quantize_checkpoint(
            source, tmp_path / "out", "fp8", method="gptq", calibration=ids(), input_range=input_range,
            if_exists="skip",
        )  # fmt: skip
        return result.notes[-1]

    write("percentile:99")
    before = digests(tmp_path / "out")
    assert "was finished by an earlier run" in write("percentile:99")
    with pytest.raises(CheckpointError):
        write(None)
    assert digests(tmp_path / "out") == before


def test_a_range_of_inputs_needs_static_inputs_data_and_a_name(source: Path, tmp_path: Path) -> None:
    def refused(to: str, match: str, error: type[Exception], **options: Any) -> None:
        with pytest.raises(error, match=match):
            zp.quantize_checkpoint(source, tmp_path / "out", to, **options)

    refused(
        "w4a16",
        "is for static inputs, and this plan has none",
        OptionError,
        calibration=ids(),
        input_range="mse",
    )
    refused("w4a16", "has none", OptionError, calibration=ids(), input_range="mse", method="gptq")
    absent = tmp_path / "absent.txt"  # which is not read, and no weight is solved before
    refused("w4a16", "has none", OptionError, calibration=absent, input_range="mse", method="gptq")
    refused("fp8", "is learned from data; pass calibration=FILE", OptionError, input_range="mse")
    refused("fp8", "is unknown", CalibrationError, calibration=ids(), input_range="maximum")
    assert not (tmp_path / "out").exists()


def test_a_range_of_inputs_that_a_budget_does_not_use_is_said(source: Path, tmp_path: Path) -> None:
    result = zp.quantize_checkpoint(
        source,
        tmp_path / "out",
        budget="8bpw",
        candidates="w4a16,w8a16",
        calibration=ids(),
        input_range="mse",
    )
    assert "input_range='mse' is not used: no layer has static inputs" in result.notes


@pytest.mark.parametrize(
    ("layout", "to", "most"),
    [("modelopt", "fp8", 448.0), ("modelopt", "nvfp4", 448.0 * 6), ("quark", "fp8", 448.0)],
)
def test_static_inputs_of_one_number_have_the_largest_magnitude_over_that_of_the_format(
    layout: str, to: str, most: float, source: Path, tmp_path: Path
) -> None:
    zp.quantize_checkpoint(source, tmp_path / "out", to, format=layout, calibration=ids())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    largest: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(
                lambda _, given, name=name: largest.update(
                    {name: torch.maximum(largest.get(name, torch.zeros(())), given[0].abs().amax())}
                )
            )
    with torch.no_grad():
        for window in ids():
            model(window[None])
    found = tensors_of(tmp_path / "out")
    assert len(largest) == 14
    for name, x in largest.items():
        scale = found[f"{name}.input_scale"]
        assert (scale.dtype, scale.shape) == (torch.float32, ())
        assert torch.equal(scale, x.float() / most)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == layout
    assert config.get("quant_algo", to.upper()) == to.upper()
    assert zp.verify_checkpoint(tmp_path / "out", source).problems == ()


def test_static_inputs_are_resumed_to_the_same_bytes_and_need_data(source: Path, tmp_path: Path) -> None:
    plan = make_plan(open_source(source), "fp8")
    with pytest.raises(CalibrationError, match="static need scales observed on data; pass calibration=FILE"):
        run(plan, tmp_path / "out")
    stop_after(calibrated(make_plan(open_source(source), "fp8"), ids()), tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match="calibration"):
        run(calibrated(plan, ids(2, 24)), tmp_path / "out")
    run(calibrated(plan, ids()), tmp_path / "out")
    zp.quantize_checkpoint(source, tmp_path / "whole", "fp8", calibration=ids(), report=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_static_inputs_have_no_place_in_layouts_that_hold_none(source: Path, tmp_path: Path) -> None:
    recipe = RecipeText(text="default: {weight: 'int4:g32:scale=float16', input: 'int8:tensor static'}")
    with pytest.raises(ZeropointError, match="have no place in the layout of GPTQ; make it dynamic"):
        zp.quantize_checkpoint(source, tmp_path / "out", recipe, format="gptq", calibration=ids())


def windows(source: Path, given: object, **asked: int) -> list[torch.Tensor]:
    """The windows that a model runs on."""
    data = Windows(given=given, **asked)  # type: ignore[arg-type]
    with door.running(open_source(source), data, Limits.default(max_memory="4G"), remedy="stop") as model:
        return [batch["input_ids"].clone() for batch in model.batches]


def test_samples_and_length_say_what_windows_there_are(source: Path) -> None:
    row = torch.arange(100)
    found = windows(source, row, samples=3, length=20)
    assert torch.equal(torch.cat(found), row[:60].reshape(3, 20))
    assert torch.equal(torch.cat(windows(source, row, length=30)), row[:90].reshape(3, 30))
    drawn = windows(source, "random", samples=5, length=16)
    assert torch.cat(drawn).shape == (5, 16)
    assert len(windows(source, "random", length=16)) == 8


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        (
            torch.arange(100),
            {"samples": 6, "length": 20},
            "has 100 tokens, 5 windows of 20, and samples=6 asks",
        ),
        (
            torch.zeros(2, 8).long(),
            {"samples": 1},
            "holds 2 windows of 8 tokens each, which samples=1 cannot",
        ),
        ("random", {"length": 1 << 20}, "length=1048576 is more than the [0-9]+ tokens that the model takes"),
    ],
)
def test_windows_that_data_or_model_do_not_have_are_refused(
    source: Path, given: object, asked: dict[str, int], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        windows(source, given, **asked)


def test_numbers_of_windows_that_make_no_sense_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for asked, message in (
        ({"samples": 2}, "samples= and length= are of windows of calibration=; add that"),
        ({"calibration": "random", "length": 0}, "length=0 must be at least 1"),
        ({"calibration": "random", "samples": 1 << 30}, "are 1073741824 tokens, above the limit"),
    ):
        with pytest.raises(OptionError, match=message):
            zp.quantize_checkpoint(tmp_path, tmp_path / "out", "w4a16", **asked)


def test_a_model_generates_the_tokens_that_it_makes_likely(source: Path) -> None:
    found = torch.cat(windows(source, "self", samples=20, length=12))
    again = torch.cat(windows(source, "self", samples=20, length=12))
    assert torch.equal(found, again)
    assert torch.equal(found[:, 0], torch.cat(windows(source, "random", samples=20, length=12))[:, 0])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    generator = torch.Generator().manual_seed(1)  # of the second group, windows 16 to 19
    with torch.no_grad():
        for at in range(1, 12):
            # Without keys and values that are kept: the whole window up to here.
            chances = model(found[16:, :at]).logits[:, -1].float().softmax(-1)
            assert torch.equal(found[16:, at], torch.multinomial(chances, 1, generator=generator)[:, 0])


def test_own_tokens_need_a_model_that_predicts_and_memory_for_all_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bert"
    tiny_bert(folder)
    with pytest.raises(UnsupportedError, match=r"BertModel predicts no next token.*give calibration=FILE"):
        zp.quantize_checkpoint(
            folder, tmp_path / "out", "int4:g16", method="mse_weighted", calibration="self"
        )
    monkeypatch.setattr(own_tokens, "TOGETHER", 1 << 20)
    options = {"method": "mse_weighted", "calibration": "self", "samples": 1 << 12, "length": 64}
    with pytest.raises(
        CheckpointError, match=r"'self' takes the whole model.*more than the process may take"
    ):
        zp.quantize_checkpoint(source, tmp_path / "out", "w4a16", max_memory="700M", workers=1, **options)


def tiny_bert(folder: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(folder)
