"""Directories of torchao and of LLM.int8 that say wrongly how they are quantized, or hold wrong tensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from tests.codecs.torchao_files import wrapped
from tests.hostile.case import Case
from tests.hostile.layout import DROP, Layout, Table, case_of, cases_of, given

_I8, _U8, _BF16 = torch.int8, torch.uint8, torch.bfloat16
_INTX = "IntxUnpackedToInt8Tensor"


_DATA: Mapping[str, Any] = {
    "target_dtype": wrapped("torch.dtype", "int4"), "block_size": [1, 32],
    "dtype": wrapped("torch.dtype", "bfloat16"), "activation_quantization": None,
}  # fmt: skip


def described(kind: object = _INTX, **changes: object) -> dict[str, str]:
    """Return the metadata of a file of torchao, with other values of what it says of the layer."""
    data = {key: value for key, value in {**_DATA, **changes}.items() if value is not DROP}
    return _metadata(json.dumps(wrapped(kind, data)))


def _metadata(text: str) -> dict[str, str]:
    return {"format": "pt", "tensor_names": '["a.weight"]', "a.weight": text}


_CONFIG = wrapped("IntxWeightOnlyConfig", {"mapping_type": wrapped("MappingType", "SYMMETRIC")})
EIGHT_BIT_LAYOUTS: Mapping[str, Layout] = MappingProxyType({
    "torchao": Layout(
        section={"quant_method": "torchao", "quant_type": {"default": _CONFIG}}, metadata=described(),
        tensors={
            "a._weight_qdata": torch.zeros(8, 64, dtype=_I8),
            "a._weight_scale": torch.ones(8, 2, dtype=_BF16),
            "a._weight_zero_point": torch.zeros(8, 2, dtype=_I8),
        },
    ),
    "llm-int8": Layout(
        section={"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        tensors={
            "a.weight": torch.zeros(8, 64, dtype=_I8), "a.SCB": torch.ones(8),
            "a.weight_format": torch.zeros((), dtype=_U8),
        },
    ),
})  # fmt: skip

_TORCHAO_CONFIGS: Table = (
    (given(modules_to_not_convert=5), "modules_to_not_convert of quantization_config is 5, but must be"),
    (given(modules_to_not_convert="a"), "modules_to_not_convert of quantization_config is 'a', but must"),
    (given(modules_to_not_convert=[3]), "modules_to_not_convert of quantization_config is [3], but must"),
)
_TORCHAO_TENSORS: Table = (
    (given(_weight_qdata=DROP), "_weight_qdata is missing, which IntxUnpackedToInt8Tensor needs"),
    (given(_weight_scale=DROP), "_weight_scale is missing, which IntxUnpackedToInt8Tensor needs"),
    (given(_weight_zero_point=DROP), "_weight_zero_point is missing, which IntxUnpackedToInt8Tensor"),
    (given(_weight_qdata=torch.zeros(8, dtype=_I8)), "_weight_qdata has shape [8], but must be a matrix"),
    (given(_weight_qdata=torch.zeros(0, 64, dtype=_I8)), "is empty"),
    (given(_weight_qdata=torch.zeros(8, 63, dtype=_I8)), "last axis 63 is not a multiple of the group, 32"),
    (given(_weight_qdata=torch.zeros(8, 64, dtype=_U8)), "_weight_qdata is U8 of shape [8, 64], but must be"),
    (given(_weight_scale=torch.ones(8, 2, dtype=torch.int32)), "_weight_scale is I32, but must be one of"),
    (given(_weight_scale=torch.ones(8, 3).to(_BF16)), "_weight_scale is BF16 of shape [8, 3], but must"),
    (given(_weight_scale=torch.full((8, 2), float("nan")).to(_BF16)), "rows from 0 on: scale 1 (=nan) of"),
    (given(_weight_scale=torch.zeros(8, 2).to(_BF16)), "scale 1 (=0.0) of block (0, 0) must be"),
    (given(_weight_qdata=torch.full((8, 64), 8, dtype=_I8)), "_weight_qdata has codes of more than 4 bits"),
    (given(_weight_qdata=torch.full((8, 64), -9, dtype=_I8)), "_weight_qdata has codes of more than 4 bits"),
    (given(_weight_zero_point=torch.ones(8, 2, dtype=_I8)), "_weight_zero_point is not 0, but the scheme"),
    (given(_weight_act_pre_scale=torch.ones(1)), "_weight_act_pre_scale has no place in"),
    (given(_weight_per_tensor_scale=torch.ones(())), "_weight_per_tensor_scale has no place in"),
)
_UNTOLD = "the metadata does not describe it; the file is damaged"
_TORCHAO_METADATA: Sequence[tuple[str, Mapping[str, str], str]] = (
    ("no metadata", {"format": "pt"}, "its files have no metadata of torchao"),
    ("nothing of the layer", {"tensor_names": "[]"}, _UNTOLD),
    ("no JSON", _metadata("{"), _UNTOLD), ("a list", _metadata("[]"), _UNTOLD),
    ("a number", _metadata("1e400"), _UNTOLD), ("JSON that is deep", _metadata("[" * 100_000), _UNTOLD),
    ("no data", _metadata('{"_type": "Int8Tensor"}'), _UNTOLD),
    ("a plain tensor", _metadata('{"_type": "Tensor"}'), _UNTOLD),
    ("an unknown class", described("UIntxTensor"), "weights of class 'UIntxTensor' are not read; known are"),
    ("a class that is a list", described([1]), "weights of class [1] are not read; known are"),
    ("a class with a long name", described("x" * 9999), "are not read; known are"),
    ("another class", described("Int8Tensor"), "Int8Tensor of int8:g32"),
    ("another class of floats", described("Float8Tensor"), "Float8Tensor of float8_e4m3fn:g32"),
    ("blocks of rows", described(block_size=[2, 32]), "block_size [2, 32] in its metadata is not read"),
    ("blocks of 0", described(block_size=[1, 0]), "block_size [1, 0] in its metadata is not read"),
    ("blocks of -1", described(block_size=[1, -1]), "block_size [1, -1] in its metadata is not read"),
    ("blocks of True", described(block_size=[1, True]), "block_size [1, True] in its metadata is not read"),
    ("blocks of text", described(block_size="1, 32"), "block_size '1, 32' in its metadata is not read"),
    ("blocks too long", described(block_size=[1, 10**40]), "option 'g1000000000"),
    ("other blocks", described(block_size=[1, 16]), "_weight_scale is BF16 of shape [8, 2], but must be"),
    ("no blocks", described(block_size=DROP), "block_size None in its metadata is not read"),
    (
        "1 bit",
        described(target_dtype=wrapped("torch.dtype", "int1")),
        "target_dtype 'int1' in its metadata is not read; known are int2",
    ),
    ("no bits", described(target_dtype=DROP), "target_dtype None in its metadata is not read"),
    ("bits of text", described(target_dtype="x\x1b" * 50), "in its metadata is not read; known are int2"),
    ("no dtype", described(dtype=DROP), "dtype in its metadata is None, but must be one of bfloat16"),
    ("a dtype of integers", described(dtype=wrapped("torch.dtype", "int8")), "dtype in its metadata is 'in"),
    ("inputs of a word", described(activation_quantization="x"), "quantized inputs 'x' in its metadata"),
    ("inputs of an unknown kind", described(act_quant_kwargs=wrapped("Q", {})), "quantized inputs {'_type'"),
)  # fmt: skip
_LLM_INT8_CONFIGS: Table = (
    (given(llm_int8_skip_modules=5), "llm_int8_skip_modules of quantization_config is 5, but must be"),
    (given(llm_int8_skip_modules="lm_head"), "llm_int8_skip_modules of quantization_config is 'lm_head'"),
    (given(llm_int8_skip_modules=[None]), "llm_int8_skip_modules of quantization_config is [None], but must"),
    (given(llm_int8_skip_modules={"a": 1}), "llm_int8_skip_modules of quantization_config is {'a': 1}, but"),
)
_LLM_INT8_TENSORS: Table = (
    (given(SCB=DROP), "SCB is missing, which int8 needs"),
    (given(weight=DROP), "weight is missing, which int8 needs"),
    (given(weight=torch.zeros(8, 64, dtype=_U8)), "weight is U8 of shape [8, 64], but must be I8 of shape"),
    (given(weight=torch.zeros(8, 64, dtype=_BF16)), "weight is BF16 of shape [8, 64], but must be I8 of"),
    (given(weight=torch.zeros(8, dtype=_I8)), "weight has shape [8], but must be a matrix"),
    (given(weight=torch.zeros(2, 4, 64, dtype=_I8)), "weight has shape [2, 4, 64], but must be a matrix"),
    (given(weight=torch.zeros(0, 64, dtype=_I8)), "is empty"),
    (given(SCB=torch.ones(7)), "SCB is F32 of shape [7], but must be F32 of shape [8]"),
    (given(SCB=torch.ones(8, 1)), "SCB is F32 of shape [8, 1], but must be F32 of shape [8]"),
    (given(SCB=torch.ones(8, dtype=torch.float16)), "SCB is F16 of shape [8], but must be F32"),
    (given(SCB=torch.full((8,), float("nan"))), "scale 1 (=nan) of block (0, 0) must be finite"),
    (given(SCB=torch.full((8,), float("inf"))), "scale 1 (=inf) of block (0, 0) must be finite"),
    (given(SCB=-torch.ones(8)), "of block (0, 0) must be finite"),
    (given(SCB=torch.zeros(8), weight=torch.ones(8, 64, dtype=_I8)), "scale 1 (=0.0) of block (0, 0) must"),
    (given(weight_format=torch.ones((), dtype=_U8)), "weight_format is 1, which older releases wrote"),
    (given(weight_format=torch.zeros(2, dtype=_U8)), "weight_format is U8 of shape [2], but must be U8"),
    (given(weight_format=torch.zeros(())), "weight_format is F32 of shape [], but must be U8"),
)


def _cases() -> Iterator[Case]:
    torchao, llm_int8 = EIGHT_BIT_LAYOUTS.values()
    yield from cases_of("torchao", torchao, _TORCHAO_CONFIGS, _TORCHAO_TENSORS)
    for name, metadata, words in _TORCHAO_METADATA:
        yield case_of(f"torchao metadata: {name}", torchao.files(metadata=metadata), words)
    yield from cases_of("llm-int8", llm_int8, _LLM_INT8_CONFIGS, _LLM_INT8_TENSORS)


EIGHT_BIT_CASES: tuple[Case, ...] = tuple(_cases())
