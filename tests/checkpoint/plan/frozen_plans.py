"""Plans of small checkpoints and the files that they write, as digests.

``python -m tests.checkpoint.plan.frozen_plans`` writes plans.json anew. A digest that changes is a decision
or a byte that changes: the changelog says so in bold, and why.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tests.checkpoint.quantized_inputs import BLOCKS, FP8, fp8_layer
from tests.checkpoint.written import ONE

from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, conversion_plan, make_plan
from zeropoint.checkpoint.plan.plan_document import plan_document
from zeropoint.checkpoint.plan.recipe import KEEP
from zeropoint.checkpoint.plan.rotation_plan import rotation_plan
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.registry import get_codec
from zeropoint.methods.channels import ChannelFold

PLANS = Path(__file__).with_name("plans.json")
HIDDEN, INNER, WORDS = 256, 256, 64
SIZES: Mapping[str, object] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": WORDS, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
ATTENTION = {"q": (256, HIDDEN), "k": (128, HIDDEN), "v": (128, HIDDEN), "o": (HIDDEN, 256)}
PROJECTIONS = ("gate", "up", "down")
Shapes = dict[str, tuple[int, ...]]


class Case(NamedTuple):
    """One plan of a source: ``verb`` is quantize, convert, dequantize, rotate or rescale."""

    verb: str
    to: str | None = None
    format: str = "compressed-tensors"
    options: Mapping[str, Any] = {}
    write: bool = True

    @property
    def name(self) -> str:
        """The case in words."""
        return " ".join([self.verb, self.to or "-", self.format, *self.options])


def _block(layer: int = 0, *, norms: bool = True, mlp: bool = True) -> Shapes:
    """Return the tensors of a layer as Llama has them."""
    prefix = f"model.layers.{layer}."
    shapes: Shapes = {f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in ATTENTION.items()}
    if norms:
        shapes |= dict.fromkeys(
            (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"), (HIDDEN,)
        )
    if mlp:
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def _ends(*, head: bool = True) -> Shapes:
    ends: Shapes = {"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return ends | ({"lm_head.weight": (WORDS, HIDDEN)} if head else {})


def _values(shapes: Shapes, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return numbers that are the same everywhere: RandomState's streams are frozen by NEP 19."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        stream = np.random.RandomState(number)
        values = stream.standard_normal(shape) * (0.02 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        made[name] = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return made


def _save(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], *, shards: int = 1
) -> Path:
    folder.mkdir(parents=True)
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}, indent=2))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}\n')
    return folder


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}


def llama(folder: Path) -> Path:
    """Two layers in three shards, bfloat16."""
    shapes = _ends() | _block(0) | _block(1)
    return _save(folder, _values(shapes), LLAMA | {"num_hidden_layers": 2}, shards=3)


def tied(folder: Path) -> Path:
    """One layer in float32, with biases and a head that is a copy of the embedding."""
    shapes = _ends(head=False) | _block()
    shapes |= {f"model.layers.0.self_attn.{name}_proj.bias": (shape[0],) for name, shape in ATTENTION.items()}
    tensors = _values(shapes, torch.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
    return _save(folder, tensors, config | {"dtype": "float32"})


def narrow(folder: Path) -> Path:
    """One layer in float16 whose inner size, 176, is no multiple of most groups."""
    shapes = _ends() | _block() | {"model.layers.0.mlp.down_proj.weight": (HIDDEN, 176)}
    shapes |= {f"model.layers.0.mlp.{name}_proj.weight": (176, HIDDEN) for name in ("gate", "up")}
    config = LLAMA | {"intermediate_size": 176, "dtype": "float16"}
    return _save(folder, _values(shapes, torch.float16), config)


def fused_experts(folder: Path) -> Path:
    """A mixture whose experts are two tensors of a layer."""
    shapes = _ends() | _block(mlp=False) | {"model.layers.0.mlp.gate.weight": (4, HIDDEN)}
    shapes |= {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 2 * INNER, HIDDEN),
        "model.layers.0.mlp.experts.down_proj": (4, HIDDEN, INNER),
    }
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "norm_topk_prob": True,
    }
    return _save(folder, _values(shapes), config | {"num_experts_per_tok": 2, "moe_intermediate_size": INNER})


def single_experts(folder: Path) -> Path:
    """A mixture whose experts are tensors of their own."""
    shapes = _ends() | _block(mlp=False) | {"model.layers.0.block_sparse_moe.gate.weight": (3, HIDDEN)}
    shapes |= {
        f"model.layers.0.block_sparse_moe.experts.{n}.{name}.weight": (INNER, HIDDEN)
        for n in range(3)
        for name in ("w1", "w2", "w3")
    }
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 3}
    return _save(folder, _values(shapes), config | {"num_experts_per_tok": 2})


def gpt_oss(folder: Path) -> Path:
    """A mixture whose fused experts are transposed and biased, gate and up alternating."""
    prefix = "model.layers.0.mlp."
    shapes = (
        _ends() | _block(mlp=False) | {f"{prefix}router.weight": (2, HIDDEN), f"{prefix}router.bias": (2,)}
    )
    shapes |= {f"model.layers.0.self_attn.{name}_proj.bias": (shape[0],) for name, shape in ATTENTION.items()}
    shapes |= {
        "model.layers.0.self_attn.sinks": (4,),
        f"{prefix}experts.gate_up_proj": (2, HIDDEN, 2 * INNER),
        f"{prefix}experts.gate_up_proj_bias": (2, 2 * INNER),
        f"{prefix}experts.down_proj": (2, INNER, HIDDEN),
        f"{prefix}experts.down_proj_bias": (2, HIDDEN),
    }
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 2,
        "num_experts_per_tok": 1, "layer_types": ["sliding_attention"], "sliding_window": 64,
    }  # fmt: skip
    return _save(folder, _values(shapes), config)


def deepseek(folder: Path) -> Path:
    """Latent attention, whose keys and values llama.cpp has as two tensors, one transposed."""
    prefix = "model.layers.0."
    shapes = _ends() | {
        f"{prefix}input_layernorm.weight": (HIDDEN,), f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_a_proj.weight": (256, HIDDEN),
        f"{prefix}self_attn.q_a_layernorm.weight": (256,),
        f"{prefix}self_attn.q_b_proj.weight": (4 * 96, 256),
        f"{prefix}self_attn.kv_a_proj_with_mqa.weight": (256 + 32, HIDDEN),
        f"{prefix}self_attn.kv_a_layernorm.weight": (256,),
        f"{prefix}self_attn.kv_b_proj.weight": (4 * 128, 256),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, 4 * 64),
        **{f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in PROJECTIONS},
    }  # fmt: skip
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 2,
        "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
        "v_head_dim": 64, "first_k_dense_replace": 1, "num_experts_per_tok": 1, "num_key_value_heads": 4,
        "moe_intermediate_size": INNER,
    }  # fmt: skip
    return _save(folder, _values(shapes), config)


def linear_attention(folder: Path) -> Path:
    """Qwen3-Next: joint projections that llama.cpp cuts, and columns in another order."""
    prefix = "model.layers.0."
    shapes = _ends() | {
        f"{prefix}input_layernorm.weight": (HIDDEN,), f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}linear_attn.in_proj_qkvz.weight": (2 * 2 * 64 + 2 * 4 * 64, HIDDEN),
        f"{prefix}linear_attn.in_proj_ba.weight": (8, HIDDEN),
        f"{prefix}linear_attn.conv1d.weight": (2 * 2 * 64 + 4 * 64, 1, 4),
        f"{prefix}linear_attn.A_log": (4,), f"{prefix}linear_attn.dt_bias": (4,),
        f"{prefix}linear_attn.norm.weight": (64,), f"{prefix}linear_attn.out_proj.weight": (HIDDEN, 256),
        f"{prefix}mlp.gate.weight": (2, HIDDEN), f"{prefix}mlp.shared_expert_gate.weight": (1, HIDDEN),
        **{f"{prefix}mlp.shared_expert.{name}_proj.weight": (INNER, HIDDEN) for name in PROJECTIONS},
        f"{prefix}mlp.experts.gate_up_proj": (2, 2 * INNER, HIDDEN),
        f"{prefix}mlp.experts.down_proj": (2, HIDDEN, INNER),
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"],
    }  # fmt: skip
    return _save(folder, _values(shapes), config)


def bert(folder: Path) -> Path:
    """An encoder with an embedding of positions, a pooler and a tied head."""
    shapes: Shapes = {
        "bert.embeddings.word_embeddings.weight": (WORDS, HIDDEN),
        "bert.embeddings.position_embeddings.weight": (32, HIDDEN),
        "bert.embeddings.LayerNorm.weight": (HIDDEN,), "cls.predictions.bias": (WORDS,),
        "bert.encoder.layer.0.intermediate.dense.weight": (INNER, HIDDEN),
        "bert.encoder.layer.0.output.dense.weight": (HIDDEN, INNER),
        "bert.pooler.dense.weight": (HIDDEN, HIDDEN),
        "cls.predictions.transform.dense.weight": (HIDDEN, HIDDEN),
    }  # fmt: skip
    for name in ("query", "key", "value"):
        shapes[f"bert.encoder.layer.0.attention.self.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"bert.encoder.layer.0.attention.self.{name}.bias"] = (HIDDEN,)
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "dtype": "float32"}
    return _save(folder, _values(shapes, torch.float32), config)


def vision(folder: Path) -> Path:
    """A model of images and text: convolutions, a tower and a decoder."""
    shapes = _ends() | _block() | {
        "visual.patch_embed.proj.weight": (HIDDEN, 3, 2, 4, 4),
        "visual.blocks.0.attn.qkv.weight": (3 * HIDDEN, HIDDEN),
        "visual.blocks.0.attn.proj.weight": (HIDDEN, HIDDEN),
        "visual.merger.mlp.0.weight": (INNER, HIDDEN), "encoder.conv1.weight": (HIDDEN, 80, 3),
        "audio.conv.weight": (HIDDEN, HIDDEN, 1, 1),
    }  # fmt: skip
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    return _save(folder, _values(shapes), config)


def fp8_experts(folder: Path) -> Path:
    """Fused experts and a matrix in blocks of float8, with scales of inputs and of a cache."""
    up, experts = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    tensors = fp8_layer(up, (256, 256)) | fp8_layer(experts, (2, 256, 256), seed=1)
    tensors |= {
        "model.layers.0.mlp.up_proj.input_scale": torch.ones(1),
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    return _save(folder, tensors, LLAMA | {"quantization_config": BLOCKS})


def fp8_tensors(folder: Path) -> Path:
    """Matrices of float8 with one scale each, and the scales of their inputs."""
    tensors = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for number, name in enumerate(("q", "k", "v")):
        module = f"model.layers.0.self_attn.{name}_proj"
        codes = fp8_layer(f"{module}.weight", (128, HIDDEN), seed=number)[f"{module}.weight"]
        tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": torch.tensor(0.01 + number / 128)}
        tensors[f"{module}.input_scale"] = torch.tensor(0.5)
    return _save(folder, tensors, LLAMA | {"quantization_config": FP8 | {"activation_scheme": "static"}})


def _graph(folder: Path) -> Path:
    """A graph of ONNX with weights of each kind of node."""
    from tests.codecs import onnx_models  # onnx and onnxruntime take a second

    folder.mkdir(parents=True)
    return onnx_models.save(onnx_models.model(), folder)


def written(source: Callable[[Path], Path], case: Case) -> Callable[[Path], Path]:
    """Return a source that is what a case writes."""

    def write(folder: Path) -> Path:
        plan = plan_of(source(folder / "floats"), case)
        run(plan, folder / "model")
        return folder / "model"

    return write


def _quantized(
    to: str, codec: str = "compressed-tensors", source: Callable[[Path], Path] = llama
) -> Callable[[Path], Path]:
    return written(source, Case("quantize", to, codec))


Q = Case
GGUF = "gguf"
SOURCES: Mapping[str, tuple[Callable[[Path], Path], tuple[Case, ...]]] = {
    "llama": (llama, (
        Q("quantize", "w4a16"), Q("quantize", "int4:g32", "gptq"), Q("quantize", "nvfp4a16"),
        Q("quantize", "w8a8_static", write=False), Q("quantize", "mxfp4", options={"ignore": ("*o_proj*",)}),
        Q("rotate", "F32"), Q("rescale", "int4:g32"),
    )),
    "llama for other engines": (llama, (
        Q("quantize", "int4:g128:asym", "awq"), Q("quantize", "q4_k", GGUF),
        Q("quantize", "nf4", "bitsandbytes"), Q("quantize", "mlx_int4", "mlx"),
    )),
    "tied": (tied, (
        Q("quantize", "fp8_block", "fp8-block"), Q("quantize", "q8_0", GGUF), Q("rotate"),
        Q("quantize", "w8a16", options={"include": ("*embed_tokens*",)}),
    )),
    "narrow": (narrow, (Q("quantize", "w4a16"), Q("quantize", "w4a16", options={"fit": True}))),
    "fused experts": (fused_experts, (
        Q("quantize", "w4a16"), Q("quantize", "mxfp4", "gpt-oss"), Q("quantize", "q4_0", GGUF),
        Q("quantize", "mlx_int4", "mlx"),
    )),
    "single experts": (single_experts, (Q("quantize", "nvfp4a16"), Q("quantize", "q4_k", GGUF), Q("rotate"))),
    "gpt-oss": (gpt_oss, (Q("quantize", "mxfp4", "gpt-oss"), Q("quantize", "mxfp4_e2m1", GGUF))),
    "deepseek": (deepseek, (Q("quantize", "q8_0", GGUF), Q("quantize", "fp8_dynamic"))),
    "linear attention": (linear_attention, (Q("quantize", "q8_0", GGUF),)),
    "encoder": (bert, (Q("quantize", "int8:channel"), Q("quantize", "quanto_int8", "quanto"))),
    "vision": (vision, (Q("quantize", "w8a8"), Q("quantize", "hqq_int4", "hqq"))),
    "fp8 experts": (fp8_experts, (
        Q("dequantize"), Q("convert", None),
        Q("quantize", "w4a16", options={"dequantize": DequantizePolicy.EVERY}),
    )),
    "fp8 tensors": (fp8_tensors, (Q("dequantize", "F32"), Q("convert", None))),
    "gptq": (_quantized("int4:g64", "gptq"), (
        Q("convert", None), Q("convert", None, "awq"), Q("convert", None, "mlx"),
        Q("convert", "q4_0", GGUF, {"requantize": True}),
    )),
    "bitsandbytes": (_quantized("nf4", "bitsandbytes"), (Q("dequantize"),)),
    "mxfp4": (_quantized("mxfp4a16"), (Q("convert", "nvfp4a16"), Q("convert", None, GGUF))),
    "gguf": (_quantized("q8_0", GGUF), (
        Q("convert", None), Q("convert", None, "gptq"), Q("dequantize", "F16"),
    )),
    "gguf of experts": (_quantized("q8_0", GGUF, gpt_oss), (Q("dequantize"), Q("convert", None))),
    "gguf of deepseek": (_quantized("q8_0", GGUF, deepseek), (Q("dequantize"),)),
    "gguf of linear attention": (_quantized("q8_0", GGUF, linear_attention), (Q("dequantize", "F32"),)),
    "gpt-oss in mxfp4": (_quantized("mxfp4", "gpt-oss", gpt_oss), (
        Q("dequantize"), Q("convert", None, GGUF),
    )),
    "graph": (_graph, (Q("quantize", "w8a16", "onnx"), Q("quantize", "int4:g32:asym", "onnx-matmulnbits"))),
}  # fmt: skip


def plan_of(path: Path, case: Case) -> CheckpointPlan:
    """Return the plan of a case for the source at a path."""
    source, codec = open_source(path), get_codec(case.format)
    if case.verb == "rotate":
        return rotation_plan(source, dtype=case.to, limits=ONE)
    if case.verb == "convert":
        return conversion_plan(source, case.to, codec, limits=ONE, **case.options)
    if case.verb == "dequantize":
        every = Selection(dequantize=DequantizePolicy.EVERY, floats=case.to)
        return make_plan(source, KEEP, selection=every, limits=ONE)
    assert case.to is not None
    folds = _folds() if case.verb == "rescale" else None
    selection = Selection(**case.options)
    return make_plan(source, case.to, selection=selection, codec=codec, folds=folds, limits=ONE)


def _folds() -> dict[str, ChannelFold]:
    """Return powers of two that move from a norm into what reads it."""
    steps = torch.arange(HIDDEN).remainder(3) * 8
    readers = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    folds = {name: ChannelFold(columns=steps) for name in readers}
    return {**folds, "model.layers.0.post_attention_layernorm.weight": ChannelFold(rows=-steps)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def frozen(plan: CheckpointPlan) -> dict[str, Any]:
    """Return the numbers of a plan document, and digests of its lists."""
    text = json.dumps(plan_document(plan)).replace(str(plan.source.root), "SOURCE")
    document = json.loads(text)
    del document["identity"]["zeropoint"]
    # What engines load is said by their codecs, which have tests of their own.
    del document["engines"]
    actions = Counter(tensor["action"] for tensor in document["tensors"])
    outputs = sum(len(tensor["outputs"]) for tensor in document["tensors"])
    says = ", ".join(f"{number} {action}" for action, number in sorted(actions.items()))
    parts = {
        key: value if isinstance(value, int | float) else _digest(value) for key, value in document.items()
    }
    return {"tensors in words": f"{says}; {outputs} written", **parts}


def of_source(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the frozen plan of each case of a source, with a digest of the weights files that it writes."""
    write, cases = SOURCES[name]
    path = write(folder / "source")
    for number, case in enumerate(cases):
        plan, out = plan_of(path, case), folder / str(number)
        found = frozen(plan)
        if case.write:
            run(plan, out)
            found["weights"] = _digest([_digest_of(out / shard.name) for shard in plan.shards])
        yield f"{name}: {case.name}", found


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        every = dict(each for name in SOURCES for each in of_source(name, Path(top, name)))
    lines = [f"{json.dumps(case)}: {json.dumps(found)}" for case, found in every.items()]
    PLANS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
