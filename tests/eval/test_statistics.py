"""The statistics against others: llama.cpp's written anew in numpy, scipy, and numpy itself."""

import math

import numpy as np
import pytest
import torch
from tests.oracles import llama_cpp_perplexity
from tests.peers import Peer

from zeropoint.eval import Estimate, language_statistics, mcnemar, scores_of
from zeropoint.eval.embedding_similarity import embedding_statistics, ranks_of, spearman
from zeropoint.eval.estimates import covariance_of, mean_of, percentile_of, proportion_of
from zeropoint.eval.language_statistics import BASE_BITS, BITS, FLIPS

stats = Peer("scipy.stats")


def drawn(n: int = 150, vocabulary: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of a model, of its reference, and tokens."""
    random = torch.Generator().manual_seed(0)
    base = torch.randn(n, vocabulary, generator=random) * 3
    logits = base + torch.randn(n, vocabulary, generator=random) * 0.2
    return logits, base, torch.distributions.Categorical(logits=base).sample()


def test_every_statistic_is_that_of_llama_cpp_in_exact_arithmetic() -> None:
    logits, base, tokens = drawn()
    found = language_statistics(scores_of(logits, base, tokens))
    expected = llama_cpp_perplexity.statistics(logits.numpy(), base.numpy(), tokens.numpy(), exact=True)
    assert found.keys() - {FLIPS} == expected.keys()
    for name, (value, error) in expected.items():
        assert found[name].value == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert (found[name].error is None) == (error is None), name
        if error is not None:
            # Variances as differences of sums, as llama.cpp has them, lose half of the digits.
            assert found[name].error == pytest.approx(error, rel=1e-6, abs=1e-9), name


def test_what_16_bits_for_the_reference_change_is_small() -> None:
    logits, base, tokens = drawn()
    found = language_statistics(scores_of(logits, base, tokens))
    expected = llama_cpp_perplexity.statistics(logits.numpy(), base.numpy(), tokens.numpy(), exact=False)
    # A code is 16 nats / 65535, and tokens of the reference below e^-16 are left out.
    assert found["Mean KLD"].value == pytest.approx(expected["Mean KLD"][0], abs=2e-5)
    assert found["Mean PPL(base)"].value == pytest.approx(expected["Mean PPL(base)"][0], rel=2e-4)
    assert found["Mean KLD"].value != expected["Mean KLD"][0]


def test_a_model_is_at_no_distance_from_itself() -> None:
    logits, _, tokens = drawn(20)
    found = language_statistics(scores_of(logits, logits.clone(), tokens))
    for name in ("Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "RMS Δp", FLIPS):
        assert found[name] == Estimate(value=0.0, error=0.0), name
    difference = found["Mean PPL(Q)-PPL(base)"]
    assert difference.value == 0
    # The root of two variances less twice a covariance, which numpy adds in the order that memory asks for.
    assert difference.error == pytest.approx(0, abs=1e-6)
    assert found["Same top p"].value == 1
    assert found["Mean PPL(Q)/PPL(base)"].value == 1
    assert found["Cor(ln(PPL(Q)), ln(PPL(base)))"].value == pytest.approx(1)


def test_the_error_of_a_ratio_is_that_of_paired_numbers() -> None:
    logits, base, tokens = drawn()
    scores = scores_of(logits, base, tokens)
    found = language_statistics(scores)["Mean ln(PPL(Q)/PPL(base))"]
    assert found.error == pytest.approx(stats.sem(scores.nll - scores.base_nll, ddof=1))
    assert found.error is not None
    assert found.error < 0.5 * stats.sem(scores.nll)


def test_bits_per_byte_are_the_likelihood_of_the_text() -> None:
    logits, base, tokens = drawn()
    scores = scores_of(logits, base, tokens)
    found = language_statistics(scores, nbytes=700)
    assert found[BITS].value == pytest.approx(scores.nll.sum() / math.log(2) / 700)
    assert found[BASE_BITS].value == pytest.approx(scores.base_nll.sum() / math.log(2) / 700)
    assert BITS not in language_statistics(scores)


def test_means_shares_and_percentiles_are_those_of_others() -> None:
    values = np.random.default_rng(1).normal(size=31)
    assert mean_of(values).error == pytest.approx(stats.sem(values))
    assert covariance_of(values, values**2) == pytest.approx(np.cov(values, values**2)[0, 1] / 31)
    assert mean_of(values[:1]) == Estimate(value=values[0], error=0.0)
    for fraction in (0.0, 0.001, 0.1, 0.5, 0.77, 1.0):
        assert percentile_of(np.sort(values), fraction) == pytest.approx(np.quantile(values, fraction))
    share = proportion_of(3, 4)
    assert share.error == pytest.approx(stats.sem([1, 1, 1, 0]))
    assert (str(share), str(Estimate(value=0.5))) == ("0.75 ± 0.25", "0.5")


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 0), (3, 3), (10, 21), (40, 18), (900, 800)])
def test_the_test_of_mcnemar_is_exact(lost: int, gained: int) -> None:
    expected = 1.0 if lost + gained == 0 else stats.binomtest(lost, lost + gained).pvalue
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


def test_ranks_and_their_correlation_are_those_of_scipy_with_ties_too() -> None:
    random = np.random.default_rng(2)
    a, b = random.integers(0, 9, 60).astype(np.float64), random.normal(size=60)
    assert (ranks_of(a) == stats.rankdata(a)).all()
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


def test_embeddings_are_compared_by_place_and_by_order() -> None:
    random = np.random.default_rng(3)
    base = random.normal(size=(40, 8))
    same = embedding_statistics(base * 3, base)
    assert same["Mean cosine"].value == pytest.approx(1)
    assert same["Spearman of similarities"].value == pytest.approx(1)
    assert same["Top-10 neighbor overlap"].value == 1
    own = base + random.normal(size=base.shape) * 0.3
    found = embedding_statistics(own, base)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(own, base, strict=True)]
    assert found["Mean cosine"].value == pytest.approx(np.mean(cosines))
    assert found["1.0% cosine"].value == pytest.approx(np.percentile(cosines, 1))
    assert found["Top-10 neighbor overlap"].value == pytest.approx(
        np.mean([len(nearest(own, n) & nearest(base, n)) / 10 for n in range(40)])
    )


def nearest(x: np.ndarray, n: int) -> set[int]:
    """Return the ten rows that have the largest cosines with row n."""
    others = sorted((m for m in range(len(x)) if m != n), key=lambda m: -(x[n] @ x[m]) / np.linalg.norm(x[m]))
    return set(others[:10])
