"""Directories that say of themselves that they are quantized, and say it wrongly: for inspect and verify."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from tests.hostile.case import Case

from zeropoint.codecs.compressed_tensors import layer_scheme
from zeropoint.codecs.compressed_tensors.config import Group, quantization_config

WEIGHTS = {"a.weight_packed": torch.zeros(8, 4, dtype=torch.int32), "a.weight_scale": torch.ones(8, 1),
           "a.weight_shape": torch.tensor([8, 32])}  # fmt: skip
CONFIG: dict[str, Any] = quantization_config([Group(layer=layer_scheme("int4:channel"))], [])
GROUP: dict[str, Any] = CONFIG["config_groups"]["group_0"]
_NAME = "group_0"


_Change = tuple[str, dict[str, Any]]


def _config(**fields: object) -> _Change:
    return str(fields), fields


def _group(**fields: object) -> _Change:
    return f"group {fields}", {"config_groups": {_NAME: {**GROUP, **fields}}}


def _weights(**arguments: object) -> _Change:
    return f"weights {arguments}", _group(weights={**GROUP["weights"], **arguments})[1]


_LONG = "x." * 2000
# What replaces fields of a right configuration, and the words with which it is refused.
_CHANGES: tuple[tuple[_Change, str], ...] = (
    (_config(quant_method="spqr"), "quant_method is 'spqr'"),
    (_config(quant_method="gptq"), "GPTQ weights of None bits"),
    (_config(quant_method=None), "quantized by a tool that is not known here"),
    (_config(quant_method=["x"]), "quantized by a tool that is not known here"),
    (_config(config_groups=None), "must be an object of objects"),
    (_config(config_groups=[]), "must be an object of objects"),
    (_config(config_groups={"g": []}), "must be an object of objects"),
    (_group(weights=None), "lacks weights or targets"), (_group(targets=None), "lacks weights or targets"),
    (_group(targets="Linear"), "lacks weights or targets"), (_group(format="x"), "layout 'x' cannot be read"),
    (_group(format=["pack-quantized"]), "cannot be read"), (_group(format={"x": 1}), "cannot be read"),
    (_group(format="marlin-24"), "layout 'marlin-24' cannot be read"),
    (_group(format="float-quantized"), "does not fit"),
    (_weights(num_bits=1), "cannot be read"),
    (_weights(num_bits=9), "cannot be read"), (_weights(num_bits=10**30), "cannot be read"),
    (_weights(num_bits="4"), "cannot be read"), (_weights(num_bits=None), "cannot be read"),
    (_weights(num_bits=4.5), "cannot be read"), (_weights(type="bool"), "cannot be read"),
    (_weights(type=["int"]), "cannot be read"), (_weights(strategy="x"), "strategy 'x'"),
    (_weights(strategy=["x"]), "strategy ['x']"), (_weights(strategy="group", group_size=None), "strategy"),
    (_weights(strategy="group", group_size=2.5), "strategy 'group'"),
    (_weights(strategy="group", group_size=10**40), "option 'g1000"),
    (_weights(strategy="group", group_size=True), "option 'gTrue'"),
    (_weights(strategy="block", block_structure=[]), "block"),
    (_weights(strategy="block", block_structure=["x", 1]), "block"),
    (_weights(strategy="block", block_structure=[-1, 0]), "block"),
    (_weights(strategy="block", block_structure=[[1], 2]), "block"),
    (_weights(strategy="tensor_group", group_size=16), "does not fit|layout|scale"),
    (_weights(symmetric=False), "weight_zero_point is missing"),
    (_weights(strategy="group", group_size=16), "weight_scale is F32 of shape [8, 1], but must be"),
    (_weights(num_bits=8), "weight_packed is I32 of shape [8, 4], but must be I32 of shape [8, 8]"),
    (_group(targets=["b"]), "no group of the configuration names it"),
    (_group(targets=[]), "no group of the configuration names it"),
    (_group(targets=["re:("]), "is not a regular expression"), (_group(targets=["re:*"]), "is not a regular"),
    (_group(targets=["re:(a+)+$"]), "is refused"), (_group(targets=["re:(a|a)*b"]), "is refused"),
    (_group(targets=["re:" + ".*" * 40 + "b"]), "no group of the configuration names it"),
    (_group(targets=["re:" + "(" * 5000 + ")" * 5000]), "is not a regular expression|is refused"),
    (_group(targets=["re:a{1,4294967296}"]), "is not a regular expression|is refused"),
    (_group(targets=[None, 3, {}, _LONG]), "no group of the configuration names it"),
    (_config(ignore="lm_head"), "ignore of quantization_config must be a list"),
    (_config(ignore=["re:["]), "is not a regular expression"),
    (_config(ignore=["a"]), "but the configuration ignores it"),
    (_config(ignore={"a": 1}), "ignore of quantization_config must be a list"),
)  # fmt: skip


def _tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    merged = {**WEIGHTS, **{f"a.{name}": tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


def _shape(*extents: int) -> dict[str, torch.Tensor]:
    return _tensors(weight_shape=torch.tensor(extents))


_DAMAGES: tuple[tuple[str, Mapping[str, torch.Tensor], str], ...] = (
    ("no shape", _tensors(weight_shape=None), "weight_shape is missing"),
    ("no scale", _tensors(weight_scale=None), "weight_scale is missing"),
    ("no codes", _tensors(weight_packed=None), "weight_packed is missing"),
    ("scale alone", _tensors(weight_packed=None, weight_shape=None), "weight_shape is missing"),
    ("shape of three", _shape(8, 32, 1), "weight_shape is I64 of shape [3], but must be I64 of [2]"),
    ("shape of floats", _tensors(weight_shape=torch.ones(2)), "weight_shape is F32 of shape [2]"),
    ("shape with 0", _shape(0, 32), "is empty"), ("shape with 2**62", _shape(2**62, 2**62), "but must be"),
    ("negative shape", _shape(-8, -32), "must be|positive|negative"),
    ("shape transposed", _shape(32, 8), "but must be I32 of shape"),
    ("shape too wide", _shape(8, 33), "but must be I32 of shape [8, 5]"),
    ("smallest shape", _shape(-(2**63), 2**63 - 1), "must be|positive|negative"),
    ("codes of bytes", _tensors(weight_packed=torch.zeros(8, 4, dtype=torch.uint8)), "is U8 of shape [8, 4]"),
    ("codes of one axis", _tensors(weight_packed=torch.zeros(32, dtype=torch.int32)), "is I32 of shape [32]"),
    ("scale of integers", _tensors(weight_scale=torch.ones(8, 1, dtype=torch.int64)), "is I64, but must"),
    ("scale of booleans", _tensors(weight_scale=torch.ones(8, 1, dtype=torch.bool)), "is BOOL, but must"),
    ("scale without axes", _tensors(weight_scale=torch.ones(())), "weight_scale is F32 of shape []"),
    ("weight too", _tensors(weight=torch.ones(8, 32)), "weight has no place in pack-quantized"),
    ("groups not there", _tensors(weight_g_idx=torch.ones(32, dtype=torch.int32)), "has groups 1 to 1"),
    ("groups below", _tensors(weight_g_idx=torch.full((32,), -7, dtype=torch.int32)), "has groups -7 to -7"),
    ("groups of half", _tensors(weight_g_idx=torch.zeros(16, dtype=torch.int32)), "must be I32 of [32]"),
    ("groups of bytes", _tensors(weight_g_idx=torch.zeros(32, dtype=torch.uint8)), "must be I32 of [32]"),
)  # fmt: skip


def _case(name: str, words: str, config: object, tensors: Mapping[str, torch.Tensor] = WEIGHTS) -> Case:
    text = json.dumps({"quantization_config": config}).encode()
    content = {"model.safetensors": save(dict(tensors)), "config.json": text}
    return Case(topic="quantized", name=name, content=content, refusal=words)


QUANTIZED: tuple[Case, ...] = (
    *(_case(f"config with {label[:60]}", words, {**CONFIG, **change}) for (label, change), words in _CHANGES),
    *(_case(name, words, CONFIG, tensors) for name, tensors, words in _DAMAGES),
    *(_case(f"config is {value!r}", "not an object", value) for value in ([], "x", 3, True)),
)
