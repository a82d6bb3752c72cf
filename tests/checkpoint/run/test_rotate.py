"""A rotated checkpoint is the same model: by transformers, and by rotations written out as matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.interrupted import stop_after
from tests.checkpoint.written import ONE, digests, save, tensors_of, weight
from tests.peers import Peer
from tests.peers import transformers as tf
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.plan.residual_stream import FAMILIES
from zeropoint.checkpoint.plan.rotation_plan import rotation_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.errors import CheckpointError, DtypeError, SchemeError, UnsupportedError, ZeropointError
from zeropoint.methods.rotate import ModelRotation
from zeropoint.ops.rotation import Rotation

pytestmark = pytest.mark.rotating

linalg = Peer("scipy.linalg")

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**SIZES, "tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TINY = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "llama with biases": lambda: tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama with a tied head": lambda: tf.LlamaConfig(**TIED),
    "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=8),
    "qwen2 with a tied head": lambda: tf.Qwen2Config(**TIED),
    "qwen3": lambda: tf.Qwen3Config(**SIZES),
    "smollm3 with a tied head": lambda: tf.SmolLM3Config(**TIED),
    "granite": lambda: tf.GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.5),
    "gemma with a tied head": lambda: tf.GemmaConfig(**TIED),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]),
}
IDS = torch.arange(3, 35).reshape(2, 16)
EXACT = 5e-6
"""Of the largest logit: two models of float32 add the same numbers in other bases."""


def write(folder: Path, config: tf.PretrainedConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Write a model with random weights, norms and biases among them, and return its logits."""
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
    model.to(dtype).save_pretrained(folder)
    return logits(folder)


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model, info = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    found: torch.Tensor = model.eval()(IDS).logits
    return found


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def plan_of(source: Path, limits: Limits = ONE, **asked: Any) -> CheckpointPlan:
    dtype = asked.pop("dtype", None)
    return rotation_plan(open_source(source), ModelRotation(**asked), dtype=dtype, limits=limits)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write(tmp_path / "in", TINY["llama"]())
    return tmp_path / "in"


@pytest.mark.parametrize("name", TINY)
def test_the_logits_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    before = write(tmp_path / "in", TINY[name]())
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "out", seed=5)
    assert apart(before, logits(tmp_path / "out")) < EXACT
    old, new = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    shares = {name: apart(old[name], new[name]) for name in old if old[name].ndim == 2}
    assert min(shares.values()) > 0.1 or "mlp" in min(shares, key=shares.__getitem__), shares


def test_every_family_is_tried() -> None:
    assert {config().model_type for config in TINY.values()} == set(FAMILIES)


def matrix(width: int, size: int, seed: int) -> torch.Tensor:
    """Return D H / sqrt(b) of a side, by scipy."""
    h = torch.from_numpy(linalg.hadamard(size)).double() / size**0.5
    blocks = torch.block_diag(*[h] * (width // size))
    return torch.diag(Rotation(size=size, seed=seed).signs(width).double()) @ blocks


def test_weights_are_products_with_the_matrices_of_the_papers(tmp_path: Path) -> None:
    write(tmp_path / "in", TINY["llama with biases"]())
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "out", seed=7, block=16)
    old, new = ({n: t.double() for n, t in tensors_of(tmp_path / side).items()} for side in ("in", "out"))
    r1, head = matrix(96, 16, 7), matrix(24, 8, 7)
    layer = "model.layers.1."
    gain, after = (old[f"{layer}{norm}.weight"] for norm in ("input_layernorm", "post_attention_layernorm"))
    values, heads = torch.block_diag(head, head), torch.block_diag(*[head] * 4)
    expected = {
        "model.embed_tokens.weight": old["model.embed_tokens.weight"] @ r1,
        "lm_head.weight": old["lm_head.weight"] * old["model.norm.weight"] @ r1,
        "model.norm.weight": torch.ones(96),
        f"{layer}input_layernorm.weight": torch.ones(96),
        f"{layer}self_attn.q_proj.weight": old[f"{layer}self_attn.q_proj.weight"] * gain @ r1,
        f"{layer}self_attn.q_proj.bias": old[f"{layer}self_attn.q_proj.bias"],
        f"{layer}self_attn.v_proj.weight": values.T @ (old[f"{layer}self_attn.v_proj.weight"] * gain) @ r1,
        f"{layer}self_attn.v_proj.bias": values.T @ old[f"{layer}self_attn.v_proj.bias"],
        f"{layer}self_attn.o_proj.weight": r1.T @ old[f"{layer}self_attn.o_proj.weight"] @ heads,
        f"{layer}self_attn.o_proj.bias": r1.T @ old[f"{layer}self_attn.o_proj.bias"],
        f"{layer}mlp.up_proj.weight": old[f"{layer}mlp.up_proj.weight"] * after @ r1,
        f"{layer}mlp.up_proj.bias": old[f"{layer}mlp.up_proj.bias"],
        f"{layer}mlp.down_proj.weight": r1.T @ old[f"{layer}mlp.down_proj.weight"],
        f"{layer}mlp.down_proj.bias": r1.T @ old[f"{layer}mlp.down_proj.bias"],
    }
    for name, tensor in expected.items():
        # Half a step of float32 of the largest number, as each is rounded once.
        torch.testing.assert_close(new[name], tensor.double(), rtol=6e-8, atol=1e-10, msg=name)


def test_a_tied_head_is_written_apart_with_a_note_of_its_size(tmp_path: Path) -> None:
    write(tmp_path / "in", TINY["llama with a tied head"]())
    result = zp.rotate_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "lm_head was tied to the embedding and is written apart, which adds 60 KiB" in result.notes[-1]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert not torch.equal(
        *(tensors_of(tmp_path / "out")[n] for n in ("lm_head.weight", "model.embed_tokens.weight"))
    )
    source = json.loads((tmp_path / "in/config.json").read_text())
    assert {**source, "tie_word_embeddings": False} == config


def test_a_copy_of_a_tied_head_is_not_read(tmp_path: Path) -> None:
    before = write(tmp_path / "in", TINY["llama with a tied head"]())
    tensors = tensors_of(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    save(tmp_path / "in", {**tensors, "lm_head.weight": weight(160, 96, seed=9)}, config)
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "out")
    assert apart(before, logits(tmp_path / "out")) < EXACT


def test_each_tensor_keeps_its_dtype_or_takes_the_one_asked_for(tmp_path: Path) -> None:
    before = write(tmp_path / "in", TINY["llama"](), torch.bfloat16)
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "same")
    zp.rotate_checkpoint(tmp_path / "in", tmp_path / "wide", dtype="float32")
    assert {t.dtype for t in tensors_of(tmp_path / "same").values()} == {torch.bfloat16}
    assert {t.dtype for t in tensors_of(tmp_path / "wide").values()} == {torch.float32}
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    assert apart(before, logits(tmp_path / "wide")) < EXACT
    assert EXACT < apart(before, logits(tmp_path / "same")) < 0.05
    for name, tensor in tensors_of(tmp_path / "wide").items():
        assert same_bytes(tensor.bfloat16(), tensors_of(tmp_path / "same")[name]), name


WAYS = (
    Limits(workers=2, tile_values=500),
    Limits(workers=5, tile_values=77_777),
    Limits(workers=2, max_memory=BASE_MEMORY + (1 << 20)),
)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("limits", WAYS, ids=lambda limits: f"{limits.workers}-{limits.tile_values}")
@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_every_file_has_the_same_bytes_however_a_run_goes(
    llama: Path, tmp_path: Path, limits: Limits, dtype: str | None
) -> None:
    run(plan_of(llama, dtype=dtype), tmp_path / "golden")
    plan = plan_of(llama, limits, dtype=dtype)
    for count in (1, 6):
        stop_after(plan, tmp_path / "out", count)
        assert not (tmp_path / "out/model.safetensors").exists()
    run(plan, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "golden")


@pytest.mark.usefixtures("small_units")
def test_a_run_with_another_seed_is_not_resumed(llama: Path, tmp_path: Path) -> None:
    stop_after(plan_of(llama), tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match=r"differs in 'recipe'.*hadamard32, heads hadamard8.*@1"):
        run(plan_of(llama, seed=1), tmp_path / "out")


def test_a_rotated_checkpoint_is_quantized_like_any_other(llama: Path, tmp_path: Path) -> None:
    zp.rotate_checkpoint(llama, tmp_path / "rotated")
    zp.quantize_checkpoint(tmp_path / "rotated", tmp_path / "out", "w8a16:g32")
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "rotated").ok
    assert apart(logits(tmp_path / "rotated"), logits(tmp_path / "out")) < 0.05


def changed(llama: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Change the configuration and the tensors of a checkpoint."""
    config, tensors = json.loads((llama / "config.json").read_text()), tensors_of(llama)
    change(config, tensors)
    return save(llama, tensors, config)


NORM = "model.layers.1.post_attention_layernorm.weight"
BAD: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "of a family that is not known": (
        lambda config, _: config.update(model_type="zebra"),
        "models of the family 'zebra' are not rotated: which of its tensors read and write the",
    ),
    "with norms after layers": (
        lambda config, _: config.update(model_type="gemma2"),
        "models of the family 'gemma2' are not rotated: its layers normalize what they add",
    ),
    "with norms that subtract the mean": (
        lambda config, _: config.update(model_type="gpt2"), "its norms subtract the mean",
    ),
    "without a family": (lambda config, _: config.pop("model_type"), "no config.json names the family"),
    "without a norm": (lambda _, tensors: tensors.pop(NORM), f"tensor '{NORM}' is missing"),
    "with another tensor": (
        lambda _, tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(4, 96)}),
        "tensor 'model.layers.0.mlp.gate.weight' is not one that models of the family llama have",
    ),
    "with another width": (
        lambda config, _: config.update(hidden_size=64), "does not fit the hidden_size 64 and heads of 24",
    ),
    "with a number that is none": (
        lambda config, _: config.update(hidden_size="wide"), "hidden_size (='wide') of config.json must be",
    ),
    "that is quantized": (
        lambda config, _: config.update(quantization_config={"quant_method": "fp8"}),
        "is quantized already (quantization_config says 'fp8'); pass the original checkpoint",
    ),
    "without a head": (
        lambda config, tensors: (config.update(architectures=["LlamaModel"]), tensors.pop("lm_head.weight")),
        "the model has no lm_head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_checkpoint_is_refused(what: str, llama: Path, tmp_path: Path) -> None:
    change, message = BAD[what]
    with pytest.raises(ZeropointError) as error:
        zp.rotate_checkpoint(changed(llama, change), tmp_path / "out")
    assert message in str(error.value)
    assert isinstance(error.value, (CheckpointError, UnsupportedError))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        (
            {"block": 64},
            CheckpointError,
            r"block \(=64\) must be a power of two that divides the hidden_size 96",
        ),
        ({"block": 3}, CheckpointError, r"block \(=3\) must be a power of two.*use 32 or less"),
        ({"seed": -1}, SchemeError, r"seed \(=-1\) of a rotation must be at least 0"),
        ({"dtype": "int8"}, DtypeError, r"dtype \(='int8'\) must be one of bfloat16, float16, float32"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    llama: Path, tmp_path: Path, asked: dict[str, Any], kind: type[ZeropointError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        zp.rotate_checkpoint(llama, tmp_path / "out", **asked)


def test_memory_that_is_too_little_for_a_block_of_rows_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is too little for 32 rows of 80 columns"):
        run(plan_of(llama, Limits(workers=1, max_memory=BASE_MEMORY + 8000)), tmp_path / "out")
