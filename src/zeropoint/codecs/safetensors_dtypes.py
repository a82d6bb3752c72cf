"""The dtypes of safetensors files and of torch: which is which."""

from __future__ import annotations

from types import MappingProxyType

import torch

TORCH_DTYPES: MappingProxyType[str, torch.dtype] = MappingProxyType({
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
})  # fmt: skip
"""Name in a safetensors header to torch dtype; F4 and F6 have none."""

FILE_DTYPES: MappingProxyType[torch.dtype, str] = MappingProxyType({v: k for k, v in TORCH_DTYPES.items()})
"""torch dtype to the name in a safetensors header."""


def torch_name(dtype: str) -> str:
    """Return torch's name of a file's dtype, as schemes have it.

    >>> torch_name("BF16")
    'bfloat16'
    """
    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")
