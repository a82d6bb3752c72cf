"""What the pages of file layouts take from their codecs: bytes, presets, tensors and engines."""

from __future__ import annotations

import importlib
import inspect
import re

import torch
from docs.make_api_reference import body
from docs.make_tables import code, table

from zeropoint.codecs.engines import ENGINES, Facts, Loads
from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.protocol import Codec, LayerScheme
from zeropoint.codecs.registry import CODECS

SHAPE = (4096, 4096)
"""Of the weight whose tensors a page lists: outputs, inputs."""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""The model of which engines are asked."""
OTHERS = {"mmproj": ("Gemma 3", {"model_type": "gemma3", "vision_config": {}, "text_config": LLAMA})}
"""Models with a vision part, of layouts that hold nothing else."""


def _facts(layer: LayerScheme) -> Facts:
    """Return what engines see of a model all of whose layers have one scheme."""
    return Facts(family=OTHERS.get(layer.codec.name, ("", LLAMA))[1], layers=(layer,))


def answer(codec: Codec, engine: str, layer: LayerScheme) -> tuple[str, str]:
    """Return how much an engine takes of a layer, and why not more: the answer that says least."""
    order = (Loads.NO, Loads.UNCHECKED, Loads.PARTLY, Loads.YES)
    problems = sorted(codec.engines[engine](_facts(layer)), key=lambda problem: order.index(problem[0]))
    return (problems[0][0].value, problems[0][1]) if problems else (Loads.YES.value, "")


def _tensors(layer: LayerScheme) -> str:
    """Return the tensors of a layer's weight, as ``suffix DTYPE [shape]``."""
    specs = layer.codec.tensors(layer, SHAPE, torch.bfloat16)
    return ", ".join(code(f"{spec.suffix} {spec.dtype} {list(spec.shape)}") for spec in specs)


def _engine_rows(codec: Codec) -> list[tuple[str, str, str, str]]:
    """Return a row for each engine and what it says: engine, presets, how much it loads, why not more."""
    layers, rows = list(preset_layers(codec)), []
    for engine in ENGINES:
        groups: dict[tuple[str, str], list[str]] = {}
        for layer in layers:
            groups.setdefault(answer(codec, engine, layer), []).append(layer.name)
        for (loads, reason), names in groups.items():
            said_of = "all" if len(names) == len(layers) else ", ".join(map(code, names))
            rows.append((engine, said_of, loads, reason))
    return rows


def layout_page(name: str) -> str:
    """Return what the codec ``name`` says of itself: bytes, presets, tensors of a weight, engines."""
    codec = CODECS[name]
    # A docstring has the layout; the sentence about what a module opens is for its maintainers.
    text = inspect.getdoc(importlib.import_module(type(codec).__module__)) or ""
    text = re.sub(r"\s*This\s+module\s+opens\s+no\s+file\.", "", text)
    said = ", ".join(code(method) for method in codec.methods) or "none"
    lines = [*body(text), f"`quant_method`: {said}. Container: {codec.container}.", ""]
    lines += [f"A weight of {SHAPE[0]} outputs and {SHAPE[1]} inputs in bfloat16 becomes:", ""]
    rows = [
        (
            code(layer.name),
            code(str(layer.weight)),
            code(str(layer.input) if layer.input else ""),
            _tensors(layer),
        )
        for layer in preset_layers(codec)
    ]
    lines += [table(("Preset", "Weight", "Input", "Tensors"), rows)]
    lines += [f"Engines, for a {OTHERS.get(name, ('Llama', LLAMA))[0]}, as `zeropoint plan` says it:", ""]
    head = ("Engine", "Presets", "Loads", "Why not, or how")
    return "\n".join([*lines, table(head, _engine_rows(codec))])


def layout_table() -> str:
    """Return the layouts with their presets, and links to their pages."""
    rows = [
        (f"[`{name}`]({name}.md)", codec.title, ", ".join(map(code, codec.presets)))
        for name, codec in CODECS.items()
    ]
    return table(("`--format`", "Holds", "Presets"), rows)


def engine_matrix() -> str:
    """Return for each layout and engine how much of its first preset an engine loads."""
    rows = []
    for name, codec in CODECS.items():
        layer = next(iter(preset_layers(codec)))
        answers = [answer(codec, engine, layer)[0] for engine in ENGINES]
        rows.append((f"[`{name}`](layouts/{name}.md)", code(layer.name), *answers))
    return table(("Layout", "Preset", *ENGINES), rows)


def fields() -> dict[str, set[str]]:
    """Return the names of tensors of layouts, each with the layouts that have it."""
    found: dict[str, set[str]] = {}
    for name, codec in CODECS.items():
        for layer in preset_layers(codec):
            for spec in codec.tensors(layer, SHAPE, torch.bfloat16):
                found.setdefault(spec.suffix, set()).add(name)
    return found
