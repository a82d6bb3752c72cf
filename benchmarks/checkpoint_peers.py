"""Other programs that quantize a checkpoint file by file, each in an environment of its own (peers.sh).

llm-compressor 0.14 (model_free_ptq) writes the same layout, so its tensors are compared byte for byte. Quark
0.13 (direct_quantize_checkpoint) writes its own, and is timed only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_TIMED = """
import sys, time
begin = time.perf_counter()
{imports}
loaded = time.perf_counter()
source, out, scheme, workers = sys.argv[1:]
{call}
print(f"\\nseconds {{loaded - begin}} {{time.perf_counter() - loaded}}")
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program: its interpreter, its script, its word for each scheme that it knows."""

    name: str
    python: Path
    script: str
    schemes: dict[str, str]
    same_bytes: bool


PEERS = (
    Peer(
        name="llm-compressor",
        python=HERE / ".peers/bin/python",
        script=_TIMED.format(
            imports="from llmcompressor import model_free_ptq",
            call=(
                'ignore = ["lm_head", "re:.*embed_tokens$"]\n'
                "model_free_ptq(source, out, scheme=scheme, ignore=ignore, max_workers=int(workers), "
                'device="cpu")'
            ),
        ),
        schemes={"mxfp4": "MXFP4", "nvfp4a16": "NVFP4A16"},
        same_bytes=True,
    ),
    Peer(
        name="Quark",
        python=HERE / ".peers-quark/bin/python",
        script=_TIMED.format(
            imports=(
                "from quark.torch import ModelQuantizer\n"
                "from quark.torch.quantization.config.config import OCP_MXFP4Spec, QConfig, QLayerConfig"
            ),
            call=(
                "spec = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()\n"
                'config = QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"])\n'
                'ModelQuantizer(config).direct_quantize_checkpoint(source, out, device="cpu")'
            ),
        ),
        schemes={"mxfp4": "mxfp4"},
        same_bytes=False,
    ),
)


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the names of tensors that are not the same bytes in the same shape in both checkpoints."""
    left, right = tensors(ours), tensors(theirs)
    found = [f"{name}: in one checkpoint only" for name in sorted(left.keys() ^ right.keys())]
    for name in sorted(left.keys() & right.keys()):
        (path, begin, shape), (other, start, wanted) = left[name], right[name]
        if shape != wanted:
            found.append(f"{name}: shape and bytes {shape}, theirs {wanted}")
        else:
            pairs = zip(pieces(path, begin, shape[1]), pieces(other, start, wanted[1]), strict=True)
            if any(a != b for a, b in pairs):
                found.append(f"{name}: other bytes")
    return found


def tensors(folder: Path) -> dict[str, tuple[Path, int, tuple[list[int], int]]]:
    """Return name to file, first byte, and (shape, bytes) of every tensor of a checkpoint."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = path, 8 + length + begin, (entry["shape"], end - begin)
    return found


def pieces(path: Path, begin: int, length: int) -> Iterator[bytes]:
    """Yield the bytes of one tensor, a few megabytes at a time."""
    with path.open("rb") as file:
        file.seek(begin)
        for done in range(0, length, 1 << 22):
            yield file.read(min(1 << 22, length - done))
