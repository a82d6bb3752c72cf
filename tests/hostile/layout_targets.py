"""The parsers of layouts in safetensors files that are fuzzed: each decodes a checkpoint for each input."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.layout import Layout
from tests.hostile.layouts import LAYOUT_CASES, LAYOUTS
from tests.hostile.mutations import mutate, mutate_file
from tests.hostile.quantized import CONFIG, QUANTIZED, WEIGHTS
from tests.hostile.target import Target, read_whole, refusal


def _layout_target(layout: str, folder: Path) -> Target:
    """Configurations and tensors of a layout of other tools."""
    cases = [case for case in LAYOUT_CASES if case.name.startswith(f"{layout} ")]
    return _files_target(layout, LAYOUTS[layout], cases, folder)


def _files_target(name: str, right: Layout, cases: Sequence[Case], folder: Path) -> Target:
    """Checkpoints as one input: config.json, a line, and the file of weights."""

    def decide(content: bytes) -> str:
        config, _, weights = content.partition(_BETWEEN)
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        return "accepted" if refusal(read_whole, folder) is None else "refused"

    def either(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
        config, _, weights = content.partition(_BETWEEN)
        if rng.random() < 0.5:
            return (
                mutate(config, rng, [other.partition(_BETWEEN)[0] for other in others]) + _BETWEEN + weights
            )
        return (
            config + _BETWEEN + mutate_file(weights, rng, [other.partition(_BETWEEN)[2] for other in others])
        )

    files = [case.content for case in cases if isinstance(case.content, dict)]
    pairs = [(f["config.json"], f["model.safetensors"]) for f in [right.files()] * (len(files) // 2) + files]
    seeds = [config + _BETWEEN + weights for config, weights in pairs if len(config) + len(weights) < 1 << 14]
    return Target(name=name, seeds=seeds, decide=decide, mutate=either)


_BETWEEN = b"\n\0\n"


def gptq_target(folder: Path) -> Target:
    """Checkpoints in the layout of GPTQ."""
    return _layout_target("gptq", folder)


def awq_target(folder: Path) -> Target:
    """Checkpoints in the layout of AWQ."""
    return _layout_target("awq", folder)


def modelopt_target(folder: Path) -> Target:
    """Checkpoints in the layouts of ModelOpt."""
    return _layout_target("modelopt", folder)


def bitsandbytes_target(folder: Path) -> Target:
    """Checkpoints in the layout of bitsandbytes, whose tensors hold JSON, too."""
    return _layout_target("bitsandbytes", folder)


def fp8_target(folder: Path) -> Target:
    """Checkpoints in fp8 blocks."""
    return _layout_target("fp8-block", folder)


def gpt_oss_target(folder: Path) -> Target:
    """Checkpoints in the layout of gpt-oss."""
    return _layout_target("gpt-oss", folder)


def quark_target(folder: Path) -> Target:
    """Checkpoints in the layouts of Quark."""
    return _layout_target("quark", folder)


def torchao_target(folder: Path) -> Target:
    """Checkpoints of torchao, whose metadata is JSON in JSON."""
    target = _layout_target("torchao", folder)

    def either(content: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
        return target.mutate(content, rng, others) if rng.random() < 0.5 else _described(content, rng)

    return replace(target, mutate=either)


def _described(content: bytes, rng: random.Random) -> bytes:
    """Return a checkpoint of torchao whose metadata says something else of a tensor."""
    config, _, weights = content.partition(_BETWEEN)
    length = int.from_bytes(weights[:8], "little")
    head = json.loads(weights[8 : 8 + length])
    table = head.get("__metadata__") or {"x": "{}"}
    key = rng.choice(list(table))
    table[key] = mutate(table[key].encode(), rng, [b"{}"]).decode("utf-8", "replace")
    raw = json.dumps(head).encode()
    return config + _BETWEEN + len(raw).to_bytes(8, "little") + raw + weights[8 + length :]


def llm_int8_target(folder: Path) -> Target:
    """Checkpoints of LLM.int8."""
    return _layout_target("llm-int8", folder)


def mlx_target(folder: Path) -> Target:
    """Checkpoints in the layout of MLX."""
    return _layout_target("mlx", folder)


def compressed_tensors_target(folder: Path) -> Target:
    """Checkpoints in the layout of compressed-tensors."""
    return _files_target("compressed-tensors", Layout(section=CONFIG, tensors=WEIGHTS), QUANTIZED, folder)


LAYOUT_TARGETS = (
    gptq_target, awq_target, modelopt_target, bitsandbytes_target, fp8_target, gpt_oss_target, quark_target,
    torchao_target, llm_int8_target, mlx_target, compressed_tensors_target,
)  # fmt: skip
