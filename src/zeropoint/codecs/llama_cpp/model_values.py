"""Conversion between config.json and GGUF metadata, in both directions.

Most are one key on each side: :data:`_KEYS`. Scalings of rotary embeddings are a few keys together, and those
of Llama 3 a tensor of factors, which :func:`rope_factors` computes as llama.cpp's converter does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...architectures import Config
from ...errors import CheckpointError, UnsupportedError
from ..containers.protocol import Found, Metadata, Read, Row, Scalar
from ..model_format import FileModel
from ..stored_forms import StoredForm
from .families import FAMILIES, family_of, model_names
from .family import Family, Key, LayerKinds, has, head_size, number_of
from .token_table import PREFIX
from .vocabulary import STORED_NAMES

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = "longrope"
LONG_FACTORS = MappingProxyType(
    {
        "rope_factors_long.weight": "long_factor",
        "rope_factors_short.weight": "short_factor",
    }
)


_KEYS = MappingProxyType({
    "block_count": Key(("num_hidden_layers",)), "context_length": Key(("max_position_embeddings",)),
    "embedding_length": Key(("hidden_size",)), "feed_forward_length": Key(("intermediate_size",)),
    "attention.head_count": Key(("num_attention_heads",)),
    "attention.head_count_kv": Key(("num_key_value_heads",)),
    "attention.key_length": Key(("head_dim",)), "attention.value_length": Key(("head_dim",)),
    "attention.layer_norm_rms_epsilon": Key(("rms_norm_eps",), float),
    "attention.layer_norm_epsilon": Key(("layer_norm_eps",), float), "vocab_size": Key(("vocab_size",)),
})  # fmt: skip
"""Keys of the metadata, after the architecture, of most families."""
_TOKEN_TYPES = f"{PREFIX}token_type_count"
_MAX_FACTORS = 1 << 16
_NEAR = 1e-6
_UNROTATED = 1e30
"""The factor of frequencies that are not rotated at all."""


def model_values(family: Family, config: Config) -> dict[str, Scalar | Sequence[Scalar]]:
    """Return the values of a model for the metadata of its file.

    Raises UnsupportedError for what llama.cpp computes otherwise.
    """
    text = family.described(config)
    _require_alike(family, text)
    arch = family.architecture
    found: dict[str, Scalar | Sequence[Scalar]] = {}
    for stored, key in {**_KEYS, **family.values}.items():
        value = key.value(text)
        if value is not None:
            found[stored] = key.kind(value)
    found |= {stored: int(number_of(text, keys)) for stored, keys in family.numbers.items()}
    if family.halves or family.rotary is not None:
        found["rope.dimension_count"] = int(head_size(text) * _rotary(family, text))
    for kinds in family.kinds:
        found |= _of_kinds(kinds, text)
    if not family.encoder:
        found |= _rope_values(family, text)
    found |= {**family.constants, **family.derived.write(text)}
    values: dict[str, Scalar | Sequence[Scalar]] = {ARCHITECTURE: arch, "general.type": "model"}
    values |= {f"{arch}.{stored}": value for stored, value in found.items()}
    return {**values, _TOKEN_TYPES: int(text["type_vocab_size"])} if family.encoder else values


def _of_kinds(kinds: LayerKinds, text: Config) -> dict[str, Sequence[Scalar]]:
    """Return the per-layer metadata arrays; raises UnsupportedError for unknown kinds."""
    arrays: dict[str, list[Scalar]] = {}
    layers = text.get(kinds.key) or ()
    if len(layers) != text["num_hidden_layers"]:
        raise CheckpointError(
            f"{kinds.key} has {len(layers)} items in config.json, which says that there are "
            f"{text['num_hidden_layers']} layers; download it again"
        )
    for each in layers:
        items = kinds.values.get(kinds.spelled.get(each, each))
        if items is None:
            raise UnsupportedError(
                f"{kinds.key} has {each!r:.40} in config.json, which is not written to GGUF files "
                "here; write safetensors"
            )
        for stored, item in items.items():
            arrays.setdefault(stored, []).append(int(text[item]) if isinstance(item, str) else item)
    return dict(arrays)


def _require_alike(family: Family, text: Config) -> None:
    """Raise UnsupportedError for models that llama.cpp would compute differently."""
    for key, value in family.always.items():
        if (said := text.get(key, value)) != value and (said or value):
            raise UnsupportedError(
                f"{key} is {said!r:.40} in config.json, but llama.cpp computes models of "
                f"{family.architecture} as if it were {value!r}; write safetensors"
            )
    if text.get("position_embedding_type") not in (None, "absolute", "rope", "nope"):
        raise UnsupportedError(
            f"position_embedding_type is {text['position_embedding_type']!r:.40} in config.json, and "
            "llama.cpp has absolute ones; write safetensors"
        )


def _rotary(family: Family, text: Config) -> float:
    """Return the part of a head that is rotated."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    usual = 1.0 if family.rotary is None else family.rotary
    return float(found.get("partial_rotary_factor") or text.get("partial_rotary_factor") or usual)


def _rope(text: Config) -> tuple[dict[str, Any], Any]:
    """Return the rotary configuration, and local layers' base, if any.

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


def _rope_values(family: Family, text: Config) -> dict[str, Scalar]:
    rope, local = _rope(text)
    kind, factor, values = rope["rope_type"], rope.get("factor"), dict[str, Scalar]()
    if rope["rope_theta"] is not None:
        values["rope.freq_base"] = float(rope["rope_theta"])
    if local is not None:
        values["rope.freq_base_swa"] = float(local)
    if kind not in family.scalings:
        raise UnsupportedError(
            f"rope_type is {kind!r:.40} in config.json, which is not written to GGUF files of "
            f"{family.architecture}; write safetensors"
        )
    if kind in ("linear", "yarn") and factor is not None:
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or text["max_position_embeddings"]
        values["rope.scaling.original_context_length"] = int(original)
        for bound in ("beta_fast", "beta_slow"):
            if rope.get(bound) is not None:
                values[f"rope.scaling.yarn_{bound}"] = float(rope[bound])
        _require_usual_yarn(rope)
    return values


def _require_usual_yarn(rope: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for another attention factor of YaRN than llama.cpp computes."""
    mscale, given = rope.get("mscale"), rope.get("attention_factor")
    if given is not None and abs(given - 0.1 * math.log(rope["factor"]) - 1) > _NEAR:
        raise UnsupportedError(
            f"attention_factor is {given!r:.40} in config.json, but llama.cpp computes that of YaRN from the "
            "factor; write safetensors"
        )
    if mscale is not None and mscale != rope.get("mscale_all_dim"):
        raise UnsupportedError(
            f"mscale is {mscale!r:.40} in config.json, but llama.cpp takes it for mscale_all_dim, "
            f"{rope.get('mscale_all_dim')!r:.40}; write safetensors"
        )


def rope_factors(family: Family, config: Config) -> Row | None:
    """Return llama.cpp's tensor of rotary frequency divisors, or None."""
    text = family.described(config)
    rope, _ = _rope(text)
    if rope["rope_type"] not in family.scalings:
        return None
    if rope["rope_type"] == "llama3":
        factors = _llama3_factors(rope, head_size(text))
    elif rope["rope_type"] == "proportional":
        half = int(text["global_head_dim"]) // 2
        rotated = int(half * float(rope.get("partial_rotary_factor", 1.0)))
        factors = [1.0] * rotated + [_UNROTATED] * (half - rotated)
    else:
        return None
    return _row(ROPE_FACTORS, factors)


def long_factors(family: Family, config: Config) -> tuple[Row, ...]:
    """Return the factor tensors for long and short contexts, if any.

    Raises CheckpointError for another number than frequencies are.
    """
    text = family.described(config)
    rope, _ = _rope(text)
    if rope["rope_type"] != LONGROPE or LONGROPE not in family.scalings:
        return ()
    size = int(head_size(text) * _rotary(family, text)) // 2
    for key in LONG_FACTORS.values():
        if len(rope.get(key) or ()) != size:
            raise CheckpointError(
                f"{key} has {len(rope.get(key) or ())} numbers in config.json, but must have {size}, one for "
                "each frequency; download it again"
            )
    return tuple(_row(name, [float(number) for number in rope[key]]) for name, key in LONG_FACTORS.items())


def _row(name: str, factors: Sequence[float]) -> Row:
    return Row(name, "F32", (len(factors),), 4 * len(factors), struct.pack(f"<{len(factors)}f", *factors))


def _llama3_factors(rope: Mapping[str, Any], size: int) -> list[float]:
    """Return Llama 3's frequency factors: 1, blended, or ``factor`` by wavelength."""
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
    """Metadata as Python values, each made on request."""

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
    """Return the model in a GGUF file, or None if unknown.

    Raises CheckpointError where the file contradicts itself.
    """
    rows = [each.row for each in found]
    factors = {row.name: _stored_factors(each, read) for row, each in zip(rows, found, strict=True)}
    config = model_config(
        PlainValues(metadata), [row.name for row in rows], factors.pop(ROPE_FACTORS, None),
        {name: values for name, values in factors.items() if values is not None},
    )  # fmt: skip
    if config is None:
        return None
    family = family_of(config)
    assert family is not None
    named = (model_names(family, row.name, row.shape, config) for row in rows)
    forms = [known or [(row.name, StoredForm(row.name))] for row, known in zip(rows, named, strict=True)]
    follow = (ROPE_FACTORS, *LONG_FACTORS)
    return FileModel(
        config=config,
        forms=[[] if row.name in follow else parts for row, parts in zip(rows, forms, strict=True)],
    )


def _stored_factors(each: Found, read: Read) -> tuple[float, ...] | None:
    """Return the values of a rotary factor tensor, or None."""
    row = each.row
    if row.name not in (ROPE_FACTORS, *LONG_FACTORS) or row.dtype != "F32" or row.nbytes > _MAX_FACTORS:
        return None
    return struct.unpack(f"<{row.nbytes // 4}f", read(each.begin, row.nbytes))


def model_config(
    metadata: Mapping[str, Any],
    names: Sequence[str],
    factors: Sequence[float] | None,
    long: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> dict[str, Any] | None:
    """Return the config.json of a GGUF file, or None if unknown.

    metadata: of the file, as Python values. names: of its tensors. factors: what its tensor of rotary factors
    holds, or None without one. long: factors of long and of short contexts, by name. Raises CheckpointError
    where values are missing or of another type.
    """
    arch = metadata.get(ARCHITECTURE)
    prefix = f"{arch}."
    said = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    said["tensors"] = frozenset(names)
    family = _family_in(arch, said)
    if family is None or "token_embd.weight" not in names:
        return None
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type}
    for stored, key in {**_KEYS, **family.values}.items():
        value = said.get(stored)
        if value is not None and type(value) in (key.kind, int):
            config[key.names[0]] = _short(value) if key.kind is float else value
    for stored, keys in family.numbers.items():
        if type(number := said.get(stored)) is int:
            config[keys[0]] = number
    config |= {k: list(value) if isinstance(value, tuple) else value for k, value in family.always.items()}
    if "vocab_size" not in config and isinstance(tokens := metadata.get(f"{PREFIX}tokens"), list):
        config["vocab_size"] = len(tokens)
    for kinds in family.kinds:
        config |= _kinds_in(kinds, said)
    config |= family.derived.read(said)
    if family.encoder:
        config["type_vocab_size"] = metadata.get(_TOKEN_TYPES, 2)
    else:
        config["tie_word_embeddings"] = "output.weight" not in names
        rope = _rope_config(family, said, config, factors)
        if long:
            scaling = {LONG_FACTORS[name]: list(map(_short, values)) for name, values in long.items()}
            rope["rope_scaling"] = {"rope_type": LONGROPE, **scaling}
        if "rope_scaling" in rope:
            rope["rope_scaling"] |= config.get("rope_scaling", {})
        config = {key: value for key, value in config.items() if key != "rope_scaling"} | rope
        if has(said, ".attn_q.bias"):
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


def _family_in(arch: Any, said: Mapping[str, Any]) -> Family | None:
    """Return the family of an architecture, by experts and layer kinds."""
    experts = bool(said.get("expert_count"))
    found = [f for f in FAMILIES if f.architecture == arch and bool(f.experts) == experts]

    def fits(family: Family) -> tuple[bool, int]:
        """Return whether a file has a family's marks, and their number."""
        whole = all(_kinds_in(each, said) for each in family.kinds) and all(map(said.get, family.numbers))
        own = [has(said, f".{stored}") for stored in family.tensors.values()]
        return whole and all(own), len(family.kinds) + len(family.numbers) + len(own)

    return max(found, key=fits, default=None)


def _kinds_in(kinds: LayerKinds, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return layer kinds and numbers in the metadata arrays, if any."""
    stored = tuple(dict.fromkeys(key for items in kinds.values.values() for key in items))
    columns = [said.get(key) for key in stored]
    count = next((len(column) for column in columns if isinstance(column, list)), 0)
    rows = [column if isinstance(column, list) else [column] * count for column in columns]
    layers, numbers = [], dict[str, Any]()
    for items in zip(*rows, strict=True) if len({len(row) for row in rows}) == 1 else ():
        here = dict(zip(stored, items, strict=True))
        kind = next((k for k, known in kinds.values.items() if _is_kind(known, here)), None)
        if kind is None:
            return {}
        layers.append(kind)
        numbers |= {name: here[key] for key, name in kinds.values[kind].items() if isinstance(name, str)}
    return {kinds.key: layers, **numbers} if layers else {}


def _is_kind(known: Mapping[str, Scalar], here: Mapping[str, Any]) -> bool:
    """Return whether a layer matches a kind; texts match nonzero numbers."""
    return all(bool(here[key]) if isinstance(item, str) else here[key] == item for key, item in known.items())


def _short(value: float) -> float:
    """Return the shortest decimal of a float32 value, such as 1e-05."""
    return float(format(value, ".7g"))


def _rope_config(
    family: Family, said: Mapping[str, Any], config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    def value(key: str, usual: Any) -> Any:
        found = said.get(f"rope.{key}", usual)
        return _short(found) if isinstance(found, float) else found

    found: dict[str, Any] = {"rope_theta": value("freq_base", 10000.0)}
    kind, factor, rotated = (
        value("scaling.type", None),
        value("scaling.factor", None),
        value("dimension_count", None),
    )
    local = value("freq_base_swa", 10000.0 if family.architecture == "gemma3" else None)
    if local is not None:
        found["rope_local_base_freq"] = local
    if kind in ("linear", "yarn") and factor:
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
        original = value("scaling.original_context_length", None)
        if kind == "yarn" and original is not None:
            found["rope_scaling"]["original_max_position_embeddings"] = original
        for bound in ("beta_fast", "beta_slow"):
            if kind == "yarn" and (said_so := value(f"scaling.yarn_{bound}", None)) is not None:
                found["rope_scaling"][bound] = said_so
    if family.rotary is not None and isinstance(rotated, int):
        found["partial_rotary_factor"] = rotated / head_size(config)
    if factors is not None and "proportional" in family.scalings:
        part = sum(factor < _UNROTATED / 2 for factor in factors) / len(factors)
        return {"rope_parameters": {
            "full_attention": {**found, "rope_type": "proportional", "partial_rotary_factor": part},
            "sliding_attention": {"rope_type": "default", "rope_theta": found.pop("rope_local_base_freq",
            1e4)},
        }}  # fmt: skip
    if factors is not None:
        found["rope_scaling"] = _llama3(factors, found["rope_theta"], head_size(config))
    return found


def _llama3(factors: Sequence[float], theta: float, size: int) -> dict[str, Any]:
    """Return Llama 3's scaling for factors; raises UnsupportedError if unknown."""
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
