"""How far methods that learn from data bring a model: `python benchmarks/methods.py --model DIR [--oracle]`.

DIR is a folder that `tuned_smollm2.py` makes. For each scheme and method the model is quantized by
`zp.quantize_checkpoint` in a process of its own, on `calib.safetensors` where the method takes data; then the
decoded weights run in transformers, in float32, on 8 windows of 512 tokens of `eval.safetensors`, of which
the second half is scored: KL divergence to the float model over 2,048 tokens, with its standard error. A
scheme such as `int4:g64` is one of weights alone; under `int4:g64+int8:token` inputs of the layers in blocks
are rounded, too, by the same code for every row; `gguf:q4_k_m` is a file of llama.cpp.

Rows are paired token by token: with the first method of the scheme, and, with `--oracle`, with an independent
GPTQ and GPTAQ (tests/oracles/independent_gptq.py) on the same windows and the scales of `mse_weighted`.
Standard errors take tokens as independent, and say nothing of other texts, models or windows. A method that
this version does not have is a row that says so.

With `--peers all` there are rows of llm-compressor, ModelOpt, auto-round and GPTQModel, on the same windows
(benchmarks/methods_peer.py), in environments that `benchmarks/method_peers.sh` makes.

Results stay in a file (`--cache`) by model, scheme, method and the commit of src (with a hash of the sources,
where they differ from it); rows of the oracle by the hash of its files in place of the commit. CPU seconds
are those of the process, with loading and writing; on a busy machine they are the ones to compare, and
`--threads 1` keeps threads from waiting for each other. A row that failed is tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import describe, machine, record
from methods_peer import LOGITS, PEERS, Written
from methods_row import GGUF, INPUTS
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import zeropoint as zp
from zeropoint.eval.estimates import Estimate, mean_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WINDOWS, LENGTH = 8, 512
"""Of the evaluation."""
ORACLES = {"oracle gptq": 0.0, "oracle gptaq": 0.25}
"""Rows of the oracle: the strength of GPTAQ's correction."""
WIDTH = 160
"""Characters of a line where the output is no terminal."""
_ROWS = 256
"""Positions that are scored at once, which bounds the memory of float64 numbers over a vocabulary."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that is asked for. method: of zeropoint, or a name of :data:`ORACLES` or of a peer."""

    scheme: str
    method: str

    def program(self, model: Path, out: Path) -> list[str]:
        """Return the arguments of the process that makes the model."""
        if self.method in PEERS:
            # -P: modules of benchmarks have names that packages of peers look for.
            own = [str(HERE / PEERS[self.method][0] / "bin/python"), "-P", str(HERE / "methods_peer.py")]
            return [*own, self.method, *map(str, (model, out, self.scheme))]
        if self.method in ORACLES:
            asked = ["methods_oracle.py", model, out, self.scheme, ORACLES[self.method]]
        else:
            asked = ["methods_row.py", model, out, self.scheme, self.method, model / "calib.safetensors"]
        return [sys.executable, str(HERE / asked[0]), *map(str, asked[1:])]

    def made_by(self, sources: str) -> str:
        """Return the version of the code behind the row: ``sources``, or the hash of another program."""
        if self.method in PEERS:
            return digest(HERE / "methods_peer.py")
        if self.method not in ORACLES:
            return sources
        return digest(ROOT / "tests/oracles/independent_gptq.py", HERE / "methods_oracle.py")


def digest(*paths: Path) -> str:
    """Return the first digits of the hash of files and their names."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.name.encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def sources() -> str:
    """Return the commit of src, with a hash of its files where they are not those of the commit."""
    git = ["git", "-C", str(ROOT)]
    asked = [[*git, "log", "-1", "--format=%h", "--", "src"], [*git, "status", "--porcelain", "--", "src"]]
    commit, changed = (
        subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked
    )
    return f"{commit}+{digest(*sorted((ROOT / 'src').rglob('*.py')))}" if changed else commit


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The float model on the text.

    ids: (windows, length) tokens. log_p: (scored, vocabulary) log-probabilities, float32.
    """

    ids: torch.Tensor
    log_p: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """The scored tokens: the second half of each window."""
        return self.ids[:, self.ids.shape[1] // 2 :].flatten()

    @staticmethod
    def of(folder: Path, windows: int) -> Reference:
        """Run the float model of a folder."""
        ids = load_file(folder / "eval.safetensors")["input_ids"][: windows * LENGTH].reshape(windows, LENGTH)
        return Reference(ids=ids, log_p=log_probabilities(folder, ids, inputs=""))

    @property
    def perplexity(self) -> float:
        """The perplexity of the float model on the scored tokens."""
        return float(self.log_p.gather(1, self.targets[:, None]).double().mean().neg().exp())

    def scores(self, log_q: torch.Tensor) -> dict[str, list[float]]:
        """Return the KL divergence and the negative log-likelihood of each token, and whether tops agree."""
        found: dict[str, list[float]] = {"kld": [], "nll": [], "same_top": []}
        for at in range(0, len(log_q), _ROWS):
            p, q = self.log_p[at : at + _ROWS].double(), log_q[at : at + _ROWS].double()
            nll = -q.gather(1, self.targets[at : at + _ROWS, None])[:, 0]
            found["kld"] += [round(x, 7) for x in (p.exp() * (p - q)).sum(-1).tolist()]
            found["nll"] += [round(x, 6) for x in nll.tolist()]
            found["same_top"] += (p.argmax(-1) == q.argmax(-1)).double().tolist()
        return found


@torch.no_grad()
def log_probabilities(folder: Path, ids: torch.Tensor, *, inputs: str) -> torch.Tensor:
    """Log-probabilities of the second half of each window: (scored, vocabulary).

    inputs: the scheme to which inputs of linear layers in blocks are rounded; empty for none.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if inputs and ".layers." in name and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (zp.fake_quantize(given[0], inputs),))
    half = ids.shape[1] // 2
    logits = [model(input_ids=window[None]).logits[0, half - 1 : -1].log_softmax(-1) for window in ids]
    return torch.cat(logits)


def made(case: Case, model: Path, out: Path, threads: int | None) -> Row:
    """Make the model of a row in a process; return what it took, or why there is none."""
    own = dict(os.environ)
    if case.method not in PEERS:
        own["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT, HERE)))
    if threads is not None:
        own["OMP_NUM_THREADS"] = own["NUMBA_NUM_THREADS"] = str(threads)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(case.program(model, out), env=own, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"}
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    said: Row = json.loads(done.stdout.splitlines()[-1])
    return said | {"wall_s": round(seconds, 1), "cpu_s": round(cpu, 1), "load": round(os.getloadavg()[0], 1)}


def measured(case: Case, model: Path, reference: Reference, threads: int | None) -> Row:
    """Return the row of a case: costs, and the numbers of each token."""
    with tempfile.TemporaryDirectory() as temporary:
        out, floats = Path(temporary) / "out", Path(temporary) / "floats"
        row = made(case, model, out, threads)
        if "unknown" in row or "failed" in row:
            return row
        if row.get("written") == Written.LOGITS:
            return row | reference.scores(load_file(out / LOGITS)["log_p"])
        if case.method in ORACLES or row.get("written") == Written.FLOATS:
            floats = out
        elif case.scheme.startswith(GGUF):
            zp.convert_checkpoint(out / "model.gguf", floats, to="float32")
        else:
            zp.dequantize_checkpoint(out, floats, dtype="float32")
        _, _, inputs = case.scheme.partition(INPUTS)
        return row | reference.scores(log_probabilities(floats, reference.ids, inputs=inputs))


def estimates(row: Row) -> dict[str, Estimate]:
    """Return the means of a row's tokens."""
    return {name: mean_of(np.array(row[name])) for name in ("kld", "nll", "same_top")}


def less(row: Row, other: Row | None) -> Estimate | None:
    """Return the KL divergence of a row less that of another one, paired by tokens."""
    if other is None or row is other or "kld" not in row or "kld" not in other:
        return None
    return mean_of(np.array(row["kld"]) - np.array(other["kld"]))


def pairs(rows: dict[str, Row]) -> dict[str, Row | None]:
    """Return the rows that others are paired with, by the heads of columns: the first, and the oracle."""
    first = next((name for name, row in rows.items() if "kld" in row), None)
    heads = [name for name in (first, *ORACLES) if name is not None and name in rows]
    return {f"less {name}": rows[name] for name in dict.fromkeys(heads)}


def summary(scheme: str, rows: dict[str, Row]) -> list[Row]:
    """Return what is recorded of the rows of a scheme: no number for each token."""
    found = []
    for method, row in rows.items():
        own = {key: value for key, value in row.items() if key not in ("kld", "nll", "same_top")}
        if "kld" in row:
            means = estimates(row)
            own |= {key: {"value": e.value, "error": e.error} for key, e in means.items()}
            own["perplexity"] = math.exp(means["nll"].value)
            own["paired"] = {
                head: {"value": e.value, "error": e.error}
                for head, other in pairs(rows).items()
                if (e := less(row, other)) is not None
            }
        found.append({"scheme": scheme, "method": method, **own})
    return found


def table(title: str, rows: dict[str, Row]) -> Table:
    """Return the rows of a scheme as a table; differences beyond two standard errors are bold."""
    heads = pairs(rows)
    shown = Table(title=title)
    for head in ("method", "KL", "x first", *heads, "ppl", "same top, %", "wall s", "CPU s", "peak MB"):
        shown.add_column(head, justify="left" if head == "method" else "right")
    first = next((estimates(row)["kld"].value for row in rows.values() if "kld" in row), math.nan)
    for method, row in rows.items():
        if "kld" not in row:
            shown.add_row(method, "unknown method" if "unknown" in row else f"failed: {row['failed'][:60]}")
            continue
        means = estimates(row)
        kld = means["kld"]
        shown.add_row(
            method, f"{kld.value:.4f} ± {kld.error:.4f}", f"{kld.value / first:.2f}",
            *(difference(less(row, other)) for other in heads.values()),
            f"{math.exp(means['nll'].value):.2f}", f"{100 * means['same_top'].value:.1f}",
            f"{row['wall_s']:.0f}", f"{row['cpu_s']:.0f}", str(row["peak_mb"]),
        )  # fmt: skip
    return shown


def difference(found: Estimate | None) -> str:
    """Return a paired difference with its sign, in bold where it is beyond two standard errors."""
    if found is None or found.error is None:
        return ""
    text = f"{found.value:+.4f} ± {found.error:.4f}"
    return f"[bold]{text}[/bold]" if abs(found.value) > 2 * found.error else text


def main() -> None:
    """Measure, print tables, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder of tuned_smollm2.py")
    parser.add_argument("--schemes", default="int4:g64,int3:g64,nvfp4a16,mxfp4a16")
    parser.add_argument("--methods", default="nearest,mse,mse_weighted,gptq")
    parser.add_argument("--oracle", action="store_true", help="rows of the independent GPTQ and GPTAQ, too")
    parser.add_argument("--peers", default="", help="rows of other tools, joined by commas, or all, too")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of 512 tokens of the evaluation")
    parser.add_argument("--threads", type=int, default=None, help="of the processes that quantize")
    parser.add_argument("--cache", type=Path, default=Path("build/methods.json"))
    parser.add_argument("--fresh", action="store_true", help="measure what is in the cache again")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    peers = [*PEERS] if args.peers == "all" else [name for name in args.peers.split(",") if name]
    if not set(peers) <= PEERS.keys():
        parser.error(f"--peers: choose from all, {', '.join(PEERS)}")
    facts, code = machine(), sources()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    names = ("model.safetensors", "calib.safetensors", "eval.safetensors")
    model = digest(*(args.model / name for name in names))
    cache: dict[str, Row] = json.loads(args.cache.read_text()) if args.cache.exists() else {}
    reference, figures, floats = None, [], f"{model} {args.windows} float"
    if floats not in cache:
        reference = Reference.of(args.model, args.windows)
        cache[floats] = {"perplexity": reference.perplexity}
    for scheme in args.schemes.split(","):
        rows = {}
        others = [*(ORACLES if args.oracle else ()), *peers]
        for method in [*args.methods.split(","), *others]:
            case = Case(scheme=scheme, method=method)
            key = f"{model} {args.windows} {scheme} {method} {case.made_by(code)}"
            if args.fresh or key not in cache:
                reference = reference or Reference.of(args.model, args.windows)
                row = measured(case, args.model, reference, args.threads)
                cache[key] = row | {"threads": args.threads}
                kept = {name: found for name, found in cache.items() if "failed" not in found}
                args.cache.parent.mkdir(parents=True, exist_ok=True)
                args.cache.write_text(json.dumps(kept))
                Console(stderr=True).print(f"{scheme} {method}: {costs(row)}", soft_wrap=True)
            rows[method] = cache[key]
        own = cache[floats]["perplexity"]
        console.print(table(f"{scheme} (float model: perplexity {own:.2f})", rows))
        figures += summary(scheme, rows)
    console.print(describe(facts), soft_wrap=True)
    record(args.json, facts, model=model, sources=code, rows=figures)


def costs(row: Row) -> str:
    """Return a line about a row that was measured."""
    if "kld" not in row:
        return str(row.get("unknown") or row.get("failed"))
    return f"KL {estimates(row)['kld'].value:.4f}, {row['wall_s']} s of wall, {row['cpu_s']} s of CPU"


if __name__ == "__main__":
    main()
