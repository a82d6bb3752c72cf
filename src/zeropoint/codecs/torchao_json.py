"""JSON of torchao files: tensor metadata, and the configuration.

Values of classes, enumerations and dtypes are wrapped: ``{"_type": NAME, "_data": VALUE}``, as
TensorSubclassAttributeJSONEncoder and config_to_dict of torchao 0.18 write them. What is said of a class
follows from the scheme alone. This module opens no file.
"""

from __future__ import annotations

import json

from ..schemes import ZeroPoint
from . import torchao_packed as packed
from .block_extents import blocks
from .model_format import FileTensor
from .protocol import LayerScheme
from .torchao_packed import INT4, MX

INT8, FLOAT8, INTX = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"


def _wrapped(kind: str, data: object) -> dict[str, object]:
    return {"_type": kind, "_data": data}


def json_of(tensor: FileTensor) -> str:
    """Return the metadata of a tensor."""
    layer = tensor.layer
    if layer is None:
        return json.dumps({"_type": "Tensor"})
    if layer.layout in packed.CLASSES:
        return _json_of_packed(tensor, layer)
    block = [1, blocks(layer.weight)[1] or tensor.shape[1]]
    own = _wrapped("torch.dtype", str(tensor.dtype).removeprefix("torch."))
    names = ["qdata", "scale"] if layer.layout == FLOAT8 else ["zero_point", "qdata", "scale"]
    data: dict[str, object]
    if layer.layout == INTX:
        names = ["qdata", "scale", "zero_point"]
        target = _wrapped("torch.dtype", f"int{layer.weight.bits}")
        data = {"target_dtype": target, "block_size": block, "dtype": own, "activation_quantization": None}
    elif layer.layout == FLOAT8:
        kernel = _wrapped("KernelPreference", "AUTO")
        data = {"block_size": block, "mm_config": None, "act_quant_kwargs": None, "kernel_preference": kernel}
    else:
        symmetric, row = _wrapped("MappingType", "SYMMETRIC"), _wrapped("PerRow", {"dim": -1})
        token = {"granularity": row, "mapping_type": symmetric, "reduce_range": False}
        inputs = None if layer.input is None else _wrapped("QuantizeTensorToInt8Kwargs", token)
        data = {"act_quant_kwargs": inputs, "reduce_range": False, "block_size": block}
    return json.dumps({"_type": layer.layout, "_data": data | {"dtype": own}, "_tensor_data_names": names})


def _dtype(name: object) -> dict[str, object]:
    return _wrapped("torch.dtype", str(name).removeprefix("torch."))


def _json_of_packed(tensor: FileTensor, layer: LayerScheme) -> str:
    """Return the metadata of a tensor with packed codes or scales."""
    weight, own = layer.weight, _dtype(tensor.dtype)
    group = blocks(weight)[1]
    names, data = ["qdata", "scale"], dict[str, object]()
    if layer.layout == INT4:
        names.append("zero_point")
        data = {"activation_dtype": _dtype("bfloat16"), "block_size": [1, group], "shape": list(tensor.shape)}
    elif layer.layout == MX:
        element, auto = _dtype(packed.element_name(weight)), _wrapped("KernelPreference", "AUTO")
        mode = _wrapped("ScaleCalculationMode", packed.mode_name(weight))
        same = {"elem_dtype": element, "block_size": group}
        inputs = {**same, "scaling_mode": mode, "kernel_preference": auto, "is_swizzled_scales": True}
        kwargs = None if layer.input is None else _wrapped("QuantizeTensorToMXKwargs", inputs)
        data = {**same, "orig_dtype": own, "kernel_preference": auto}
        data |= {"act_quant_kwargs": kwargs, "is_swizzled_scales": True}
    else:
        names = ["per_tensor_scale"] * (len(weight.scales) > 1) + names
        inputs = {"block_size": group, "is_swizzled_scales": True, "use_triton_kernel": True}
        inputs |= {"use_dynamic_per_tensor_scale": True}
        kwargs = None if layer.input is None else _wrapped("QuantizeTensorToNVFP4Kwargs", inputs)
        data = {"is_swizzled_scales": True, "use_triton_kernel": layer.input is not None}
        data |= {"act_quant_kwargs": kwargs, "block_size": group, "orig_dtype": own}
    return json.dumps({"_type": layer.layout, "_data": data, "_tensor_data_names": names})


def _config_of_packed(layer: LayerScheme) -> dict[str, object]:
    """Return torchao's configuration for packed codes or scales."""
    weight, group = layer.weight, blocks(layer.weight)[1]
    if layer.layout == INT4:
        data = {
            "group_size": group,
            "set_inductor_config": True,
            "int4_packing_format": _wrapped("Int4PackingFormat", "PLAIN"),
            "int4_choose_qparams_algorithm": _wrapped("Int4ChooseQParamsAlgorithm", "TINYGEMM"),
            "int4_tile_packed_ntile": 8,
        }
        return _wrapped("Int4WeightOnlyConfig", data) | {"_version": 2}
    if layer.layout == MX:
        element = _dtype(packed.element_name(weight))
        data = {"block_size": group, "activation_dtype": element, "weight_dtype": element}
        data |= {"kernel_preference": _wrapped("KernelPreference", "AUTO")}
        data |= {"scaling_mode": _wrapped("ScaleCalculationMode", packed.mode_name(weight))}
        return _wrapped("MXDynamicActivationMXWeightConfig", data) | {"_version": 1}
    whole = {"use_dynamic_per_tensor_scale": len(weight.scales) > 1}
    if layer.input is None:
        return _wrapped("NVFP4WeightOnlyConfig", whole) | {"_version": 1}
    more = {"use_triton_kernel": True, **whole, "step": None}
    return _wrapped("NVFP4DynamicActivationNVFP4WeightConfig", more) | {"_version": 1}


def config_of(layer: LayerScheme) -> dict[str, object]:
    """Return the configuration of torchao that gives such weights."""
    if layer.layout in packed.CLASSES:
        return _config_of_packed(layer)
    row = _wrapped("PerRow", {"dim": -1}) | {"_version": 1}
    data: dict[str, object]
    if layer.layout == FLOAT8:
        name, data = "Float8WeightOnlyConfig", {"weight_dtype": _wrapped("torch.dtype", "float8_e4m3fn")}
    elif layer.layout == INTX:
        group = blocks(layer.weight)[1]
        cut = _wrapped("PerGroup", {"group_size": group}) if group else _wrapped("PerAxis", {"axis": 0})
        kind = "SYMMETRIC" if layer.weight.zero_point is ZeroPoint.NONE else "ASYMMETRIC"
        data = {
            "weight_dtype": _wrapped("torch.dtype", f"int{layer.weight.bits}"),
            "granularity": cut | {"_version": 1},
            "mapping_type": _wrapped("MappingType", kind),
            "scale_dtype": None,
            "intx_packing_format": _wrapped("IntxPackingFormat", "UNPACKED_TO_INT8"),
            "intx_choose_qparams_algorithm": _wrapped("IntxChooseQParamsAlgorithm", "AFFINE"),
        }
        return _wrapped("IntxWeightOnlyConfig", data) | {"_version": 2}
    elif layer.input is None:
        name, data = "Int8WeightOnlyConfig", {"group_size": None}
    else:
        name = "Int8DynamicActivationInt8WeightConfig"
        symmetric = _wrapped("MappingType", "SYMMETRIC")
        data = {"act_mapping_type": symmetric, "reduce_range": False, "weight_only_decode": False}
    return _wrapped(name, {**data, "granularity": row, "set_inductor_config": True}) | {"_version": 2}
