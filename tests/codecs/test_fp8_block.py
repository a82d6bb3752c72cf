"""Files of the fp8 layout, decoded by transformers on a CPU: bit for bit what they decode to here."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import dequantized, save
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp


def llama() -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    return tiny_models.llama(**sizes).to(torch.bfloat16)


@pytest.mark.parametrize(
    "text",
    [
        "fp8_block",
        "float8_e4m3fn:block64x32",
        "float8_e4m3fn:block128x128:scale=rceil",
        "float8_e4m3fn:tensor",
    ],
)
def test_transformers_decodes_the_blocks_to_the_same_bits(text: str, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "in")
    zp.quantize_checkpoint(tmp_path / "in", tmp_path / "out", text, format="fp8-block")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section.get("scale_fmt") == ("ue8m0" if "rceil" in text else None)
    section = {key: value for key, value in section.items() if key in ("weight_block_size", "scale_fmt")}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True, **section),
        dtype=torch.bfloat16,
    )
    scheme = {"fp8_block": "float8_e4m3fn:block128x128"}.get(text, text)
    scheme += "" if "rceil" in scheme else ":scale=float32"
    found = dict(loaded.named_parameters())
    for name, weight in model.named_parameters():
        wanted = weight.detach()
        if name.endswith("_proj.weight"):
            wanted = zp.quantize(wanted, scheme).dequantize()
            assert not torch.equal(wanted, weight)
        assert found[name].dtype is torch.bfloat16
        assert torch.equal(found[name], wanted), name


def files(folder: Path, tensors: dict[str, torch.Tensor], block: list[int] | None, **more: object) -> Path:
    """Write a checkpoint of one layer, ``a``, as somebody else has it."""
    section = {"quant_method": "fp8", "weight_block_size": block, **more}
    config = {"model_type": "llama", "dtype": "float32", "quantization_config": section}
    return save(folder, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)


CODES = torch.linspace(-400, 400, 96 * 160).reshape(96, 160).to(torch.float8_e4m3fn)
POWERS = torch.tensor([[0.5, 2.0, 8.0], [1.0, 0.25, 4.0]])
OTHERS = {
    "bytes": ("weight_scale_inv", (POWERS.log2() + 127).to(torch.uint8), "scale=rceil"),
    "e8m0": ("weight_scale_inv", POWERS.to(torch.float8_e8m0fnu), "scale=rceil"),
    "float32 powers": ("weight_scale_inv", POWERS, ""),
    "DeepSeek-V4": ("scale", POWERS.to(torch.float8_e8m0fnu), "scale=rceil"),
    "Mistral": ("qscale_weight", POWERS.bfloat16(), "scale=bfloat16"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_factors_of_others_are_what_the_scheme_says(name: str, tmp_path: Path) -> None:
    part, factors, said = OTHERS[name]
    path = files(tmp_path / "in", {"weight": CODES, part: factors}, [64, 64], scale_fmt="ue8m0")
    assert zp.verify_checkpoint(path).problems == ()
    (seen,) = zp.inspect_checkpoint(path).schemes
    assert seen.scheme == ":".join(filter(None, ["float8_e4m3fn:block64x64", said]))
    each = POWERS.repeat_interleave(64, 0)[:96].repeat_interleave(64, 1)[:, :160]
    assert torch.equal(floats(path, tmp_path / "out"), CODES.float() * each)


def floats(path: Path, out: Path) -> torch.Tensor:
    return dequantized(path, out)["a.weight"]


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_factor_has_the_names_and_shapes_of_vllm_and_transformers(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {"weight": CODES, name: torch.full(shape, 0.3), "input_scale": torch.full(shape, 0.1)}
    path = files(tmp_path / "in", tensors, None, activation_scheme="static")
    assert zp.verify_checkpoint(path).problems == ()
    assert torch.equal(floats(path, tmp_path / "out"), CODES.float() * torch.tensor(0.3))


def test_factors_of_no_grid_are_named(tmp_path: Path) -> None:
    path = files(tmp_path / "in", {"weight": CODES, "scale": torch.ones(3, 3)}, [64, 64])
    (problem,) = zp.verify_checkpoint(path).problems
    assert problem.what == "its factors have shape [3, 3], but must have [2, 3]"


def test_a_scale_of_something_else_is_no_factor(tmp_path: Path) -> None:
    tensors = {"weight": CODES, "weight_scale_inv": torch.ones(2, 3), "norm.scale": torch.ones(4)}
    path = files(tmp_path / "in", tensors, [64, 64])
    assert zp.verify_checkpoint(path).problems == ()


def test_a_model_is_loaded_with_the_inputs_and_values_of_compressed_tensors(tmp_path: Path) -> None:
    model = llama().float()
    model.save_pretrained(tmp_path / "in")
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    answers = []
    for layout in ("fp8-block", "compressed-tensors"):
        out = tmp_path / layout
        zp.quantize_checkpoint(tmp_path / "in", out, "fp8", format=layout, calibration=ids)
        loaded = zp.load_checkpoint(transformers.LlamaForCausalLM(model.config).float().eval(), out).model
        with torch.no_grad():
            answers.append(loaded(ids).logits)
    assert torch.equal(*answers)
    assert not torch.equal(answers[0], model(ids).logits)
    zp.convert_checkpoint(tmp_path / "compressed-tensors", tmp_path / "converted", "fp8-block")
    own, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("fp8-block", "converted"))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name].float(), theirs[name].float()) for name in own)


def test_the_scale_of_inputs_may_have_the_name_of_vllm(tmp_path: Path) -> None:
    codes = {"weight": CODES, "weight_scale": torch.tensor(0.25)}
    answers = []
    for name in ("input_scale", "activation_scale"):
        path = files(tmp_path / name, codes | {name: torch.tensor(0.01)}, None, activation_scheme="static")
        loaded = zp.load_checkpoint(torch.nn.ModuleDict({"a": torch.nn.Linear(160, 96, bias=False)}), path)
        answers.append(loaded.model["a"](torch.linspace(-1, 1, 160)[None]))
    assert torch.equal(*answers)
