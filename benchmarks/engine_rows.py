"""The rows of benchmarks/engines.py: a layout in an engine, and how each engine runs a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WINDOW = 512
"""Tokens of a window, the first half of which is context, as llama-perplexity has it."""
Logits = torch.Tensor
Run = Callable[[Path, torch.Tensor], Logits]


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model of transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def logits_of(model: Any, tokens: torch.Tensor) -> Logits:
    """Return the float32 logits of windows of tokens."""
    with torch.no_grad():
        return torch.stack([model(window[None]).logits[0].float() for window in tokens])


def by_transformers(folder: Path, tokens: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> Logits:
    """Run a checkpoint in transformers."""
    return logits_of(load(folder, dtype), tokens)


def by_fp8(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers, which decodes its fp8 weights as it loads them."""
    from transformers import FineGrainedFP8Config

    model = load(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    return logits_of(model.float(), tokens)


def by_gptq(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers with GPTQModel's layers in plain torch, which need no compiler."""
    from transformers import GPTQConfig

    return logits_of(load(folder, quantization_config=GPTQConfig(bits=4, backend="gptq_torch")), tokens)


def by_awq(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers with GPTQModel's layers for AWQ in plain torch."""
    from transformers import AwqConfig

    return logits_of(load(folder, quantization_config=AwqConfig(bits=4, backend="torch_awq")), tokens)


def by_decoding(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers with layers of bitsandbytes that decode to float32.

    Otherwise transformers leaves other weights, and with them inputs, in bfloat16, and on a processor that
    multiplies such numbers, bitsandbytes rounds absmax to that as well.
    """
    model = load(folder)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            module.compute_dtype, module.compute_type_is_set = torch.float32, True
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16:
            weight.data = weight.data.float()
    return logits_of(model, tokens)


def by_hqq(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in a model with HQQ's own layers, which transformers 5.23 does not load by itself."""
    from hqq.core.quantize import HQQBackend, HQQLinear
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    held, parts = load_file(folder / "model.safetensors"), {}
    for name in [name for name in held if f"{name.rpartition('.')[0]}.W_q" in held]:
        layer, _, part = name.rpartition(".")
        parts.setdefault(layer, {})[part] = held.pop(name)
    missing, unknown = model.load_state_dict(held, strict=False)
    if unknown or {*missing} - {"lm_head.weight", *(f"{name}.weight" for name in parts)}:
        raise SystemExit(f"{len(missing)} weights are missing, and {len(unknown)} are not known")
    model.tie_weights()
    HQQLinear.set_backend(HQQBackend.PYTORCH)
    for name, tensors in parts.items():
        layer = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
        layer.load_state_dict(tensors)
        model.set_submodule(name, layer)
    return logits_of(model, tokens)


def by_llama_cpp(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a GGUF file in llama.cpp, without the kernels for weights in another order.

    These read past what is aligned on some machines (0.3.36), in files of its own quantizer, too.
    """
    from llama_cpp import Llama, llama_cpp

    usual = llama_cpp.llama_model_default_params()
    usual.use_extra_bufts = False
    llama_cpp.llama_model_default_params = lambda: usual
    (path,) = folder.glob("*.gguf")
    model = Llama(str(path), n_ctx=WINDOW, logits_all=True, verbose=False)
    found = []
    for window in tokens:
        model.reset()
        model.eval(window.tolist())
        found.append(torch.from_numpy(model.scores[: len(window)].copy()).float())
    return torch.stack(found)


def by_onnxruntime(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run an ONNX model in onnxruntime, which rounds inputs to 8 bits unless an option says otherwise.

    That is where it makes MatMulNBits of DequantizeLinear and MatMul.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    return torch.stack(
        [torch.from_numpy(session.run(None, {"ids": window[None].numpy()})[0][0]) for window in tokens]
    )


def by_mlx(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in mlx-lm, in float32."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return torch.stack(
        [
            torch.from_numpy(np.array(model(mx.array(window[None].numpy()))[0].astype(mx.float32)))
            for window in tokens
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout in an engine.

    package: what the engine needs. run, floats: what runs the codes, and the decoded floats. dtype: of these.
    tokens: how many of one window are run, where the engine is slow here, or all. quality: in place of a
    method, learned on a text that is not run.
    """

    scheme: str
    layout: str = "compressed-tensors"
    method: str | None = None
    quality: str | None = None
    engine: str = "transformers"
    package: str
    run: Run = by_transformers
    floats: Run = by_transformers
    dtype: str = "bfloat16"
    tokens: int | None = None

    @property
    def key(self) -> str:
        """Its words."""
        return f"{self.layout} {self.scheme} {self.engine} {self.quality or ''}".strip()

    @property
    def onnx(self) -> bool:
        """Whether the source is an ONNX model."""
        return self.engine == "onnxruntime"


def _llama_cpp(scheme: str, method: str | None = None, quality: str | None = None) -> Row:
    return Row(
        scheme=scheme,
        layout="gguf",
        method=method,
        quality=quality,
        engine="llama.cpp",
        package="llama_cpp",
        run=by_llama_cpp,
        dtype="float32",
    )


def _onnx(scheme: str, layout: str) -> Row:
    return Row(
        scheme=scheme, layout=layout, engine="onnxruntime", package="onnxruntime", run=by_onnxruntime,
        floats=by_onnxruntime, dtype="float32",
    )  # fmt: skip


_IN_BFLOAT16 = functools.partial(by_transformers, dtype=torch.bfloat16)
BFLOAT16: dict[str, Any] = {
    "engine": "transformers in bfloat16", "run": _IN_BFLOAT16, "floats": _IN_BFLOAT16,
}  # fmt: skip

ROWS = (
    *(
        Row(scheme=scheme, package="compressed_tensors")
        for scheme in (
            "w8a16",
            "int4:g64",
            "int4:g64:asym",
            "int3:g64",
            "w8a8",
            "fp8_dynamic",
            "float8_e4m3fn:block64x64",
            "nvfp4a16",
            "mxfp4a16",
        )
    ),
    # compressed-tensors decodes MXFP8 to bfloat16, whatever the model's dtype.
    *(Row(scheme=scheme, package="compressed_tensors", **BFLOAT16) for scheme in ("mxfp8", "mxfp8a16")),
    Row(scheme="mxfp6a16", package="compressed_tensors"),
    *(
        Row(
            scheme=scheme,
            layout="fp8-block",
            engine="transformers, decoding",
            package="accelerate",
            run=by_fp8,
            dtype="float32",
        )
        for scheme in (
            "float8_e4m3fn:block64x64",
            "float8_e4m3fn:block64x64:scale=rceil",
            "float8_e4m3fn:tensor",
        )
    ),
    *(
        Row(scheme=scheme, layout="bitsandbytes", package="bitsandbytes", **more)
        for scheme in ("nf4", "fp4_bnb", "nf4_double")
        for more in ({}, {"engine": "transformers, decoding", "run": by_decoding, "dtype": "float32"})
    ),
    Row(scheme="llm_int8", layout="llm-int8", package="bitsandbytes"),
    *(
        Row(scheme=scheme, layout="gptq", package="gptqmodel", run=by_gptq, dtype="float16")
        for scheme in ("int4:g64", "int4:g64:asym", "int8:g64", "int3:g64")
    ),
    Row(scheme="int4:g64:asym", layout="awq", package="gptqmodel", run=by_awq, dtype="float16"),
    *(
        Row(scheme=scheme, layout="torchao", package="torchao", dtype="float32")
        for scheme in ("int8wo", "int8dq")
    ),
    # These tensors of torchao decode to the dtype that they were made in.
    *(
        Row(scheme=scheme, layout="torchao", package="torchao", **BFLOAT16)
        for scheme in ("float8wo", "int4:g64", "int4wo", "mxfp8", "mxfp4", "nvfp4a16")
    ),
    *(
        Row(scheme=scheme, layout="hqq", engine="hqq", package="hqq", run=by_hqq, dtype="float32")
        for scheme in ("hqq_int4", "hqq_int8", "uint3:g64:asym=real")
    ),
    *(
        Row(scheme=scheme, layout="quark", package="quark", dtype="float32")
        for scheme in ("int4:g64", "w8a16", "mxfp4a16", "float8_e4m3fn:channel")
    ),
    *(_llama_cpp(scheme) for scheme in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4_e2m1")),
    *(
        _llama_cpp(scheme, "ggml")
        for scheme in (
            "iq4_nl",
            "mostly_q2_k",
            "q3_k_s",
            "q3_k_m",
            "q3_k_l",
            "q4_k_s",
            "q4_k_m",
            "q5_k_s",
            "q5_k_m",
            "mostly_q6_k",
            "mostly_iq4_xs",
        )
    ),
    *(_llama_cpp(scheme, quality="good") for scheme in ("q4_0", "q3_k_m", "q4_k_m")),
    *(
        Row(
            scheme=scheme,
            layout="mlx",
            engine="mlx-lm",
            package="mlx_lm",
            run=by_mlx,
            dtype="float32",
            tokens=64,
        )
        for scheme in ("mlx_int3", "mlx_int4", "mlx_int6", "mlx_int8", "mxfp4_e2m1")
    ),
    *(
        _onnx(scheme, "onnx")
        for scheme in (
            "int4:g64",
            "int4:g64:asym",
            "int8:channel",
            "uint8:channel:asym",
            "float8_e4m3fn:channel",
            "nvfp4a16",
        )
    ),
    *(_onnx(scheme, "onnx-matmulnbits") for scheme in ("int4:g64", "int4:g64:asym", "int8:g64")),
)
