"""What the table of engines says of transformers is what transformers does; of the others, what was read."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from tests.checkpoint.model.test_loading_mixed import differing
from tests.checkpoint.written import CONFIG, LINEAR, ONE, save, weight
from tests.oracles import synthetic_llama
from tests.tables import each

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.checkpoint.plan.verdicts import Verdict, refusal, verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.engines import Loads
from zeropoint.codecs.registry import get_codec

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations

SCHEMES = (
    "w4a16", "w8a16", "w4a16_asym", "w8a8", "fp8_dynamic", "fp8_block", "mxfp4", "mxfp4a16", "mxfp8",
    "mxfp8a16", "nvfp4a16", "float8_e4m3fn:tensor", "float8_e4m3fn:channel", "float8_e4m3fn:g64", "int3:g64",
    "int4:tensor",
)  # fmt: skip
# (recipe, whether the model has experts), run by `make test`; all schemes with and without are slow.
QUICK = [
    ("default: w4a16_asym", False),
    ("default: w4a16\nrules: [{name: '*.embed_tokens', preset: w8a16}]", False),
    ("default: w4a16_asym\nrules: [{name: '*.k_proj', preset: w8a8}]", False),
    ("default: fp8_dynamic", True),
    ("default: nvfp4a16", True),
    ("default: w8a8", True),
    ("default: w4a16\nrules: [{name: '*.experts.down_proj', preset: mxfp4a16}]", True),
    ("default: w4a16\nrules: [{name: '*.layers.0.mlp.experts.*', keep: x}]", True),
]
SLOW = [(f"default: '{scheme}'", moe) for scheme in SCHEMES for moe in (False, True)]


def planned(source: Path, recipe: str) -> CheckpointPlan:
    return make_plan(open_source(source), RecipeText(text=recipe), limits=ONE)


def verdict(plan: CheckpointPlan, engine: str) -> Verdict:
    (found,) = [v for v in verdicts(plan) if v.engine == engine]
    return found


def loads(folder: Path) -> bool:
    """Return whether transformers loads a checkpoint with the values that we decode."""
    try:
        return differing(folder) == []
    except (RuntimeError, AttributeError):  # a shape that does not fit, an embedding without a weight
        return False


@pytest.mark.parametrize(
    ("recipe", "moe"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_transformers_loads_what_the_table_says(recipe: str, moe: bool, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=moe)
    plan = planned(source, recipe)
    run(plan, tmp_path / "out")
    found = verdict(plan, "transformers")
    assert found.checked
    assert loads(tmp_path / "out") is (found.loads is Loads.YES), found.reason


@pytest.mark.parametrize(
    ("recipe", "engine", "expected", "reason"),
    [
        ("w4a8", "vLLM", Loads.YES, "reads every layout"),
        (
            "int3:g64",
            "vLLM",
            Loads.PARTLY,
            "packed integers of 4 and 8 bits are read, others .* in some releases",
        ),
        ("float8_e4m3fn:g64", "vLLM", Loads.NO, "float8 weights in groups .* have no kernel"),
        ("int4:tensor", "vLLM", Loads.NO, "packed integers need a scale for each channel or group"),
        ("w4a16", "SGLang", Loads.PARTLY, "fewer schemes"),
        ("int4:tensor", "SGLang", Loads.NO, "packed integers need"),
        ("fp8_dynamic", "TensorRT-LLM", Loads.PARTLY, "float8 by channel and block"),
        ("mxfp4", "TensorRT-LLM", Loads.NO, "float8 by channel or block"),
        ("w8a8", "llama.cpp", Loads.PARTLY, "reads GGUF"),
        ("nvfp4a16", "llama.cpp", Loads.NO, "does not decode nvfp4-pack-quantized"),
        ("w4a16", "onnxruntime", Loads.NO, "ONNX models"),
        ("w4a16", "mlx-lm", Loads.NO, "DeepSeek-V3 and Kimi K2 alone"),
        ("nvfp4a16", "mlx-lm", Loads.NO, "DeepSeek-V3 and Kimi K2 alone"),
    ],
)
def test_other_engines_have_a_reason_and_were_not_checked(
    recipe: str, engine: str, expected: Loads, reason: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, {LINEAR: weight(128, 128)})
    found = verdict(planned(folder, f"default: '{recipe}'"), engine)
    assert found.loads is expected
    assert re.search(reason, found.reason)
    assert not found.checked


FLUX = {"_class_name": "FluxTransformer2DModel"}


@each(
    "config, engine, expected, reason",
    [
        (None, "transformers", Loads.NO, "no config.json with a model_type"),
        (None, "vLLM", Loads.NO, "no config.json with a model_type"),
        (
            {"_class_name": "FluxTransformer2DModel"},
            "transformers",
            Loads.NO,
            "a part of a pipeline of diffusers",
        ),
        ({"_class_name": "FluxTransformer2DModel"}, "vLLM", Loads.NO, "a part of a pipeline of diffusers"),
        ({"_class_name": "FluxTransformer2DModel"}, "diffusers", Loads.NO, "does not read this layout"),
        (
            {"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"]},
            "vLLM",
            Loads.UNCHECKED,
            "architecture",
        ),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "vLLM", Loads.YES, "ran it on a CPU"),
        ({"model_type": "bert", "architectures": 5}, "vLLM", Loads.UNCHECKED, "architecture"),
        ({"model_type": "bert", "architectures": [["BertModel"]]}, "vLLM", Loads.UNCHECKED, "architecture"),
        ({"model_type": "bert", "architectures": {"BertModel": 1}}, "vLLM", Loads.UNCHECKED, "architecture"),
        (CONFIG, "vLLM with humming", Loads.PARTLY, "humming-kernels runs it on NVIDIA GPUs"),
    ],
)
def test_an_engine_says_yes_of_architectures_that_its_own_source_builds(
    config: dict[str, object] | None, engine: str, expected: Loads, reason: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = planned(save(Path(folder), {LINEAR: weight(128, 128)}, config), "default: w4a16")
        found = verdict(made, engine)
        assert (found.loads, reason in found.reason) == (expected, True), found.reason
        assert refusal(made) is None


def test_experts_under_names_of_their_own_were_not_checked(tmp_path: Path) -> None:
    experts = {"m.mlp.experts.fc1": weight(3, 256, 128), "m.mlp.experts.fc2": weight(3, 128, 128)}
    usual = {
        "m.mlp.experts.gate_up_proj": weight(3, 256, 128),
        "m.mlp.experts.down_proj": weight(3, 128, 128),
    }
    for name, tensors, expected in (("own", experts, Loads.UNCHECKED), ("usual", usual, Loads.YES)):
        made = planned(save(tmp_path / name, tensors), "default: w4a16")
        assert verdict(made, "vLLM").loads is expected
        assert verdict(made, "transformers").loads is Loads.NO


def test_floats_that_transformers_joins_are_read_next_to_float8_alone(tmp_path: Path) -> None:
    convolution = "model.layers.0.self_attn.q_conv1d.weight"
    config = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 1}
    folder = save(tmp_path, {LINEAR: weight(128, 128), convolution: weight(128, 1, 4)}, config)
    packed = verdict(planned(folder, "default: w4a16"), "transformers")
    assert (packed.loads, convolution in packed.reason) == (Loads.NO, True)
    assert verdict(planned(folder, "default: fp8_dynamic"), "transformers").loads is Loads.YES


def test_parts_of_pipelines_alone_have_a_row_of_diffusers(tmp_path: Path) -> None:
    part = save(tmp_path / "part", {LINEAR: weight(128, 128)}, FLUX)
    made = make_plan(open_source(part), "nf4", codec=get_codec("bitsandbytes"), limits=ONE)
    assert verdict(made, "diffusers").loads is Loads.UNCHECKED
    for to, loads in (("int8wo", Loads.PARTLY), ("int4wo", Loads.UNCHECKED)):
        made = make_plan(open_source(part), to, codec=get_codec("torchao"), limits=ONE)
        assert verdict(made, "diffusers").loads is loads
    (part / "model.safetensors").rename(part / "diffusion_pytorch_model.safetensors")
    assert "diffusion_pytorch_model.safetensors.index.json" in planned(part, "default: w4a16").texts
    model = save(tmp_path / "model", {LINEAR: weight(128, 128)})
    assert "diffusers" not in {v.engine for v in verdicts(planned(model, "default: w4a16"))}


@pytest.mark.parametrize(("kind", "expected"), [("llama", Loads.YES), ("falcon_h1", Loads.UNCHECKED)])
def test_mlx_lm_is_said_to_load_families_that_ran_there(kind: str, expected: Loads, tmp_path: Path) -> None:
    folder = save(tmp_path, {LINEAR: weight(128, 128)}, {"model_type": kind})
    made = make_plan(open_source(folder), "mlx_int8", codec=get_codec("mlx"), limits=ONE)
    assert verdict(made, "mlx-lm").loads is expected


def test_a_set_of_several_schemes_is_no_layer_of_vllm(tmp_path: Path) -> None:
    folder = save(tmp_path, {f"m.self_attn.{x}_proj.weight": weight(8, 64) for x in "qkv"})
    plan = planned(folder, "default: w8a8\nrules: [{name: '*.v_proj', preset: mxfp4}]")
    assert verdict(plan, "vLLM").loads is Loads.NO
    assert "engines run them as one layer" in verdict(plan, "vLLM").reason
    assert verdict(plan, "TensorRT-LLM").reason == "it reads one scheme a checkpoint in this layout"
