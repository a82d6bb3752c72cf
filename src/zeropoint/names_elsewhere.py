"""Hints for names of other libraries that zeropoint's modules lack.

Tests compare the names with docs/reference/contracts.md and docs/migration, and with what is there.
"""

from __future__ import annotations

_OWN = {
    "zeropoint": ("FakeQuantize", "QuantizationParams", "Scheme", "QuantizedTensor"),
    "zeropoint.params.burn": (
        "CalibrationRange", "QuantizationParameters", "QuantizationScheme", "QuantizationType",
    ),
    "zeropoint.params.torsh": ("QuantizedDType",),
    "zeropoint.recipes": (
        "DeviceType", "Dtype", "QSchemeType", "QuantizationMode", "Recipe", "RoundType", "Rule", "ScaleType",
        "TQTThresholdInitMeth", "ZeroPointType",
    ),
    "zeropoint.stats": ("Histogram", "MinMax", "MovingAverage", "Observer", "Percentile", "Statistics"),
    "zeropoint.training": ("GradientMask", "LearnedScale", "LearnedThreshold", "Pact", "ThresholdRule"),
    "zeropoint.models": ("Calibration", "Conversion", "QATConfig", "QuantizedEmbedding", "QuantizedLinear"),
}  # fmt: skip
"""Module to names that it has."""
_INSTEAD = {
    "QuantizePerChannelPlan": 'zeropoint.prepared.plan("quantize", "int8:channel", shape)',
    "QuantizePerTensorPlan": 'zeropoint.prepared.plan("quantize", "int8:tensor", shape)',
    "QuantizePerTokenPlan": 'zeropoint.prepared.plan("quantize", "int8:token", shape)',
    "QuantizePerChannelBackwardPlan": 'zeropoint.prepared.plan("quantize_backward", params, shape)',
    "KernelSku": "plan.identity",
    "PlanPreference": "the argument backend of zeropoint.prepared.plan",
    "PrecisionGuarantee": "plan.guarantee",
    "QTensorConfig": "zeropoint.recipes.scheme_from_quark",
    "QuantizationSpec": "zeropoint.recipes.scheme_from_quark",
}
"""Name to what does its work."""
_PAGES = {
    "gptqmodel": ("AutoGPTQForCausalLM", "BaseQuantizeConfig", "GPTQConfig", "GPTQModel", "QuantizeConfig"),
    "autoawq": ("AutoAWQForCausalLM", "AwqConfig"),
    "bitsandbytes": ("BitsAndBytesConfig", "Linear4bit", "Linear8bitLt", "LinearFP4", "LinearNF4"),
    "torchao": (
        "Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig", "Int4WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig", "Int8WeightOnlyConfig", "quantize_",
    ),
    "llm-compressor": (
        "AWQModifier", "GPTQModifier", "QuantizationModifier", "SmoothQuantModifier", "oneshot",
    ),
    "auto-round": ("AutoRound",),
    "torch": (
        "DeQuantStub", "HistogramObserver", "MinMaxObserver", "MovingAverageMinMaxObserver",
        "PerChannelMinMaxObserver", "QConfig", "QConfigMapping", "QuantStub", "prepare_fx", "prepare_qat",
        "quantize_dynamic", "quantize_per_channel", "quantize_per_tensor",
    ),
}  # fmt: skip
"""Page of docs/migration to names of the library that it is about."""


def elsewhere(name: str) -> str:
    """Return an AttributeError's hint on a name, or nothing.

    >>> elsewhere("oneshot"), elsewhere("nothing")
    ('; see docs/migration/llm-compressor.md', '')
    """
    for module, names in _OWN.items():
        if name in names:
            return f"; it is {module}.{name} (docs/reference/contracts.md)"
    if name in _INSTEAD:
        return f"; {_INSTEAD[name]} does its work (docs/reference/contracts.md)"
    for page, names in _PAGES.items():
        if name in names:
            return f"; see docs/migration/{page}.md"
    return "; docs/coming_from.md says where the names of other libraries are" if name[:1].isupper() else ""
