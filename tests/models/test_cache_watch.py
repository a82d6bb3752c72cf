"""The largest keys and values are those that the caches of transformers hold, in several families."""

from typing import Any

import pytest
import torch
from tests.peers import transformers

from zeropoint.models.block_chain import Steps
from zeropoint.models.cache_watch import KvCacheObserver
from zeropoint.models.sequential import observe_blocks

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Phi3": {}, "Gemma3Text": {"sliding_window": 8},
}  # fmt: skip
"""Plain, with biases, with norms of keys, with one projection for all three, with sliding windows."""
BATCHES = [
    {"input_ids": torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(length))}
    for length in (20, 31)
]


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def cached(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the largest keys and values of each layer, from caches that keep every token."""
    found = []
    for batch in BATCHES:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(**batch, past_key_values=cache, use_cache=True)
        found.append(
            [torch.stack([layer.keys.abs().amax(), layer.values.abs().amax()]) for layer in cache.layers]
        )
    return [tuple(torch.stack(layer).amax(0)) for layer in zip(*found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_a_cache_of_transformers(family: str) -> None:
    model = model_of(family)
    expected = cached(model)
    watch = KvCacheObserver(model)
    with watch.hooked(), torch.no_grad():
        for batch in BATCHES:
            model(**batch, use_cache=False)
    found = [(watch.keys[name], watch.values[name]) for name in watch.layers]
    assert found == expected
    assert {x.dtype for pair in found for x in pair} == {torch.bfloat16}
    assert model(**BATCHES[0], use_cache=True).past_key_values.get_seq_length() == 20  # hooks are gone


def test_blocks_that_run_one_at_a_time_give_the_same_and_results_are_those_without_it() -> None:
    model = model_of("Qwen3")
    with torch.no_grad():
        plain = model(**BATCHES[0], use_cache=False).logits
        watch = KvCacheObserver(model)
        with watch.hooked():
            assert torch.equal(model(**BATCHES[0], use_cache=False).logits, plain)
    watch = KvCacheObserver(model)
    model.config.use_cache = False
    observe_blocks(model, BATCHES, watch, Steps(blocks=tuple(f"model.layers.{n}" for n in range(3))))
    assert list(zip(watch.keys.values(), watch.values.values(), strict=True)) == cached(model)


def test_a_number_that_is_none_is_kept() -> None:
    model = model_of("Llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 5] = torch.nan
    watch = KvCacheObserver(model)
    with watch.hooked(), torch.no_grad():
        for batch in (*BATCHES, *BATCHES):
            model(**batch, use_cache=False)
    assert not watch.values["model.layers.0.self_attn"].isnan()
    assert watch.values["model.layers.1.self_attn"].isnan()
