"""The quantized cache against attention that keeps no cache, transformers' own cache, and plain torch."""

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.oracles import tiny_models
from tests.peers import Peer, transformers
from tests.tensors import normal

import zeropoint as zp

pytestmark = pytest.mark.rotating

kv_cache = Peer("zeropoint.models.kv_cache")

cache_utils = Peer("transformers.cache_utils")
sdpa_attention = Peer("transformers.integrations.sdpa_attention")

SHAPE = (3, 2, 70, 64)
SCHEMES = [
    "int8:token",
    "int4:token",
    "uint4:g32:asym",
    "uint2:block32x1:asym",
    "int3:g24:scale=bfloat16",
    "float8_e4m3fn:token",
    "float8_e4m3fn:cast",
    "mxfp4",
    "nf4:g32",
]


def llama(dtype: torch.dtype = torch.float64, deviation: float = 0.2) -> transformers.LlamaForCausalLM:
    """A Llama of random weights: 2 layers, 2 heads of 64, which share keys and values.

    Logits of small weights are all but alike, and so are then the tokens of any cache.
    """
    sizes = {"vocab_size": 101, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    endless = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return tiny_models.llama(layers=2, initializer_range=deviation, **sizes, **endless).to(dtype)


def prompts(count: int = 2) -> torch.Tensor:
    return torch.randint(1, 101, (count, 9), generator=torch.Generator().manual_seed(3))


def filled(config: transformers.LlamaConfig, x: torch.Tensor, **options: object) -> kv_cache.QuantizedKVCache:
    """Return a cache of one layer that holds ``x`` as keys and ``-x`` as values."""
    cache = kv_cache.QuantizedKVCache(config, **options)
    cache.update(x, -x, 0)
    return cache


def one_layer() -> transformers.LlamaConfig:
    """The configuration of one layer."""
    return transformers.LlamaConfig(num_hidden_layers=1)


def held(cache: kv_cache.QuantizedKVCache) -> list[torch.Tensor]:
    """Return every tensor of the first layer."""
    found: list[torch.Tensor] = []
    for states in cache.layers[0].states:
        if states.older is not None:
            found += [states.older.data, *states.older.params.tensors().values()]
        if states.newest is not None and states.newest.numel():
            found.append(states.newest)
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_those_of_all_tokens_at_once_however_they_came(scheme: str, dtype: torch.dtype) -> None:
    x = normal(*SHAPE, dtype=dtype)
    whole = filled(one_layer(), x, keys=scheme)
    parts = kv_cache.QuantizedKVCache(one_layer(), keys=scheme)
    for piece in x.split([1, 1, 31, 2, 30, 5], 2):
        keys, values = parts.update(piece, -piece, 0)
    step = 32 if "block32" in scheme else 1
    coded = 70 // step * step
    q = zp.quantize(x[:, :, :coded], scheme)
    assert torch.equal(keys, torch.cat([q.dequantize(), x[:, :, coded:]], 2))
    assert torch.equal(values[:, :, coded:], -x[:, :, coded:])
    older = parts.layers[0].states[0].older
    assert torch.equal(older.codes, q.codes.transpose(2, 3) if step > 1 else q.codes)
    for mine, other in zip(held(parts), held(whole), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert keys.dtype == dtype
    assert not torch.equal(keys, x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_new_tokens_leave_the_codes_of_earlier_ones_alone(scheme: str) -> None:
    """Tokens a thousand times as large do not change the scales of what is there."""
    cache = filled(one_layer(), normal(*SHAPE), keys=scheme)
    before = [tensor.clone() for tensor in held(cache)]
    count = len(cache.layers[0].states[0].older.params.tensors()) + 1
    cache.update(1000 * normal(*SHAPE, seed=1), normal(*SHAPE, seed=1), 0)
    after = held(cache)
    axis = 3 if "block32" in scheme else 2
    for old, new in zip(before[:count], after[:count], strict=True):
        earlier = new.narrow(axis, 0, old.shape[axis])
        assert torch.equal(old.view(torch.uint8), earlier.contiguous().view(torch.uint8))
        assert new.shape[axis] > old.shape[axis]


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``x`` in ``bits`` and back, a float32 scale a token and head, in torch's own operations."""
    half = (2**bits - 1) / 2
    scale = (x.abs().amax(-1, keepdim=True) / half).float().to(x.dtype)
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.clamp(torch.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def attention_of(bits: int) -> Callable[..., object]:
    def attention(module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest, **more):  # type: ignore[no-untyped-def]
        return sdpa_attention.sdpa_attention_forward(
            module, q, rounded(k, bits), rounded(v, bits), *rest, **more
        )

    return attention


def without_cache(model: transformers.LlamaForCausalLM, tokens: torch.Tensor, steps: int, bits: int) -> tuple:
    """Return tokens and logits of greedy decoding that computes everything again at each step."""
    name = f"rounded to {bits} bits"
    transformers.AttentionInterface.register(name, attention_of(bits))
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    logits = []
    for _ in range(steps):
        with torch.no_grad():
            logits.append(model(tokens, use_cache=False).logits[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(logits, 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_generation_gives_tokens_and_logits_of_attention_on_rounded_keys_and_values(bits: int) -> None:
    """Judged by a loop without any cache that rounds in torch; in float64, so that no code is on an edge."""
    model, start = llama(), prompts()
    cache = kv_cache.QuantizedKVCache(model.config, keys=f"int{bits}:token")
    result = model.generate(
        start,
        past_key_values=cache,
        max_new_tokens=24,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = without_cache(model, start, 24, bits)
    assert torch.equal(result.sequences, tokens)
    # generate rounds logits to float32; one code that differs would show as 1e-3 or more.
    assert torch.allclose(torch.stack(result.logits, 1), logits.float(), rtol=1e-6, atol=1e-6)
    assert cache.get_seq_length() == 9 + 23
    plain = model.generate(start, max_new_tokens=24, do_sample=False)
    assert not torch.equal(plain, tokens), "rounding shows"


def test_int8_keeps_logits_close_to_those_of_the_float_cache() -> None:
    """Relative to their size: int8 within 1 %, and int4 not, so that the measure tells them apart."""
    model = llama(torch.float32, deviation=0.05)
    tokens = torch.randint(1, 101, (2, 64), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = model(tokens, past_key_values=cache_utils.DynamicCache(config=model.config)).logits
        errors = []
        for scheme in ("int8:token", "int4:token"):
            found = model(tokens, past_key_values=kv_cache.QuantizedKVCache(model.config, scheme)).logits
            errors.append(((found - wanted).norm() / wanted.norm()).item())
    assert errors[0] < 0.01 < errors[1] < 0.2


@pytest.mark.parametrize(
    ("scheme", "most"), [("int8:token", 0.27), ("int4:token", 0.16), ("uint4:token:asym", 0.16)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_fall_as_promised(scheme: str, most: float, head_dim: int) -> None:
    """Of float32, scales and zero points counted, as the memory of the tensors that are held."""
    x = normal(2, 4, 50, head_dim)
    cache = filled(one_layer(), x, keys=scheme)
    tensors = held(cache)
    memory = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert memory == cache.nbytes
    assert cache.nbytes / (2 * x.nbytes) < most
    assert len(tensors) == (6 if "asym" in scheme else 4)


@pytest.mark.crossed
@pytest.mark.parametrize("residual_length", [0, 16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sequences_are_reordered_repeated_and_selected_as_in_transformers_cache(
    scheme: str, residual_length: int
) -> None:
    cache = filled(one_layer(), normal(*SHAPE), keys=scheme, residual_length=residual_length)
    extra = normal(3, 2, 1, 64, seed=5)
    plain = cache_utils.DynamicCache()
    plain.update(*copy.deepcopy(cache).update(extra[:, :, :0], extra[:, :, :0], 0), 0)
    for change in (
        lambda c: c.reorder_cache(torch.tensor([2, 0, 0])),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.batch_select_indices(torch.tensor([1, 5, 3])),
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
    ):
        change(cache)
        change(plain)
        none = plain.layers[0].keys[:, :, :0]
        keys, values = cache.update(none, none, 0)
        assert torch.equal(keys, plain.layers[0].keys)
        assert torch.equal(values, plain.layers[0].values)


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kept", [1, 31, 32, 40, 64, 69, 70])
def test_cropping_keeps_the_values_of_the_first_tokens(scheme: str, kept: int) -> None:
    """A block of 32 tokens that is cut is kept as it was dequantized."""
    cache = filled(one_layer(), normal(*SHAPE), keys=scheme, residual_length=3)
    none = normal(3, 2, 0, 64)
    before = copy.deepcopy(cache).update(none, none, 0)
    cache.crop(kept - 70)
    assert cache.get_seq_length() == kept
    after = cache.update(none, none, 0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[:, :, :kept])
    memory = sum(tensor.untyped_storage().nbytes() for tensor in held(cache))
    assert memory == cache.nbytes
    other = filled(one_layer(), normal(*SHAPE), keys=scheme, residual_length=3)
    other.crop(kept)
    assert other.get_seq_length() == kept


@pytest.mark.parametrize("scheme", ["int8:token", "mxfp4"])
def test_a_cropped_cache_without_residual_continues_as_if_nothing_had_been(scheme: str) -> None:
    cache, never = (
        filled(one_layer(), normal(*SHAPE), keys=scheme),
        kv_cache.QuantizedKVCache(one_layer(), keys=scheme),
    )
    assert cache.is_croppable
    cache.crop(-30)
    never.update(normal(*SHAPE)[:, :, :40], -normal(*SHAPE)[:, :, :40], 0)
    for one in (cache, never):
        one.update(normal(*SHAPE, seed=2), normal(*SHAPE, seed=3), 0)
    for mine, other in zip(held(cache), held(never), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert not kv_cache.QuantizedKVCache(one_layer(), residual_length=1).is_croppable
    assert not kv_cache.QuantizedKVCache(one_layer(), keys="int4:block32x1", values="int8:token").is_croppable


@pytest.mark.parametrize("scheme", ["int8:token", "uint4:block32x1:asym"])
def test_the_newest_tokens_stay_in_full_precision(scheme: str) -> None:
    cache, step = (
        kv_cache.QuantizedKVCache(one_layer(), keys=scheme, residual_length=8),
        32 if "block" in scheme else 1,
    )
    x = normal(*SHAPE)
    for count, piece in enumerate(x.split(1, 2), 1):
        keys, _ = cache.update(piece, piece, 0)
        coded = max(0, count - 8) // step * step
        assert torch.equal(keys[:, :, coded:], x[:, :, coded:count])
        assert cache.layers[0].states[0].newest.shape[2] == count - coded
        if coded:
            assert torch.equal(keys[:, :, :coded], zp.quantize(x[:, :, :coded], scheme).dequantize())


def test_beam_search_gives_the_tokens_of_a_float_cache_of_the_same_values() -> None:
    class Rounded(cache_utils.DynamicCache):
        def update(self, k: torch.Tensor, v: torch.Tensor, *rest: object, **more: object) -> tuple:
            return super().update(rounded(k, 4), rounded(v, 4), *rest, **more)

    model = llama()
    options = {"max_new_tokens": 20, "num_beams": 4, "do_sample": False}
    tokens = [
        model.generate(prompts(), past_key_values=cache, **options)
        for cache in (kv_cache.QuantizedKVCache(model.config, "int4:token"), Rounded(config=model.config))
    ]
    assert torch.equal(*tokens)
    assert not torch.equal(tokens[0], model.generate(prompts(), **options))


def test_guesses_that_are_taken_back_leave_no_trace() -> None:
    """Prompt lookup guesses tokens ahead and crops the cache to those that were right."""
    model = llama()
    # A prompt that repeats itself, so that there is something to look up.
    start = prompts(1).repeat(1, 3)
    options = {"max_new_tokens": 30, "do_sample": False}
    ahead = model.generate(
        start, past_key_values=kv_cache.QuantizedKVCache(model.config), prompt_lookup_num_tokens=4, **options
    )
    step = model.generate(start, past_key_values=kv_cache.QuantizedKVCache(model.config), **options)
    assert torch.equal(ahead, step)


def test_a_copied_cache_continues_a_shared_prompt() -> None:
    model, start = llama(), prompts()
    shared = kv_cache.QuantizedKVCache(model.config, keys="uint4:block32x1:asym", values="int8:token")
    with torch.no_grad():
        model(start[:, :-1], past_key_values=shared)
    results = [
        model.generate(start, past_key_values=copy.deepcopy(shared), max_new_tokens=40, do_sample=False)
        for _ in range(2)
    ]
    assert torch.equal(*results)
    assert shared.get_seq_length() == 8
    shared.reset()
    assert (shared.get_seq_length(), shared.nbytes) == (0, 0)
    again = model.generate(start, past_key_values=shared, max_new_tokens=40, do_sample=False)
    assert torch.equal(again, results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_generate_with_it(dtype: torch.dtype) -> None:
    model = llama(dtype)
    cache = kv_cache.QuantizedKVCache(model.config, "int8:token")
    tokens = model.generate(prompts(), past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 17)
    plain = 2 * 2 * 2 * 16 * 64 * dtype.itemsize  # keys and values, layers, sequences, tokens
    # One byte and 1/16 of scales, of two bytes.
    assert cache.nbytes / plain == 17 / 32
    keys, _ = cache.update(normal(2, 1, 1, 64, dtype=dtype), normal(2, 1, 1, 64, dtype=dtype), 0)
    assert keys.dtype == dtype


def test_moving_to_the_host_and_back_changes_nothing() -> None:
    cache = filled(one_layer(), normal(*SHAPE), keys="mxfp4", residual_length=4)
    before = [tensor.clone() for tensor in held(cache)]
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    for mine, other in zip(held(cache), before, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "scheme", ["int8:tensor", "int8:channel", "nvfp4", "int8:channel1", "int8:channel-1"]
)
def test_a_scheme_in_which_tokens_to_come_would_count_is_refused(scheme: str) -> None:
    with pytest.raises(
        zp.SchemeError,
        match=r"values \(=.*\) must have blocks of one sequence and of so many tokens, because",
    ):
        kv_cache.QuantizedKVCache(one_layer(), values=scheme)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(
        zp.SchemeError, match=r"keys \(=.*\) must not round stochastically, because each token"
    ):
        kv_cache.QuantizedKVCache(one_layer(), "int8:token:round=stochastic(1)")
    for length in (-1, 1.5):
        with pytest.raises(
            zp.RangeError, match=rf"^residual_length \(={length}\) must be 0 or more tokens, "
        ):
            kv_cache.QuantizedKVCache(one_layer(), residual_length=length)  # type: ignore[arg-type]
    with pytest.raises(zp.UnsupportedError, match=r"^config \(a int\) must be one of transformers; pass"):
        kv_cache.QuantizedKVCache(5)  # type: ignore[arg-type]
    with pytest.raises(
        zp.UnsupportedError,
        match=r"config \(a MistralConfig\) must have full attention in every .*SlidingWindowLayer; take",
    ):
        kv_cache.QuantizedKVCache(transformers.MistralConfig(num_hidden_layers=2, sliding_window=16))
    with pytest.raises(zp.NonFiniteError, match=r"nan"):
        filled(one_layer(), torch.full(SHAPE, torch.nan))
    spoiled = normal(*SHAPE)
    spoiled[0, 1, 5, 3] = spoiled[0, 1, 2, 4] = torch.nan
    with pytest.raises(zp.NonFiniteError, match=r"\(0, 1, 2, 4\)"):
        filled(one_layer(), spoiled, keys="int8:block32x1")


@pytest.mark.parametrize("residual_length", [0, 4])
def test_an_update_that_fails_leaves_the_cache_as_it_was(residual_length: int) -> None:
    cache, other = (kv_cache.QuantizedKVCache(one_layer(), residual_length=residual_length) for _ in range(2))
    first, second = torch.randn(SHAPE), torch.randn(SHAPE)
    for each in (cache, other):
        each.update(first, first, 0)
    nbytes = cache.nbytes
    spoiled = torch.full(SHAPE, torch.nan)
    with pytest.raises(zp.NonFiniteError):
        cache.update(second, spoiled, 0)
    more = torch.cat([second, second])
    for wrong in (second[0], more, second[:, :1], second[..., :32]):
        with pytest.raises(zp.ShapeError, match=r"^states \(shape .*\) must (have|be) "):
            cache.update(second, wrong, 0)
    assert (cache.get_seq_length(), cache.nbytes) == (SHAPE[2], nbytes)
    found, wanted = (each.update(second, second, 0) for each in (cache, other))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_without_transformers_only_the_cache_is_missing_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["transformers"] = None
import zeropoint, zeropoint.models
try:
    import zeropoint.models.kv_cache
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    wanted = "zeropoint.models.kv_cache needs transformers; install it with pip install 'zeropoint[hf]'"
    assert done.stdout.strip() == wanted
