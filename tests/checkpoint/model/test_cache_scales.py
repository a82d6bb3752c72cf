"""Scales of a cache: those of transformers' own caches, in the places of each layout, or none at all."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import digests, tensors_of
from tests.oracles import synthetic_llama
from tests.peers import transformers
from typer.testing import CliRunner

import zeropoint as zp
from zeropoint.checkpoint.model import cache_scales as door
from zeropoint.checkpoint.model.cache_scales import with_cache_scales
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.cli.app import app
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CalibrationError, CheckpointError, UnsupportedError, ZeropointError

pytestmark = pytest.mark.rotating

LAYOUTS = {"compressed-tensors": "w4a16", "modelopt": "nvfp4a16", "fp8-block": "fp8_block"}
ATTENTION = tuple(f"model.layers.{n}.self_attn" for n in range(synthetic_llama.LAYERS))
K_SCALE = f"{ATTENTION[0]}.k_scale"
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 512, shape or (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_llama.write(tmp_path_factory.mktemp("floats") / "in")


@pytest.fixture(scope="module")
def sources(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of each layout."""
    folder = tmp_path_factory.mktemp("sources")
    for layout, to in LAYOUTS.items():
        zp.quantize_checkpoint(floats, folder / layout, to, format=layout, method="mse")
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def outputs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("outputs")
    for layout, source in sources.items():
        before = digests(source)
        zp.add_kv_scales(source, folder / layout, ids())
        assert digests(source) == before
    return {layout: folder / layout for layout in sources}


def extremes(folder: Path, work: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values that transformers keeps of each layer of the decoded model, for all data."""
    assert CliRunner().invoke(app, ["dequantize", str(folder), str(work)]).exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(work, dtype="auto")
    cached = []
    for window in ids():
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(window[None], past_key_values=cache, use_cache=True)
        cached.append(cache.layers)
    return [
        (torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]))
        for layers in zip(*cached, strict=True)
    ]


def test_compressed_tensors_makes_the_same_scales_of_the_caches_of_transformers(
    sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="extra `hf`")
    arguments = quantization.QuantizationArgs(**FLOAT8)
    found = tensors_of(outputs["compressed-tensors"])
    seen = extremes(sources["compressed-tensors"], tmp_path / "floats")
    for name, both in zip(ATTENTION, seen, strict=True):
        for suffix, x in zip(("k_scale", "v_scale"), both, strict=True):
            theirs, _ = quantization.utils.calculate_qparams(x.amin(), x.amax(), arguments)
            ours = found[f"{name}.{suffix}"]
            assert (ours.dtype, ours.shape) == (torch.bfloat16, (1,))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("layout", "suffixes"),
    [("modelopt", ("k_proj.k_scale", "v_proj.v_scale")), ("fp8-block", ("k_scale", "v_scale"))],
)
def test_scales_of_one_number_are_the_largest_magnitude_over_448(
    layout: str, suffixes: tuple[str, str], sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    found = tensors_of(outputs[layout])
    for name, both in zip(ATTENTION, extremes(sources[layout], tmp_path / "floats"), strict=True):
        for suffix, x in zip(suffixes, both, strict=True):
            ours = found[f"{name}.{suffix}"]
            assert (ours.dtype, ours.shape) == (torch.float32, ())
            # As _postprocess_single_tensor of modelopt 0.47 has it.
            assert torch.equal(ours, x.abs().max().float() / 448)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_else_is_copied(layout: str, sources: dict[str, Path], outputs: dict[str, Path]) -> None:
    old, new = tensors_of(sources[layout]), tensors_of(outputs[layout])
    cache = get_codec(layout).cache
    assert cache is not None
    added = {f"{name}.{suffix}" for name in ATTENTION for suffix in (cache.key, cache.value)}
    assert new.keys() == old.keys() | added
    for name, tensor in old.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), new[name].reshape(-1).view(torch.uint8))
    index = json.loads((outputs[layout] / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == new.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in new.values())
    before, after = (json.loads((f / "config.json").read_text()) for f in (sources[layout], outputs[layout]))
    sections = [config.pop("quantization_config") for config in (before, after)]
    assert before == after
    scheme = sections[1].pop("kv_cache_scheme")
    assert scheme == "static" if layout == "fp8-block" else scheme.items() <= (scheme | FLOAT8).items()
    for section in sections:
        section.pop("kv_cache_scheme", None)
        section.pop("dequantize", None)
    assert sections[0] == sections[1]


def test_both_files_of_modelopt_say_it(outputs: dict[str, Path]) -> None:
    other = json.loads((outputs["modelopt"] / "hf_quant_config.json").read_text())
    assert other["quantization"]["kv_cache_quant_algo"] == "FP8"
    section = json.loads((outputs["modelopt"] / "config.json").read_text())["quantization_config"]
    # convert_hf_quant_config_format of modelopt 0.47
    assert section["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_verified_and_inspected_with_the_method_of_its_weights(
    layout: str, floats: Path, sources: dict[str, Path], outputs: dict[str, Path]
) -> None:
    for against in (floats, sources[layout]):
        assert zp.verify_checkpoint(outputs[layout], against).problems == ()
    found = zp.inspect_checkpoint(outputs[layout])
    assert (found.cached_layers, {s.method for s in found.schemes}) == (2, {"mse"})
    assert found.summary[-1] == "scales of a quantized cache of keys and values in 2 attention layers"
    shown = CliRunner().invoke(app, ["inspect", str(outputs[layout]), "--json"])
    assert json.loads(shown.stdout)["kv_cache"]["layers"] == 2
    assert len(zp.inspect_checkpoint(sources[layout]).summary) == 2


def test_transformers_loads_the_scales_and_quantizes_its_cache(outputs: dict[str, Path]) -> None:
    pytest.importorskip("compressed_tensors", reason="extra `hf`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            outputs["compressed-tensors"], output_loading_info=True
        )
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(ids()[:1], past_key_values=cache, use_cache=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = tensors_of(outputs["compressed-tensors"])
    for name, layer in zip(ATTENTION, cache.layers, strict=True):
        attention = model.get_submodule(name)
        for suffix, kept in (("k_scale", layer.keys), ("v_scale", layer.values)):
            scale = found[f"{name}.{suffix}"]
            assert torch.equal(getattr(attention, suffix), scale)
            codes = (kept.double() / scale.double()).float()
            near = codes.to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(codes, near, rtol=2**-8, atol=0)  # the product was rounded to bfloat16


def test_a_run_is_resumed_to_the_same_bytes_and_not_with_other_data(
    sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    source = open_source(sources["modelopt"])
    stop_after(with_cache_scales(source, ids(), limits=Limits(workers=1)), tmp_path / "out", 9)
    with pytest.raises(CheckpointError, match="calibration"):
        run(with_cache_scales(source, ids(4, 24)), tmp_path / "out")
    run(with_cache_scales(source, ids()), tmp_path / "out")
    assert digests(tmp_path / "out") == digests(outputs["modelopt"])
    again = run(with_cache_scales(source, ids()), tmp_path / "out")
    assert "nothing was written" in again.notes[-1]


def changed(source: Path, folder: Path, change: dict[str, torch.Tensor]) -> Path:
    """Copy a checkpoint without its manifest, with other tensors of the same shape, or more."""
    shutil.copytree(source, folder)
    (folder / "zeropoint_manifest.json").unlink()
    for path in sorted(folder.glob("*.safetensors")):
        own = load_file(path)
        save_file({name: change.get(name, tensor) for name, tensor in own.items()}, path)
    return folder


def test_a_layer_whose_values_are_all_zero_is_named_and_nothing_is_written(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    name = f"{ATTENTION[1]}.v_proj.weight"
    zeros = torch.zeros_like(tensors_of(sources["fp8-block"])[name].float()).to(torch.float8_e4m3fn)
    source = changed(sources["fp8-block"], tmp_path / "in", {name: zeros})
    said = r"layers\.1\.self_attn.: the largest magnitude of its values is 0\.0"
    with pytest.raises(CalibrationError, match=said):
        zp.add_kv_scales(source, tmp_path / "out", ids())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("largest", "message"),
    [
        (0.0, "the largest magnitude of its keys is 0.0, which gives no scale"),
        (torch.nan, "the largest magnitude of its keys is nan"),
        (torch.inf, "the largest magnitude of its keys is inf"),
        (448.0, "the scale of its keys would be exactly 1, as engines have it where none was learned"),
        (None, "no token reached it"),
    ],
)
def test_scales_that_data_do_not_give_are_refused(largest: float | None, message: str) -> None:
    watch = door.KvCacheObserver(torch.nn.Module())
    if largest is not None:
        watch.keys["a"] = torch.tensor(largest)
    cache = get_codec("fp8-block").cache
    assert cache is not None
    near: Any = None
    with pytest.raises(CalibrationError, match=f"^.layers.0.a.: {message}"):
        list(door._learned({"a": ("layers.0.a", near)}, watch, cache, "leave it out"))


def test_checkpoints_without_a_place_are_refused_before_anything_runs(
    floats: Path, sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    zp.quantize_checkpoint(floats, tmp_path / "gptq", "int4:g128", format="gptq")
    other = tmp_path / "other"
    shutil.copytree(sources["compressed-tensors"], other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = FLOAT8 | {"num_bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "aqlm").mkdir()
    save_file({"a.weight": torch.ones(2)}, tmp_path / "aqlm" / "model.safetensors")
    (tmp_path / "aqlm" / "config.json").write_text(json.dumps(config))
    cases: dict[Path, tuple[type[ZeropointError], str]] = {
        floats: (CheckpointError, "is not quantized, and a checkpoint of floats has no place"),
        tmp_path / "gptq": (
            UnsupportedError,
            "no place in the layout of GPTQ.* one of compressed-tensors, fp8",
        ),
        outputs["modelopt"]: (CheckpointError, "has scales of a cache already, such as .*k_proj.k_scale"),
        other: (CheckpointError, "says that its cache is quantized otherwise"),
        tmp_path / "aqlm": (CheckpointError, "is quantized by 'aqlm', whose layout is not read here"),
    }
    for source, (error, message) in cases.items():
        with pytest.raises(error, match=message):
            zp.add_kv_scales(source, tmp_path / "out", tmp_path / "absent.txt")
    with pytest.raises(CalibrationError, match="cannot be read"):
        zp.add_kv_scales(sources["modelopt"], tmp_path / "out", tmp_path / "absent.txt")
    with pytest.raises(CheckpointError, match="use max_memory="):
        zp.add_kv_scales(sources["modelopt"], tmp_path / "out", ids(), max_memory=401 << 20)
    assert not (tmp_path / "out").exists()


def test_experts_that_the_model_has_in_one_tensor_are_found_one_by_one(tmp_path: Path) -> None:
    config = transformers.GraniteMoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GraniteMoeForCausalLM(config).save_pretrained(tmp_path / "floats")
    codes = tmp_path / "codes"
    zp.quantize_checkpoint(tmp_path / "floats", codes, "w4a16")
    names = {f"{part}_proj.weight_packed" for part in ("gate", "up", "down")}
    found = {n.partition(".experts.0.")[2] for n in tensors_of(codes)}
    assert names <= found
    assert zp.verify_checkpoint(codes, tmp_path / "floats").ok
    zp.add_kv_scales(codes, tmp_path / "out", ids())
    assert K_SCALE in tensors_of(tmp_path / "out")


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2, vocab_size=128,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        v_head_dim=16, qk_nope_head_dim=16, n_routed_experts=2, n_group=1, topk_group=1,
        num_experts_per_tok=1, first_k_dense_replace=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "codes", "int4:g32")
    with pytest.raises(UnsupportedError, match="makes keys and values of latent vectors"):
        zp.add_kv_scales(tmp_path / "codes", tmp_path / "out", torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({K_SCALE: torch.ones(())}, K_SCALE, "the scale is 1, which engines take where none was learned"),
        ({K_SCALE: torch.tensor(-0.5)}, K_SCALE, "the scale -0.5 must be finite and positive"),
        (
            {f"{ATTENTION[1]}.v_scale": None}, ATTENTION[1],
            "its cache has no v_scale, which engines take for 1",
        ),
        (
            {f"{ATTENTION[1]}.{s}_scale": None for s in "kv"}, ATTENTION[1],
            "its cache has no k_scale and v_scale, which engines take for 1",
        ),
    ],
    ids=["one", "negative", "no values", "none"],
)  # fmt: skip
def test_damaged_scales_of_others_are_found(
    change: dict[str, torch.Tensor | None], where: str, message: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    found = {name: change.get(name, t) for name, t in tensors_of(outputs["fp8-block"]).items()}
    tmp_path = tmp_path / "out"
    tmp_path.mkdir()
    save_file({name: t for name, t in found.items() if t is not None}, tmp_path / "model.safetensors")
    shutil.copy(outputs["fp8-block"] / "config.json", tmp_path)
    problems = zp.verify_checkpoint(tmp_path).problems
    assert [problem.where for problem in problems] == [where]
    assert problems[0].what.startswith(message)


def test_a_configuration_without_scales_and_scales_without_one_are_said(
    sources: dict[str, Path], outputs: dict[str, Path], tmp_path: Path
) -> None:
    for name, layout in (("claimed", sources), ("silent", outputs)):
        shutil.copytree(layout["fp8-block"], tmp_path / name)
        other = outputs if layout is sources else sources
        shutil.copy(other["fp8-block"] / "config.json", tmp_path / name)
    said = [zp.inspect_checkpoint(tmp_path / name).summary[-1] for name in ("claimed", "silent")]
    assert said[0].startswith("the configuration has a quantized cache of keys and values, and no layer")
    assert said[1].endswith("in 2 attention layers, of which the configuration says nothing")


def test_the_word_of_the_fp8_layout_for_a_cache_becomes_an_object_elsewhere(
    outputs: dict[str, Path], tmp_path: Path
) -> None:
    arguments = [
        "convert",
        str(outputs["fp8-block"]),
        str(tmp_path / "out"),
        "--format",
        "compressed-tensors",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["kv_cache_scheme"]["type"], config["kv_cache_scheme"]["num_bits"]) == ("float", 8)
    assert zp.inspect_checkpoint(tmp_path / "out").summary[-1].endswith("in 2 attention layers")
