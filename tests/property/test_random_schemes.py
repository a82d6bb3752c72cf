"""The generator itself: it is repeatable, and most of what it draws is a scheme that quantizes something."""

import random
from collections import Counter

import torch
from tests.property.random_schemes import WORDS, any_scheme, random_scheme, random_tensor, words_of

from zeropoint.errors import ZeropointError
from zeropoint.schemes import Scheme


def parsed(text: str) -> Scheme | None:
    try:
        return Scheme.parse(text)
    except ZeropointError:
        return None


def test_the_same_seed_draws_the_same_schemes_and_tensors() -> None:
    runs = []
    for _ in range(2):
        rng = random.Random(5)
        texts = [random_scheme(rng) for _ in range(50)]
        schemes = [scheme for text in texts if (scheme := parsed(text)) is not None]
        runs.append((texts, [random_tensor(rng, scheme) for scheme in schemes]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_most_of_what_is_drawn_is_a_scheme() -> None:
    rng = random.Random(6)
    schemes = [parsed(random_scheme(rng)) for _ in range(1000)]
    assert sum(scheme is not None for scheme in schemes) > 600


def test_tensors_are_finite_and_small() -> None:
    rng, scheme = random.Random(7), Scheme.parse("int4:g4")
    for _ in range(500):
        x = random_tensor(rng, scheme)
        assert bool(torch.isfinite(x).all())
        assert x.numel() < 1000


def test_every_word_of_the_grammar_is_drawn() -> None:
    rng, drawn = random.Random(8), Counter[str]()
    for text in (any_scheme(rng) for _ in range(6000)):
        scheme = parsed(text)
        if scheme is not None:
            drawn.update(set(words_of(text, scheme)))
    assert {word for word in WORDS if drawn[word] == 0} == set()
    assert set(drawn) <= WORDS, "words that the list lacks"
