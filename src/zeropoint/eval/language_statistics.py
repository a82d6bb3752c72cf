"""Statistics of a language model against its reference, under llama.cpp's names.

Source: ggml-org/llama.cpp, tools/perplexity/perplexity.cpp, function kl_divergence. We deviate in two ways:
sums are in float64 over all of the vocabulary, where llama.cpp stores the reference's logits in 16 bits and
leaves out tokens whose probability is below e^-16; and shares are shares here, where it prints percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from .estimates import Estimate, Floats, covariance_of, mean_of, percentile_of, proportion_of
from .token_scores import TokenScores

_HIGH, _LOW = ("99.9%", "99.0%", "95.0%", "90.0%"), ("10.0%", "5.0%", "1.0%", "0.1%")
PERPLEXITY, KLD, RATIO, SAME_TOP = "Mean PPL(Q)", "Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "Same top p"
"""The names that tables show first."""
FLIPS = "Flip rate"
BITS, BASE_BITS = "Bits per byte", "Bits per byte (base)"
Statistics = Mapping[str, Estimate]
"""Numbers by name."""
Samples = Mapping[str, Floats]
"""The numbers whose means are statistics, by the names of these: (n,) each, in the order of the data."""


def language_statistics(scores: TokenScores, nbytes: int | None = None) -> Statistics:
    """Return perplexities, KL divergence and probability changes, by llama.cpp's names.

    Errors of ratios and differences account for pairing: what both models find hard does not count.

    Args:
        scores: of all tokens.
        nbytes: of the text that the tokens are, in UTF-8; without it there are no bits per byte.

    Example:
        >>> one = np.array([1.0, 2.0, 3.0])
        >>> scores = TokenScores(nll=one, base_nll=one, kld=one * 0, same_top=one > 1)
        >>> language_statistics(scores)["Mean ln(PPL(Q)/PPL(base))"]
        Estimate(value=0.0, error=0.0)
    """
    return dict(
        [*_perplexities(scores), *_divergences(scores), *_probabilities(scores), *_bits(scores, nbytes)]
    )


def language_samples(scores: TokenScores) -> Samples:
    """Return the numbers of each token whose means are statistics."""
    return {
        RATIO: scores.nll - scores.base_nll,
        KLD: scores.kld,
        SAME_TOP: scores.same_top.astype(np.float64),
    }


def _perplexities(scores: TokenScores) -> Iterator[tuple[str, Estimate]]:
    own, base = mean_of(scores.nll), mean_of(scores.base_nll)
    assert own.error is not None
    assert base.error is not None
    ppl, base_ppl = math.exp(own.value), math.exp(base.value)
    covariance = covariance_of(scores.nll, scores.base_nll)
    yield PERPLEXITY, Estimate(value=ppl, error=ppl * own.error)
    yield "Mean PPL(base)", Estimate(value=base_ppl, error=base_ppl * base.error)
    product = own.error * base.error
    yield "Cor(ln(PPL(Q)), ln(PPL(base)))", Estimate(value=covariance / product if product else 1.0)
    ratio = mean_of(scores.nll - scores.base_nll)
    assert ratio.error is not None
    yield RATIO, ratio
    yield (
        "Mean PPL(Q)/PPL(base)",
        Estimate(value=math.exp(ratio.value), error=math.exp(ratio.value) * ratio.error),
    )
    squares = (ppl * own.error) ** 2 + (base_ppl * base.error) ** 2 - 2 * ppl * base_ppl * covariance
    yield "Mean PPL(Q)-PPL(base)", Estimate(value=ppl - base_ppl, error=math.sqrt(max(0.0, squares)))


def _divergences(scores: TokenScores) -> Iterator[tuple[str, Estimate]]:
    yield KLD, mean_of(scores.kld)
    yield from _spread(scores.kld, "KLD", _HIGH, _LOW)


def _probabilities(scores: TokenScores) -> Iterator[tuple[str, Estimate]]:
    change = scores.p_diff
    yield "Mean Δp", mean_of(change)
    yield from _spread(change, "Δp", (*_HIGH, "75.0%"), ("25.0%", *_LOW))
    square = mean_of(change**2)
    root = math.sqrt(square.value)
    assert square.error is not None
    yield "RMS Δp", Estimate(value=root, error=0.5 / root * square.error if root else 0.0)
    same, every = int(scores.same_top.sum()), len(scores.same_top)
    yield SAME_TOP, proportion_of(same, every)
    yield FLIPS, proportion_of(every - same, every)


def _spread(
    values: Floats, name: str, high: tuple[str, ...], low: tuple[str, ...]
) -> Iterator[tuple[str, Estimate]]:
    """Yield extremes, percentiles and the median of ``values``, from the largest down."""
    ordered = np.sort(values)
    yield f"Maximum {name}", Estimate(value=float(ordered[-1]))
    for share in high:
        yield f"{share} {name}", Estimate(value=percentile_of(ordered, float(share[:-1]) / 100))
    yield f"Median {name}", Estimate(value=percentile_of(ordered, 0.5))
    for share in low:
        yield f"{share} {name}", Estimate(value=percentile_of(ordered, float(share[:-1]) / 100))
    yield f"Minimum {name}", Estimate(value=float(ordered[0]))


def _bits(scores: TokenScores, nbytes: int | None) -> Iterator[tuple[str, Estimate]]:
    """Yield each model's bits per byte of the text."""
    if nbytes:
        factor = len(scores.nll) / nbytes / math.log(2)
        for name, values in ((BITS, scores.nll), (BASE_BITS, scores.base_nll)):
            mean = mean_of(values)
            assert mean.error is not None
            yield name, Estimate(value=mean.value * factor, error=mean.error * factor)
