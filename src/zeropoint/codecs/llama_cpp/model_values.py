"""Values of a model between config.json and the metadata of a GGUF file, in both directions.

Most are one key on each side: :data:`_KEYS`. Scalings of rotary embeddings are a few keys together, and those
of Llama 3 a tensor of factors, which :func:`rope_factors` computes as llama.cpp's converter does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...architectures import Config, text_config
from ...errors import CheckpointError, UnsupportedError
from ..containers.protocol import Found, Metadata, Read, Row, Scalar
from ..model_format import FileModel
from ..stored_forms import StoredForm
from .families import FAMILIES, Family, family_of, head_size, model_names, number_of
from .token_table import PREFIX
from .vocabulary import STORED_NAMES

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"


class _Key(NamedTuple):
    """A key of the metadata, after the architecture, and those of config.json: the first is written."""

    stored: str
    names: tuple[str, ...]
    kind: type = int


_KEYS = (
    _Key("block_count", ("num_hidden_layers",)),
    _Key("context_length", ("max_position_embeddings",)),
    _Key("embedding_length", ("hidden_size",)),
    _Key("feed_forward_length", ("intermediate_size",)),
    _Key("attention.head_count", ("num_attention_heads",)),
    _Key("attention.head_count_kv", ("num_key_value_heads",)),
    _Key("attention.key_length", ("head_dim",)),
    _Key("attention.value_length", ("head_dim",)),
    _Key("attention.layer_norm_rms_epsilon", ("rms_norm_eps",), float),
    _Key("attention.layer_norm_epsilon", ("layer_norm_eps",), float),
    _Key("attention.sliding_window", ("sliding_window",)),
    _Key("final_logit_softcapping", ("final_logit_softcapping",), float),
    _Key("vocab_size", ("vocab_size",)),
)
_TOKEN_TYPES = f"{PREFIX}token_type_count"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0, "head_dim": 128},
    "mixtral": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "qwen2_moe": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "norm_topk_prob": False,
    },
    "gemma3_text": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "vocab_size": 262208,
    },
    "bert": {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2},
}  # fmt: skip
"""What transformers takes where config.json does not say it."""
_MAX_FACTORS = 1 << 16
_LARGEST_GEMMA = 62
"""Layers of Gemma 3 27B, whose queries llama.cpp scales by the width of the model."""


def model_values(family: Family, config: Config) -> dict[str, Scalar]:
    """Return the values of a model for the metadata of its file.

    Raises UnsupportedError for what llama.cpp computes otherwise.
    """
    text = {**_DEFAULTS[family.model_type], **text_config(config)}
    if text.get("num_key_value_heads") is None and not family.encoder:
        text["num_key_value_heads"] = text["num_attention_heads"]
    _require_alike(family, text)
    arch = family.architecture
    values: dict[str, Scalar] = {ARCHITECTURE: arch, "general.type": "model"}
    for key in _KEYS:
        value = number_of(text, key.names)
        if value is not None and not (key.stored == "attention.sliding_window" and arch != "gemma3"):
            values[f"{arch}.{key.stored}"] = key.kind(value)
    values |= {f"{arch}.{stored}": int(number_of(text, keys)) for stored, keys in family.numbers.items()}
    if family.halves:
        values[f"{arch}.rope.dimension_count"] = head_size(text)
    if family.encoder:
        values[f"{arch}.attention.causal"] = False
        values[_TOKEN_TYPES] = int(text["type_vocab_size"])
        return values
    return {**values, **_rope_values(arch, text)}


def _require_alike(family: Family, text: Config) -> None:
    """Raise UnsupportedError for a model of the family that llama.cpp would compute otherwise."""
    if family.architecture == "gemma3":
        layers, heads = text["num_hidden_layers"], text["num_attention_heads"]
        scaled = text["hidden_size"] // heads if layers == _LARGEST_GEMMA else head_size(text)
        if text["query_pre_attn_scalar"] != scaled:
            raise UnsupportedError(
                f"query_pre_attn_scalar is {text['query_pre_attn_scalar']!r:.40} in config.json, but "
                f"llama.cpp divides queries by the root of {scaled}; write safetensors"
            )
    for key, value in family.always.items():
        if (said := text.get(key, value)) != value and (said or value):
            raise UnsupportedError(
                f"{key} is {said!r:.40} in config.json, but llama.cpp computes models of "
                f"{family.architecture} as if it were {value!r}; write safetensors"
            )
    if text.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedError(
            f"position_embedding_type is {text['position_embedding_type']!r:.40} in config.json, and "
            "llama.cpp has absolute ones; write safetensors"
        )


def _rope(text: Config) -> tuple[dict[str, Any], Any]:
    """Return what a configuration says of rotary embeddings, and the base of local layers, if any.

    transformers 5 says it in rope_parameters, for each type of layers where there are several; before, it did
    in rope_theta and rope_scaling.
    """
    found: dict[str, Any] = text.get("rope_parameters") or {}
    whole = found.get("full_attention", found)
    older: dict[str, Any] = text.get("rope_scaling") or {}
    scaling = {**older, **whole}
    local = found.get("sliding_attention", {}).get("rope_theta", text.get("rope_local_base_freq"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": text.get("rope_theta"), **scaling, "rope_type": kind}, local


def _rope_values(arch: str, text: Config) -> dict[str, Scalar]:
    rope, local = _rope(text)
    kind, factor = rope["rope_type"], rope.get("factor")
    values: dict[str, Scalar] = {f"{arch}.rope.freq_base": float(rope["rope_theta"])}
    if local is not None:
        values[f"{arch}.rope.freq_base_swa"] = float(local)
    if kind in ("linear", "yarn") and factor is not None:
        values |= {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": float(factor)}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or text["max_position_embeddings"]
        values[f"{arch}.rope.scaling.original_context_length"] = int(original)
    elif kind not in ("default", "linear") and not (kind == "llama3" and arch == "llama"):
        raise UnsupportedError(
            f"rope_type is {kind!r:.40} in config.json, which is not written to GGUF files of {arch}; write "
            "safetensors"
        )
    return values


def rope_factors(family: Family, config: Config) -> Row | None:
    """Return the tensor by which llama.cpp divides frequencies of Llama 3's rotary embeddings, or None."""
    text = {**_DEFAULTS[family.model_type], **text_config(config)}
    rope, _ = _rope(text)
    if rope["rope_type"] != "llama3" or family.architecture != "llama":
        return None
    factors = _llama3_factors(rope, head_size(text))
    return Row(
        ROPE_FACTORS, "F32", (len(factors),), 4 * len(factors), struct.pack(f"<{len(factors)}f", *factors)
    )


def _llama3_factors(rope: Mapping[str, Any], size: int) -> list[float]:
    """Return the factor of each frequency: 1 of short waves, ``factor`` of long ones, or a blend."""
    factor, low, high = (
        float(rope.get(key, usual))
        for key, usual in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    context = rope.get("original_max_position_embeddings", 8192)
    steps = torch.arange(0, size, 2, dtype=torch.float32) / size
    factors: list[float] = []
    for frequency in 1.0 / (float(rope.get("rope_theta", 10000.0)) ** steps):
        wave = 2 * math.pi / frequency
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return factors


class PlainValues(Mapping[str, Any]):
    """Metadata as Python values, each of which is made when it is asked for."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def __getitem__(self, key: str) -> Any:
        value = self._metadata[key]
        return value if isinstance(value, str | bool | int | float | Sequence) else value.get()

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)


def read_model(found: Sequence[Found], metadata: Metadata, read: Read) -> FileModel | None:
    """Return the model in a GGUF file, or None where its architecture is not known here.

    Raises CheckpointError where the file contradicts itself.
    """
    rows = [each.row for each in found]
    config = model_config(PlainValues(metadata), [row.name for row in rows], _stored_factors(found, read))
    if config is None:
        return None
    family = family_of(config)
    assert family is not None
    named = (model_names(family, row.name, row.shape, config) for row in rows)
    forms = [known or [(row.name, StoredForm(row.name))] for row, known in zip(rows, named, strict=True)]
    return FileModel(
        config=config,
        forms=[[] if row.name == ROPE_FACTORS else parts for row, parts in zip(rows, forms, strict=True)],
    )


def _stored_factors(found: Sequence[Found], read: Read) -> tuple[float, ...] | None:
    """Return what the tensor of rotary factors holds, or None where there is none."""
    each = next((each for each in found if each.row.name == ROPE_FACTORS), None)
    if each is None or each.row.dtype != "F32" or each.row.nbytes > _MAX_FACTORS:
        return None
    return struct.unpack(f"<{each.row.nbytes // 4}f", read(each.begin, each.row.nbytes))


def model_config(
    metadata: Mapping[str, Any], names: Sequence[str], factors: Sequence[float] | None
) -> dict[str, Any] | None:
    """Return config.json of the model in a GGUF file, or None where its architecture is not known here.

    Args:
        metadata: of the file, as Python values.
        names: of its tensors.
        factors: what its tensor of rotary factors holds, or None without one.

    Raises:
        CheckpointError: where values are missing or of another type.
    """
    arch = metadata.get(ARCHITECTURE)
    family = _family_in(arch, metadata)
    if family is None or "token_embd.weight" not in names:
        return None
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type}
    for key in _KEYS:
        value = metadata.get(f"{arch}.{key.stored}")
        if value is not None and type(value) in (key.kind, int):
            config[key.names[0]] = value if key.kind is int else _short(value)
    for stored, keys in family.numbers.items():
        if type(number := metadata.get(f"{arch}.{stored}")) is int:
            config[keys[0]] = number
    config |= {k: list(value) if isinstance(value, tuple) else value for k, value in family.always.items()}
    if "vocab_size" not in config and isinstance(tokens := metadata.get(f"{PREFIX}tokens"), list):
        config["vocab_size"] = len(tokens)
    if family.encoder:
        config["type_vocab_size"] = metadata.get(_TOKEN_TYPES, 2)
    else:
        config["tie_word_embeddings"] = "output.weight" not in names
        config |= _rope_config(str(arch), metadata, config, factors)
    if arch == "gemma3" and family_of(config) is not None:
        wide = config["num_hidden_layers"] == _LARGEST_GEMMA
        width = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = width if wide else head_size(config)
    if arch == "llama" and "blk.0.attn_q.bias" in names:
        config["attention_bias"] = True
    for name in ("bos", "eos", "pad"):
        token = metadata.get(f"{PREFIX}{STORED_NAMES.get(name, name)}_token_id")
        if isinstance(token, int):
            config[f"{name}_token_id"] = token
    if family_of(config) is None:
        raise CheckpointError(
            f"its metadata does not say the sizes of a model of {arch}; download or export it again"
        )
    return config


def _family_in(arch: Any, metadata: Mapping[str, Any]) -> Family | None:
    """Return the family of an architecture, of which some have experts."""
    experts = bool(metadata.get(f"{arch}.expert_count"))
    return next((f for f in FAMILIES if f.architecture == arch and bool(f.experts) == experts), None)


def _short(value: float) -> float:
    """Return the shortest number that is a value in float32, such as 1e-05."""
    return float(format(value, ".7g"))


def _rope_config(
    arch: str, metadata: Mapping[str, Any], config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    def value(key: str, usual: Any) -> Any:
        found = metadata.get(f"{arch}.rope.{key}", usual)
        return _short(found) if isinstance(found, float) else found

    found: dict[str, Any] = {"rope_theta": value("freq_base", 10000.0)}
    kind, factor = value("scaling.type", None), value("scaling.factor", None)
    if arch == "gemma3":
        found["rope_local_base_freq"] = value("freq_base_swa", 10000.0)
    if kind in ("linear", "yarn") and factor:
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
        original = value("scaling.original_context_length", None)
        if kind == "yarn" and original is not None:
            found["rope_scaling"]["original_max_position_embeddings"] = original
    if factors is not None:
        found["rope_scaling"] = _llama3(factors, found["rope_theta"], head_size(config))
    return found


def _llama3(factors: Sequence[float], theta: float, size: int) -> dict[str, Any]:
    """Return the scaling of Llama 3 whose factors are these; raises UnsupportedError where there is none."""
    for context in (8192, 4096, 2048, 16384, 32768):
        for low, high in ((1.0, 4.0), (1.0, 32.0)):
            rope = {
                "rope_type": "llama3", "factor": max(factors), "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": context,
            }  # fmt: skip
            ours = _llama3_factors({**rope, "rope_theta": theta}, size)
            if torch.allclose(torch.tensor(ours), torch.tensor(list(factors)), rtol=1e-6, atol=0):
                return rope
    raise UnsupportedError(
        f"{ROPE_FACTORS} holds factors of no scaling that is known here; pass the original checkpoint"
    )
