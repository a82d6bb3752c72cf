"""torchao, asked from here: runs torchao_peer.py in the peers' environment and reads its answer."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import cases as c
import numpy as np
import torch
from facts import fail
from figures import Row

import zeropoint as zp
from zeropoint.bench import timing

SCRIPT = Path(__file__).parent / "torchao_peer.py"


class Torchao:
    """torchao's outputs and times, from a process in the peers' environment.

    python: that environment's interpreter. x: float32 matrix. kept_rows: how many rows' outputs to keep.
    """

    def __init__(
        self, python: Path, x: torch.Tensor, *, threads: list[int], rounds: int, kept_rows: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            matrix, outputs, request = (Path(folder) / n for n in ("x.npy", "outputs.npz", "request.json"))
            np.save(matrix, x.numpy())
            asked = {"input": str(matrix), "outputs": str(outputs), "rows": kept_rows}
            request.write_text(json.dumps(asked | {"threads": threads, "rounds": rounds}))
            command = [str(python), "-W", "ignore", str(SCRIPT), str(request)]
            # Where zeropoint is not installed, its module of timing still is a file.
            environment = os.environ | {"PYTHONPATH": str(Path(timing.__file__).parent)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                fail(f"torchao_peer.py failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
            answer = json.loads(done.stdout.splitlines()[-1])
            with np.load(outputs) as file:
                self._outputs = {name: torch.from_numpy(file[name]) for name in file.files}
        self._rows = kept_rows
        self.version: str = answer["version"]
        self._times = {(t["threads"], t["scheme"], t["dtype"]): t["seconds"] for t in answer["times"]}

    def check(self, sources: dict[torch.dtype, torch.Tensor]) -> str:
        """Compare the bytes of the schemes whose rule is ours too; exit when they differ."""
        for dtype, x in sources.items():
            for scheme in ("mxfp4_e2m1", "mxfp8_e4m3"):
                name = f"{scheme}/{str(dtype).removeprefix('torch.')}"
                q = zp.quantize(x[: self._rows], scheme)
                scales = q.scales[0].view(torch.uint8)
                pairs = (
                    (q.data, self._outputs[f"{name}/codes"]),
                    (scales, self._outputs[f"{name}/scales"].reshape(scales.shape)),
                )
                if not all(c.same_bytes(ours, theirs) for ours, theirs in pairs):
                    fail(f"torchao {name} differs from ours under the floor rule")
        return (
            f"torchao {self.version}: bytes equal for mxfp4 and mxfp8_e4m3; not our rule: int8 and int4 "
            "(scales in the input's dtype, times their reciprocal, codes unpacked), fp8 (scales in the "
            "input's dtype), nvfp4 (times a reciprocal)"
        )

    def seconds(self, row: Row) -> list[float] | None:
        """Return its times for the work of ``row``, or None."""
        dtype = str(row.case.dtype).removeprefix("torch.")
        found = self._times.get((row.threads, row.case.scheme, dtype))
        known = found is not None and row.case.rival is None and row.case.operation in found
        return found[row.case.operation] if known and found is not None else None
