"""The small files beside the shards: the index, and the configuration that says what is quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..codecs.compressed_tensors_config import LINEAR, Group, LayerScheme, quantization_config
from ..codecs.targets import targets
from .decisions import Decision
from .experts import matrices
from .selection import CONFIG_KEYS, Why, is_fused_experts, module_of
from .source import CONFIG, INDEX_SUFFIX, SINGLE_FILE, Source

CONFIG_KEY = CONFIG_KEYS[0]
WEIGHTS_ONLY_CONFIG = "quantization_config.json"
"""Where the configuration goes when the source has no config.json that it could join."""
MANIFEST = "zeropoint_manifest.json"
"""Where the digests and error statistics of a run go; that of a source is not copied."""


def index_and_config(
    source: Source, decisions: Sequence[Decision], places: Mapping[str, tuple[str, int]]
) -> dict[str, str]:
    """Return the index and the configuration, by file name.

    places: the shard and the bytes of each output tensor by name.
    """
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in places.values())},
        "weight_map": {name: places[name][0] for name in sorted(places)},
    }
    config = quantization_config(_groups(decisions), _ignored(source, decisions))
    index_name = source.index or SINGLE_FILE + ".index.json"
    assert index_name.endswith(INDEX_SUFFIX)
    texts = {index_name: json.dumps(index, indent=2) + "\n"}
    if source.config is None or source.config_text is None:
        texts[WEIGHTS_ONLY_CONFIG] = json.dumps({CONFIG_KEY: config}, indent=2) + "\n"
    else:
        texts[CONFIG] = insert_config(source.config_text, config)
    return texts


def insert_config(text: str, addition: Mapping[str, Any]) -> str:
    """Return the text of a JSON object with ``quantization_config`` at its end, all else untouched.

    >>> print(insert_config('{"a": 1e-05}', {}))
    {"a": 1e-05,
      "quantization_config": {}
    }
    """
    text = without_keys(text)
    end = text.rindex("}")
    head = text[:end].rstrip()
    comma = "" if head.endswith("{") else ","
    body = json.dumps(addition, indent=2).replace("\n", "\n  ")
    return f'{head}{comma}\n  "{CONFIG_KEY}": {body}\n}}{text[end + 1 :]}'


def without_keys(text: str) -> str:
    """Return the text of a JSON object without what it says of quantization, all else untouched.

    >>> without_keys('{"a": 1e-05, "quantization_config": {"bits": [8]}, "b": 2}')
    '{"a": 1e-05, "b": 2}'
    >>> without_keys('{"a": 1e-05, "compression_config": null }')
    '{"a": 1e-05 }'
    """
    members = _members(text)
    last = len(members) - 1
    for number, (key, begin, end) in reversed(list(enumerate(members))):
        if key in CONFIG_KEYS:
            if number < last:
                text = text[:begin] + text[members[number + 1][1] :]
            else:
                text = text[: members[number - 1][2] if number else begin] + text[end:]
                last -= 1
    return text


def _members(text: str) -> list[tuple[str, int, int]]:
    """Return the keys of the JSON object ``text``, with the place of each and the end of its value."""
    decoder = json.JSONDecoder()
    found = []
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        key, colon = decoder.raw_decode(text, at)
        _, end = decoder.raw_decode(text, _skip(text, _skip(text, colon) + 1))
        found.append((key, at, end))
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _skip(text: str, at: int) -> int:
    """Return the first place from ``at`` on that holds no JSON space."""
    while text[at] in " \t\n\r":
        at += 1
    return at


def _groups(decisions: Sequence[Decision]) -> list[Group]:
    """Return the layers of each scheme and what names them: one scheme for the class, several by their names.

    compressed-tensors tries names before classes, vLLM gives all experts the scheme of the class where one is
    named, and transformers 5.23 gives them the first group whose expressions speak of experts. So no class is
    named where there are several groups, and that of the experts comes first.
    """
    modules: dict[LayerScheme, list[str]] = {}
    kept = []
    for decision in decisions:
        if decision.layer is not None:
            modules.setdefault(decision.layer, []).extend(m.module for m in matrices(decision.entry))
        elif len(decision.entry.shape) == 2:
            kept.append(module_of(decision.entry.name))
    if len(modules) == 1:
        return [Group(layer=layer, targets=(LINEAR, *odd_targets(decisions))) for layer in modules]
    ordered = sorted(modules, key=lambda layer: not any(".experts." in name for name in modules[layer]))
    found = targets([modules[layer] for layer in ordered], kept)
    return [Group(layer=layer, targets=names) for layer, names in zip(ordered, found, strict=True)]


def odd_targets(decisions: Iterable[Decision]) -> list[str]:
    """Return quantized modules that are no Linear layers, which loaders find only by name."""
    return [
        module_of(d.entry.name)
        for d in decisions
        if d.quantized and d.choice.why is Why.USER and re.search(r"embed|wte|wpe", d.entry.name)
    ]


def _ignored(source: Source, decisions: Iterable[Decision]) -> list[str]:
    """Return the modules that a loader must not take for quantized: kept matrices and tied heads.

    A Linear layer that is neither quantized nor listed is left uninitialized by transformers, without an
    error.
    """
    names: dict[str, None] = {}
    for decision in decisions:
        entry = decision.entry
        if not decision.quantized and len(entry.shape) == 2 and entry.name.endswith(".weight"):
            names[module_of(entry.name)] = None
        elif not decision.quantized and is_fused_experts(entry):
            names[module_of(entry.name).rpartition(".")[0]] = None
    for head in tied_heads(source):
        names[head] = None
    return list(names)


_HEADS = (
    ("ForCausalLM", "lm_head"), ("LMHeadModel", "lm_head"), ("ForConditionalGeneration", "lm_head"),
    ("ForMaskedLM", "cls.predictions.decoder"), ("ForMaskedLM", "lm_head.decoder"),
    ("ForPreTraining", "cls.predictions.decoder"),
)  # fmt: skip


def tied_heads(source: Source) -> list[str]:
    """Return heads that the model has and the checkpoint has not, since they are tied to an embedding."""
    config = source.config or {}
    found = config.get("architectures")
    architectures = [a for a in found if isinstance(a, str)] if isinstance(found, list) else []
    heads = [head for ending, head in _HEADS if any(a.endswith(ending) for a in architectures)]
    if config.get("tie_word_embeddings") is True and not heads and architectures:
        heads = ["lm_head"]
    present = {module_of(name) for name in source.entries}
    return [
        head
        for head in dict.fromkeys(heads)
        if not any(name == head or name.endswith("." + head) for name in present)
    ]
