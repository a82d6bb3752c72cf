"""Measure the memory of commands on one large GGUF file: `python benchmarks/large_gguf.py [--gigabytes 20]`.

Writes a GGUF file of a Llama, whose matrices are blocks of Q8_0 from one random piece that is repeated: that
takes no time, and no command looks at more than a tile at once. Then it runs, each as a fresh process,

    zeropoint inspect FILE
    zeropoint verify FILE
    zeropoint convert FILE OUT --format compressed-tensors
    zeropoint quantize FILE OUT --format gguf --to q4_0 --dequantize-first --dequantize-kept

with the usual limit of memory, and prints the largest memory of each and what a second took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from facts import machine
from llama_checkpoint import Size, config, shapes

from checkpoint import require_room, run
from zeropoint.codecs.containers.gguf import GGUF
from zeropoint.codecs.containers.protocol import Row
from zeropoint.codecs.llama_cpp.families import family_of, form_of
from zeropoint.codecs.llama_cpp.model_values import model_values

BLOCK, BLOCK_BYTES = 32, 34
PIECE_BLOCKS = 1 << 20
"""Blocks of the piece that is repeated, of 36 MB."""
WIDE = Size(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, vocab_size=128256, shards=1, head=128
)
COMMANDS = (
    ("inspect", None), ("verify", None), ("convert", ("--format", "compressed-tensors")),
    ("quantize", ("--format", "gguf", "--to", "q4_0", "--dequantize-first", "--dequantize-kept")),
)  # fmt: skip


def piece() -> bytes:
    """Return blocks of Q8_0 with random codes and scales of usual size."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (PIECE_BLOCKS, BLOCK_BYTES), generator=generator, dtype=torch.uint8)
    scales = torch.rand(PIECE_BLOCKS, 1, generator=generator).mul_(1e-3).add_(1e-4).half()
    blocks[:, :2] = scales.view(torch.uint8)
    return blocks.numpy().tobytes()


def rows_of(size: Size) -> list[Row]:
    """Return the tensors of the file."""
    said = config(size)
    family = family_of(said)
    assert family is not None
    rows = []
    for name, shape in shapes(size)[0].items():
        form = form_of(family, name, shape, said)
        dtype = "F32" if len(shape) < 2 else "Q8_0"
        rows.append(Row(form.name, dtype, shape, GGUF.nbytes(dtype, shape)))
    return rows


def write(path: Path, gigabytes: float) -> int:
    """Write a file of about so many gigabytes; return its size."""
    each = sum(row.nbytes for row in rows_of(WIDE) if row.name.startswith("blk."))
    rest = sum(row.nbytes for row in rows_of(WIDE)) - each
    size = replace(WIDE, num_hidden_layers=max(1, round((gigabytes * 1e9 - rest) / each)))
    rows, said, content = rows_of(size), config(size), piece()
    family = family_of(said)
    assert family is not None
    values = {**model_values(family, said), "general.file_type": 7, "general.quantization_version": 2}
    head = GGUF.head(rows, values)
    with path.open("wb") as file:
        file.write(head.data)
        for row, begin in zip(rows, head.begins, strict=True):
            file.seek(begin)
            if row.dtype == "F32":
                file.write(torch.ones(row.shape).numpy().tobytes())
                continue
            left = row.nbytes
            while left:
                left -= file.write(content[: min(left, len(content))])
        file.truncate(head.size)
    return head.size


def main() -> None:
    """Write the file, run the commands, and clean up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="commands whose names contain it")
    parser.add_argument("--work", type=Path, help="where the temporary folder goes (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="zeropoint-large-", dir=args.work) as folder:
        work = Path(folder)
        require_room(work, int(2.02e9 * args.gigabytes))
        path, out = work / "in" / "large.gguf", work / "out"
        path.parent.mkdir()
        nbytes = write(path, args.gigabytes)
        for verb, options in COMMANDS:
            if args.only not in verb:
                continue
            more = [] if options is None else [str(out), *options, "--force"]
            ran = run([sys.executable, "-m", "zeropoint", verb, str(path), *more, "--json"], work)
            written = sum(each.stat().st_size for each in out.iterdir()) if options is not None else 0
            shutil.rmtree(out, ignore_errors=True)
            found.append({"verb": verb, "seconds": ran.seconds, "peak_gb": ran.peak_gb, "written": written})
            sys.stdout.write(
                f"{verb} of {nbytes / 1e9:.1f} GB: {ran.seconds:.0f} s, {written / 1e9:.1f} GB written, "
                f"{ran.peak_gb:.2f} GB of memory at most\n"
            )
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "bytes": nbytes, "jobs": found}, indent=1))


if __name__ == "__main__":
    main()
