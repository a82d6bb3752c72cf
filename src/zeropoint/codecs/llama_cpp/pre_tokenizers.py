"""Names of pre-tokenizers (``tokenizer.ggml.pre``) for tokenizer.json.

Source: ggml-org/llama.cpp, src/llama-vocab.cpp, whose expressions come from the tokenizers that they are
named after. tokenizer.json of one that is not in the table has no name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_ENDING = "|".join(f"{part}{_ENDS}?" for part in _CASED.split("|"))
_MARKS = r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_REST = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_MERGING = "dbrx"
"""The name of what cuts texts as Llama 3 does, where merges make all tokens."""
_SPLITS = MappingProxyType(
    {
        "llama-bpe": rf"{_ENDS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",
        "qwen2": rf"{_ENDS}|{_WORD}|\p{{N}}|{_REST}",
        "tekken": rf"{_CASED}|{_TEKKEN_REST}",
        "gpt-4o": rf"{_ENDING}|{_TEKKEN_REST.replace(r'N}|', 'N}{1,3}|', 1)}",
        "qwen35": rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_MARKS}",
    }
)


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(*expressions: str) -> dict[str, Any]:
    splits = (
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    )
    return _sequence(*splits, _bytes(use_regex=False))


_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True))
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{name: _split(expression) for name, expression in _SPLITS.items()},
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), _DIGITS),
        **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "olmo"), _bytes(use_regex=True)),
        **dict.fromkeys(("llama3", "llama-v3", "lfm2", "smaug-bpe"), _split(_SPLITS["llama-bpe"])),
        "deepseek-r1-qwen": _split(_SPLITS["qwen2"]),
        "deepseek-v3": _split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK),
        **dict.fromkeys(("tiny_aya", "cohere2moe"), _split(r"\d{1,3}(?=(?:\d{3})*\b)", _SPLITS["gpt-4o"])),
        **dict.fromkeys((_MERGING, "glm4", "chatglm-bpe"), _split(_SPLITS["llama-bpe"])),
    }
)
"""By name, what tokenizer.json calls pre_tokenizer; of several with the same, the first is written."""


def _steps(found: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the effective steps of a pre-tokenizer."""
    steps = found.get("pretokenizers", [found])
    return [
        (
            step.get("type"),
            _spelled(step.get("pattern", {}).get("Regex")),
            step.get("individual_digits"),
            step.get("use_regex", True) if step.get("type") == "ByteLevel" else None,
        )
        for step in steps
    ]


def _spelled(expression: object) -> object:
    """Return a regular expression with escaped line breaks."""
    return expression.replace("\r", "\\r").replace("\n", "\\n") if isinstance(expression, str) else expression


def pre_name(found: object, *, merging: bool = False) -> str | None:
    """Return llama.cpp's name of a ``pre_tokenizer``, or None.

    merging: whether words that are tokens are made of merges, too, which llama.cpp tells by the name.

    >>> pre_name({"type": "ByteLevel", "add_prefix_space": False})
    'gpt-2'
    """
    if not isinstance(found, Mapping):
        return None
    steps = _steps(found)
    name = next((name for name, known in PRE_TOKENIZERS.items() if _steps(known) == steps), None)
    return _MERGING if merging and name == "llama-bpe" else name
