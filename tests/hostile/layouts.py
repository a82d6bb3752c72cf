"""Directories in layouts of other tools that say wrongly how they are quantized, or hold wrong tensors."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from tests.hostile.case import Case
from tests.hostile.eight_bit_layouts import EIGHT_BIT_CASES, EIGHT_BIT_LAYOUTS
from tests.hostile.layout import DROP, STATE, Changes, Layout, cases_of, given
from tests.hostile.mlx_layout import MLX_CASES, MLX_LAYOUTS

from zeropoint.formats import get_format

_I32, _U8, _F16 = torch.int32, torch.uint8, torch.float16
_E4M3 = torch.float8_e4m3fn
_LONG = "x." * 2000


def _state(**changes: object) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [16, 64], **changes}
    return _text(json.dumps({key: value for key, value in state.items() if value is not DROP}))


def _text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=_U8)


_NF4 = torch.tensor(get_format("nf4").values)  # type: ignore[union-attr]
_LAYOUTS: Mapping[str, Layout] = MappingProxyType({
    "gptq": Layout(
        section={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        tensors={
            "a.qweight": torch.full((8, 32), 0x08080808, dtype=_I32),
            "a.qzeros": torch.full((2, 4), 0x77777777, dtype=_I32),
            "a.scales": torch.ones(2, 32, dtype=_F16), "a.g_idx": torch.arange(64, dtype=_I32) // 32,
        },
    ),
    "awq": Layout(
        section={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        tensors={
            "a.qweight": torch.zeros(64, 4, dtype=_I32), "a.qzeros": torch.zeros(2, 4, dtype=_I32),
            "a.scales": torch.ones(2, 32, dtype=_F16),
        },
    ),
    "modelopt": Layout(
        section={"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []},
        tensors={
            "a.weight": torch.zeros(32, 32, dtype=_U8), "a.weight_scale": torch.ones(32, 4).to(_E4M3),
            "a.weight_scale_2": torch.ones(()),
        },
    ),
    "bitsandbytes": Layout(
        section={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        tensors={
            "a.weight": torch.zeros(512, 1, dtype=_U8), "a.weight.absmax": torch.ones(16),
            "a.weight.quant_map": _NF4, STATE: _state(),
        },
    ),
    "fp8-block": Layout(
        section={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]},
        tensors={
            "a.weight": torch.zeros(32, 32).to(_E4M3), "a.weight_scale_inv": torch.ones(2, 2),
        },
    ),
    "gpt-oss": Layout(
        section={"quant_method": "mxfp4", "modules_to_not_convert": []}, model_type="gpt_oss",
        tensors={
            f"m.experts.{name}_{part}": torch.zeros(shape, dtype=_U8)
            for name in ("gate_up_proj", "down_proj") for part, shape in
            (("blocks", (2, 64, 1, 16) if name[0] == "g" else (2, 32, 1, 16)),
             ("scales", (2, 64, 1) if name[0] == "g" else (2, 32, 1)))
        },
    ),
    "quark": Layout(
        section={
            "quant_method": "quark", "exclude": [], "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True},
            },
        },
        tensors={"a.weight": torch.zeros(32, 32).to(_E4M3), "a.weight_scale": torch.ones(32)},
    ),
})  # fmt: skip
LAYOUTS: Mapping[str, Layout] = MappingProxyType({**_LAYOUTS, **EIGHT_BIT_LAYOUTS, **MLX_LAYOUTS})


def _weight(dtype: object, qscheme: object = None, **more: object) -> Changes:
    """Return a configuration of Quark with such weights."""
    return given(global_quant_config={"weight": {"dtype": dtype, "qscheme": qscheme, **more}})


def _mixed(**layers: object) -> Changes:
    """Return a configuration of ModelOpt with an algorithm for each layer."""
    return given(quant_algo="MIXED_PRECISION", quantized_layers=layers)


def _nested(offset: object = DROP, block: int = 256) -> Changes:
    """Return the state of double quantization."""
    return given(STATE=_state(nested_offset=offset, nested_blocksize=block, nested_dtype="float32"))


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=_I32)


_CONFIGS: Mapping[str, Sequence[tuple[Changes, str]]] = MappingProxyType({
    "gptq": (
        (given(bits=DROP), "GPTQ weights of None bits cannot be read; known are (2, 3, 4,"),
        (given(bits=5), "GPTQ weights of 5 bits cannot be read; known are (2, 3, 4, 8)"),
        (given(bits="4"), "GPTQ weights of '4' bits cannot be read; known are (2, 3, 4,"),
        (given(bits=True), "GPTQ weights of True bits cannot be read; known are (2, 3, 4,"),
        (given(bits=[4]), "GPTQ weights of [4] bits cannot be read; known are (2, 3, 4,"),
        (given(bits=10**30), "GPTQ weights of 1000000000000000000000000000000 bits cannot"),
        (given(group_size=DROP), "group_size of quantization_config is None, but must be -1 or"),
        (given(group_size=0), "group_size of quantization_config is 0, but must be -1 or"),
        (given(group_size=-2), "group_size of quantization_config is -2, but must be -1 or"),
        (given(group_size=2.5), "group_size of quantization_config is 2.5, but must be -1 or"),
        (given(group_size=10**40), "option 'g10000000000000000000000000000000000000000' of scheme"),
        (given(group_size=2**32), "g_idx has groups 0 to 1, but there are 0 to 0"),
        (given(group_size=48), "its g_idx puts inputs into groups out of order, but desc_act"),
        (given(group_size=7), "its g_idx puts inputs into groups out of order, but desc_act"),
        (given(checkpoint_format="marlin"), "GPTQ files of checkpoint_format and pack_dtype ('marlin',"),
        (given(checkpoint_format=["gptq"]), "GPTQ files of checkpoint_format and pack_dtype (['gptq'],"),
        (given(checkpoint_format="x"*5000), "GPTQ files of checkpoint_format and pack_dtype"),
        (given(pack_dtype="int64"), "GPTQ files of checkpoint_format and pack_dtype ('gptq',"),
        (given(dynamic=["x"]), "dynamic of quantization_config must be an object"),
        (given(dynamic="x"), "dynamic of quantization_config must be an object"),
        (given(dynamic={"+:a": []}), "dynamic of quantization_config has [] for '+:a', but must"),
        (given(dynamic={"+:a": {"bits": 5}}), "GPTQ weights of 5 bits cannot be read"),
        (given(dynamic={"+:(": {}}), "pattern '(' is not a regular expression: missing ),"),
        (given(dynamic={"+:(a+)+$": {}}), "pattern '(a+)+$' is refused: a group that repeats holds"),
        (given(dynamic={"+:a": {"bits": 8}}), "g_idx is I32 of shape [64], but must be I32 of [32]"),
        (given(bits=2), "g_idx is I32 of shape [64], but must be I32 of [128]"),
    ),
    "awq": (
        (given(bits=8), "AWQ weights of bits 8, version"),
        (given(bits=None), "AWQ weights of bits None, version"),
        (given(bits="4"), "AWQ weights of bits '4', version"),
        (given(group_size=0), "group_size of quantization_config is 0, but must be -1 or"),
        (given(group_size="32"), "group_size of quantization_config is '32', but must be -1 or"),
        (given(group_size=-5), "group_size of quantization_config is -5, but must be -1 or"),
        (given(group_size=64), "qzeros is I32 of shape [2, 4], but must be I32 of shape [1,"),
        (given(group_size=2**70), "option 'g1180591620717411303424' of scheme"),
        (given(zero_point=False), "AWQ weights of bits 4, version"),
        (given(version="gemv"), "AWQ weights of bits 4, version"),
        (given(version=["gemm"]), "AWQ weights of bits 4, version"),
        (given(version=None), "AWQ weights of bits 4, version"),
        (given(modules_to_not_convert=5), "modules_to_not_convert of quantization_config is 5, but must"),
        (given(modules_to_not_convert="a"), "modules_to_not_convert of quantization_config is 'a', but"),
        (given(modules_to_not_convert=[None]), "modules_to_not_convert of quantization_config is [None],"),
        (given(modules_to_not_convert={"a": 1}), "modules_to_not_convert of quantization_config is"),
        (given(w_bit=8, bits=DROP), "AWQ weights of bits 8, version"),
        (given(format="gemv", version=DROP), "version 'gemv'"),
    ),
    "modelopt": (
        (given(quant_algo=DROP), "quant_algo is None, but must be text"),
        (given(quant_algo=4), "quant_algo is 4, but must be text"),
        (given(quant_algo="FP4"), "quant_algo 'FP4' of ModelOpt is not read here; known are"),
        (given(quant_algo=["FP8"]), "quant_algo is ['FP8'], but must be text"),
        (given(quant_algo="MXFP8"), "weight is U8 of shape [32, 32], but must be F8_E4M3 of shape"),
        (given(quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' of ModelOpt is not read here; known"),
        (given(quant_algo="x\x1b[31m"*500), "quant_algo 'X\\x1b[31MX\\x1b[31MX\\x1b[31MX\\x1b[31MX\\x of"),
        (given(quant_algo="MIXED_PRECISION"), "MIXED_PRECISION needs quantized_layers, an object of objects"),
        (given(quant_algo="MIXED_PRECISION", quantized_layers={}), "MIXED_PRECISION needs quantized_layers,"),
        (given(quant_algo="MIXED_PRECISION", quantized_layers=[]), "MIXED_PRECISION needs quantized_layers,"),
        (_mixed(a=4), "MIXED_PRECISION needs quantized_layers, an object of objects"),
        (_mixed(b={"quant_algo": "FP8"}), "it is quantized, but quantized_layers of the configuration"),
        (_mixed(a={"quant_algo": "INT3"}), "quant_algo 'INT3' of ModelOpt is not read here; known are"),
        (given(ignore="a"), "ignore and exclude_modules must be lists of names"),
        (given(ignore=[3]), "ignore and exclude_modules must be lists of names"),
        (given(ignore={"a": 1}), "ignore and exclude_modules must be lists of names"),
        (given(group_size="16"), "group_size is '16', but W4A16_NVFP4 has 16; correct the"),
        (given(config_groups={"g": {"weights": {"num_bits": 8}}}), "config_groups has weights of 8 bits,"),
    ),
    "bitsandbytes": (
        (given(load_in_4bit=False), "quantization_config of bitsandbytes has neither"),
        (given(load_in_4bit=DROP), "quantization_config of bitsandbytes has neither"),
        (given(llm_int8_skip_modules=5), "llm_int8_skip_modules of quantization_config is 5, but must"),
        (given(llm_int8_skip_modules=True), "llm_int8_skip_modules of quantization_config is True, but"),
    ),
    "fp8-block": (
        (given(fmt="e5m2"), "fp8 weights with fmt 'e5m2' cannot be read; known is 'e4m3'"),
        (given(fmt=["e4m3"]), "fp8 weights with fmt ['e4m3'] cannot be read; known is 'e4m3'"),
        (given(fmt=None), "fp8 weights with fmt None cannot be read; known is 'e4m3'"),
        (given(weight_block_size=[0, 16]), "weight_block_size of quantization_config is [0, 16], but must"),
        (given(weight_block_size=[16]), "weight_block_size of quantization_config is [16], but must be"),
        (given(weight_block_size=16), "weight_block_size of quantization_config is 16, but must be"),
        (given(weight_block_size=[16, -1]), "weight_block_size of quantization_config is [16, -1], but"),
        (given(weight_block_size=["16", "16"]), "weight_block_size of quantization_config is ['16', '16'],"),
        (given(weight_block_size=[2.5, 16]), "weight_block_size of quantization_config is [2.5, 16], but"),
        (given(weight_block_size=[True, True]), "weight_block_size of quantization_config is [True, True],"),
        (given(weight_block_size=[10**40, 16]), "option 'block10000000000000000000000000000000000000000x16'"),
        (given(weight_block_size=[8, 16]), "its factors have shape [2, 2], but must have [4, 2]"),
        (given(weight_block_size=DROP), "its factors have shape [2, 2], but must have [1]"),
        (given(weight_block_size={"a": 1}), "weight_block_size of quantization_config is {'a': 1}, but"),
    ),
    "gpt-oss": (
        (given(modules_to_not_convert=5), "modules_to_not_convert of quantization_config is 5, but must"),
        (given(modules_to_not_convert="x"), "modules_to_not_convert of quantization_config is 'x', but"),
    ),
    "quark": (
        (given(global_quant_config=DROP), "its entry of the configuration is None, but must be an object"),
        (given(global_quant_config=[]), "its entry of the configuration is [], but must be an object"),
        (given(global_quant_config={"weight": None}), "weight of the configuration is None, but must be an"),
        (given(global_quant_config={"weight": []}), "weight of the configuration is [], but must be an"),
        (given(global_quant_config={"weight": {"dtype": "fp9"}}), "weights of Quark with {'dtype': 'fp9',"),
        (_weight(["int8"], "per_tensor"), "weights of Quark with {'dtype': ['int8'], 'qscheme':"),
        (_weight("int8", "per_channel", symmetric=False), "'symmetric': False"),
        (_weight("int8", ["x"]), "weights of Quark with {'dtype': 'int8', 'qscheme': ['x'],"),
        (
            _weight("int4", "per_group", group_size=10**30, symmetric=True),
            "option 'g1000000000000000000000000000000' of scheme",
        ),
        (_weight("int4", "per_group", group_size=0, symmetric=True), "'group_size': 0"),
        (given(layer_quant_config=[1]), "layer_quant_config and exclude must be an object and a list;"),
        (given(layer_quant_config={"a": 4}), "its entry of the configuration is 4, but must be an object"),
        (given(layer_quant_config={"re:(": {}}), "pattern '(' is not a regular expression: missing ),"),
        (given(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config of Quark is not read here;"),
        (given(exclude="a"), "layer_quant_config and exclude must be an object and a list;"),
        (given(exclude=["re:(a+)+$"]), "pattern '(a+)+$' is refused: a group that repeats holds"),
        (given(exclude={"a": 1}), "layer_quant_config and exclude must be an object and a list;"),
        (given(export={"pack_method": "order"}), "pack_method 'order' of Quark is not read here; known is"),
        (given(export={"pack_method": ["x"]}), "pack_method ['x'] of Quark is not read here; known is"),
    ),
})  # fmt: skip
"""Changes of quantization_config, and words of the refusal."""
_TENSORS: Mapping[str, Sequence[tuple[Changes, str]]] = MappingProxyType({
    "gptq": (
        (given(qweight=DROP), "qweight is missing, which the layer needs"),
        (given(qzeros=DROP), "qzeros is missing, which gptq needs"),
        (given(scales=DROP), "scales is missing, which the layer needs"),
        (given(qweight=_int32(8)), "qweight has shape [8], as no weight of 4 bits has"),
        (given(qweight=_int32(8, 32, 1)), "qweight has shape [8, 32, 1], as no weight of 4 bits has"),
        (given(qweight=torch.zeros(8, 32)), "qweight is F32 of shape [8, 32], but must be I32 of shape [8,"),
        (given(qweight=_int32(7, 32)), "g_idx is I32 of shape [64], but must be I32 of [56]"),
        (given(qweight=_int32(0, 32)), "g_idx is I32 of shape [64], but must be I32 of [0]"),
        (given(qweight=_int32(8, 31)), "first axis 31 does not fill whole words, of 8 codes"),
        (given(qzeros=_int32(2, 3)), "qzeros is I32 of shape [2, 3], but must be I32 of shape [2,"),
        (given(qzeros=torch.zeros(2, 4)), "qzeros is F32 of shape [2, 4], but must be I32 of shape [2,"),
        (given(scales=torch.ones(2, 31).half()), "scales is F16 of shape [2, 31], but must be F16 of shape"),
        (given(scales=torch.ones(2, 32).to(_I32)), "scales is I32, but must be one of F16, BF16, F32"),
        (given(scales=torch.full((2, 32), float("nan")).half()), "columns from 0 on: scale 1 (=nan) of"),
        (given(scales=torch.zeros(2, 32).half()), "columns from 0 on: scale 1 (=0.0) of block (0, 0) must"),
        (given(scales=torch.full((2, 32), -float("inf")).half()), "columns from 0 on: scale 1 (=-inf) of"),
        (given(g_idx=torch.arange(63, dtype=_I32)), "g_idx is I32 of shape [63], but must be I32 of [64]"),
        (given(g_idx=torch.full((64, ), -1, dtype=_I32)), "g_idx has groups -1 to -1, but there are 0 to 1"),
        (given(g_idx=torch.full((64, ), 2**31-1, dtype=_I32)), "g_idx has groups 2147483647 to 2147483647,"),
        (given(g_idx=torch.arange(64, dtype=_I32).flip(0)//32), "groups out of order, but desc_act"),
        (given(g_idx=torch.arange(64).float()), "g_idx is F32 of shape [64], but must be I32 of [64]"),
        (given(qzeros=torch.full((2, 4), 0x11111111, dtype=_I32)), "a zero point is stored as 1, not 7"),
    ),
    "awq": (
        (given(qweight=DROP), "qweight is missing, which the layer needs"),
        (given(qzeros=DROP), "qzeros is missing, which gemm needs"),
        (given(scales=DROP), "scales is missing, which the layer needs"),
        (given(qweight=_int32(64)), "qweight has shape [64], as no weight has"),
        (given(qweight=_int32(64, 3)), "qzeros is I32 of shape [2, 4], but must be I32 of shape [2,"),
        (given(qweight=torch.zeros(64, 4)), "qweight is F32 of shape [64, 4], but must be I32 of shape"),
        (given(qweight=_int32(0, 4)), "is empty"),
        (given(qzeros=_int32(4, 2)), "qzeros is I32 of shape [4, 2], but must be I32 of shape [2,"),
        (given(scales=torch.ones(2, 32).to(torch.int64)), "scales is I64, but must be one of F16, BF16, F32"),
        (given(scales=torch.ones(32).half()), "scales is F16 of shape [32], but must be F16 of shape [2,"),
        (given(scales=torch.full((2, 32), float("inf")).half()), "columns from 0 on: scale 1 (=inf) of"),
        (given(scales=torch.zeros(2, 32).half()), "scale 1 (=0.0) of block (0, 0) must be"),
        (given(scales=torch.full((2, 32), -float("inf")).half()), "columns from 0 on: scale 1 (=-inf) of"),
    ),
    "modelopt": (
        (given(weight=DROP), "weight is missing, which W4A16_NVFP4 needs"),
        (given(weight_scale=DROP), "weight_scale is missing, which W4A16_NVFP4 needs"),
        (given(weight_scale_2=DROP), "weight_scale_2 is missing, which W4A16_NVFP4 needs"),
        (given(weight=torch.zeros(32, dtype=_U8)), "weight has shape [32], but must be a matrix"),
        (given(weight=torch.zeros(32, 32)), "weight is F32 of shape [32, 32], but must be U8 of shape [32,"),
        (given(weight=torch.zeros(0, 32, dtype=_U8)), "is empty"),
        (given(weight=torch.zeros(32, 31, dtype=_U8)), "last axis 62 is not a multiple of the group, 16"),
        (given(weight_scale=torch.ones(32, 4)), "weight_scale is F32 of shape [32, 4], but must be F8_E4M3"),
        (given(weight_scale=torch.ones(32, 3).to(_E4M3)), "weight_scale is F8_E4M3 of shape [32, 3], but"),
        (given(weight_scale=torch.full((32, 4), float("nan")).to(_E4M3)), "rows from 0 on: scale 1 (=nan)"),
        (given(weight_scale=(-torch.ones(32, 4)).to(_E4M3)), "rows from 0 on: a scale is negative"),
        (given(weight_scale_2=torch.tensor(float("nan"))), "rows from 0 on: scale 2 (=nan) of block (0, 0)"),
        (given(weight_scale_2=torch.tensor(0.0)), "rows from 0 on: scale 2 (=0.0) of block (0, 0) must be"),
        (given(weight_scale_2=-torch.ones(())), "rows from 0 on: scale 2 (=-1.0) of block (0, 0) must be"),
        (given(weight_scale_2=torch.ones(2)), "weight_scale_2 is F32 of shape [2], but must be F32 of shape"),
        (given(weight_scale_2=torch.ones((), dtype=_I32)), "weight_scale_2 is I32 of shape [], but must be"),
        (given(pre_quant_scale=torch.ones(64)), "pre_quant_scale is there, so that its weight is not that"),
        (given(svdquant_lora_a=torch.ones(64)), "svdquant_lora_a is there"),
        (given(input_scale=torch.zeros(())), "the scale 0.0 must be finite and positive"),
        (given(weight=torch.zeros(2, 32, 32, dtype=_U8)), "weight has shape [2, 32, 32], but must be a"),
    ),
    "bitsandbytes": (
        (given(weight=DROP), "weight is missing, which nf4 needs"),
        (given(weight__absmax=DROP), "weight.absmax is missing, which nf4 needs"),
        (given(weight__quant_map=DROP), "weight.quant_map is missing, which nf4 needs"),
        (given(STATE=DROP), "it has 0 tensors weight.quant_state.bitsandbytes__nf4 or"),
        (given(weight=torch.zeros(511, 1, dtype=_U8)), "weight is U8 of shape [511, 1], but must be U8 of"),
        (given(weight=torch.zeros(512, dtype=_U8)), "weight is U8 of shape [512], but must be U8 of shape"),
        (given(weight=torch.zeros(512, 1, dtype=torch.bfloat16)), "its codes are stored as BF16, which is"),
        (given(weight__absmax=torch.ones(15)), "weight.absmax is F32 of shape [15], but must be F32 of"),
        (given(weight__absmax=torch.ones(16, dtype=_U8)), "weight.absmax is U8 of shape [16], but must be"),
        (given(weight__absmax=torch.full((16, ), float("nan"))), "rows from 0 on: scale 1 (=nan) of block"),
        (given(weight__absmax=-torch.ones(16)), "rows from 0 on: scale 1 (=-1.0) of block (0, 0) must be"),
        (given(weight__quant_map=torch.ones(15)), "weight.quant_map is F32 of shape [15], but must be F32"),
        (given(weight__quant_map=torch.zeros(16)), "rows from 0 on: quant_map is not the table of nf4"),
        (given(STATE=torch.zeros(0, dtype=_U8)), "its quant_state is no JSON: Expecting value: line 1"),
        (given(STATE=torch.zeros(4)), "its quant_state is F32 of shape [4], but must be U8, the"),
        (given(STATE=_text("[")), "its quant_state is no JSON: Expecting value: line 1 column 2"),
        (given(STATE=_text("["*100000)), "its quant_state is U8 of shape [100000], but must be U8, the"),
        (given(STATE=_text("3")), "its quant_state is no JSON object"),
        (given(STATE=torch.full((9, ), 255, dtype=_U8)), "its quant_state is no JSON: 'utf-8' codec can't"),
        (given(STATE=_state(quant_type="fp4")), "quant_type of its quant_state is 'fp4', but the tensor's"),
        (given(STATE=_state(quant_type=4)), "quant_type of its quant_state is 4, but the tensor's name"),
        (given(STATE=_state(blocksize=0)), "blocksize of its quant_state is 0, which is not read; known"),
        (given(STATE=_state(blocksize=63)), "blocksize of its quant_state is 63, which is not read; known"),
        (given(STATE=_state(blocksize="64")), "blocksize of its quant_state is '64', which is not read;"),
        (given(STATE=_state(blocksize=2**40)), "blocksize of its quant_state is 1099511627776, which is not"),
        (given(STATE=_state(dtype="int8")), "dtype of its quant_state is 'int8', but must be one of"),
        (given(STATE=_state(dtype=["x"])), "dtype of its quant_state is ['x'], but must be one of"),
        (given(STATE=_state(shape=[16])), "shape of its quant_state is [16], but must be two positive"),
        (given(STATE=_state(shape=[16, -64])), "shape of its quant_state is [16, -64], but must be two"),
        (given(STATE=_state(shape=[2**62, 64])), "weight is U8 of shape [512, 1], but must be U8 of shape"),
        (given(STATE=_state(shape=[1024, 1])), "last axis 1 is not a multiple of the group, 64, so blocks"),
        (given(STATE=_state(shape="16, 64")), "shape of its quant_state is '16, 64', but must be two"),
        (_nested(), "nested_offset of its quant_state is None, but must be a number"),
        (_nested(float("nan")), "nested_offset of its quant_state is nan, but must be a number"),
        (_nested(0.5, 128), "double quantization with nested_blocksize 128 and"),
        (_nested(0.5), "weight.absmax is F32 of shape [16], but must be U8 of shape"),
        (given(STATE=torch.zeros(1<<21, dtype=_U8)), "its quant_state is U8 of shape [2097152], but must be"),
    ),
    "fp8-block": (
        (given(weight=DROP), "'a.weight': 'a.weight_scale_inv' is there, but its codes are"),
        (given(weight_scale_inv=DROP), "it has 0 tensors of factors, but must have one"),
        (given(weight=torch.zeros(32, 32, dtype=_U8)), "its codes are U8, but must be F8_E4M3"),
        (given(weight=torch.zeros(32).to(_E4M3)), "its codes have shape [32], but must be a matrix"),
        (given(weight=torch.zeros(0, 32).to(_E4M3)), "its codes have shape [0, 32], but must be a matrix"),
        (given(weight=torch.zeros(2, 32, 32).to(_E4M3)), "its codes have shape [2, 32, 32], but must be a"),
        (given(weight_scale_inv=torch.ones(3, 2)), "its factors have shape [3, 2], but must have [2, 2]"),
        (given(weight_scale_inv=torch.ones(4)), "its factors have shape [4], but must have [2, 2]"),
        (given(weight_scale_inv=torch.ones(())), "its factors have shape [], but must have [2, 2]"),
        (given(weight_scale_inv=torch.ones(2, 2, dtype=_I32)), "its factors are I32, but must be F32, BF16,"),
        (given(weight_scale_inv=torch.full((2, 2), float("nan"))), "rows from 0 on: scale 1 (=nan) of block"),
        (given(weight_scale_inv=torch.zeros(2, 2)), "rows from 0 on: scale 1 (=0.0) of block (0, 0) must be"),
        (given(weight_scale_inv=-torch.ones(2, 2)), "rows from 0 on: scale 1 (=-1.0) of block (0, 0) must"),
        (given(weight_scale=torch.ones(2, 2)), "it has several tensors of weight_scale_inv, but must have"),
        (given(weight_scale_inv=torch.full((2, 2), float("inf"))), "rows from 0 on: scale 1 (=inf) of block"),
        (given(weight=torch.full((32, 32), float("nan")).to(_E4M3)), "rows from 0 on decode to non-finite"),
    ),
    "gpt-oss": (
        (given(gate_up_proj_blocks=DROP), "_blocks is missing, which the layer needs"),
        (given(gate_up_proj_scales=DROP), "_scales is missing, which the layer needs"),
        (given(gate_up_proj_blocks=torch.zeros(2, 64, 1, 16)), "blocks and scales are F32 and U8, but must"),
        (given(gate_up_proj_blocks=torch.zeros(2, 64, 16, dtype=_U8)), "have shapes [2, 64, 16] and [2,"),
        (given(gate_up_proj_blocks=torch.zeros(2, 64, 1, 8, dtype=_U8)), "have shapes [2, 64, 1, 8] and"),
        (given(gate_up_proj_scales=torch.zeros(2, 64, 2, dtype=_U8)), "[2, 64, 1, 16] and [2, 64, 2],"),
        (given(gate_up_proj_scales=torch.zeros(2, 64, 1)), "blocks and scales are U8 and F32, but must be"),
        (
            given(
                gate_up_proj_blocks=torch.zeros(0, 64, 1, 16, dtype=_U8),
                gate_up_proj_scales=torch.zeros(0, 64, 1, dtype=_U8),
            ),
            "blocks and scales have shapes [0, 64, 1, 16] and [0, 64, 1],",
        ),
        (given(gate_up_proj_scales=torch.full((2, 64, 1), 255, dtype=_U8)), "scale 1 (=nan) of block"),
    ),
    "quark": (
        (given(weight=DROP), "weight is missing, which fp8_e4m3 per_channel needs"),
        (given(weight_scale=DROP), "weight_scale is missing, which fp8_e4m3 per_channel needs"),
        (given(weight=torch.zeros(32).to(_E4M3)), "weight has shape [32], but must be a matrix"),
        (given(weight=torch.zeros(32, 32, dtype=torch.int8)), "weight is I8 of shape [32, 32], but must be"),
        (given(weight=torch.zeros(0, 32).to(_E4M3)), "is empty"),
        (given(weight_scale=torch.ones(31)), "weight_scale is F32 of shape [31], but must be F32 of shape"),
        (given(weight_scale=torch.ones(32, dtype=_I32)), "weight_scale is I32, but must be one of F32,"),
        (given(weight_scale=torch.full((32, ), float("nan"))), "rows from 0 on: scale 1 (=nan) of block (0,"),
        (given(weight_scale=torch.zeros(32)), "rows from 0 on: scale 1 (=0.0) of block (0, 0) must be"),
        (given(weight_zero_point=torch.zeros(32)), "weight_zero_point has no place in fp8_e4m3 per_channel"),
        (given(input_rotation=torch.ones(32, 32)), "input_rotation has no place in fp8_e4m3 per_channel"),
    ),
})  # fmt: skip
"""Tensors in place of right ones, and words of the refusal."""


LAYOUT_CASES: tuple[Case, ...] = (
    *(
        case for name, layout in _LAYOUTS.items()
        for case in cases_of(name, layout, _CONFIGS.get(name, ()), _TENSORS.get(name, ()))
    ),
    *EIGHT_BIT_CASES, *MLX_CASES,
)  # fmt: skip
