"""What llama-perplexity computes, written anew in numpy from its description: sums, token by token.

Source: ggml-org/llama.cpp, tools/perplexity/perplexity.cpp. The reference's log-probabilities go through the
16 bits of its file, and tokens of the reference below e^-16 do not count, unless ``exact`` is asked for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LOWEST = 16.0


def log_softmax(logits: Floats) -> Floats:
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())


def through_16_bits(logits: NDArray[np.float32]) -> Floats:
    """Return the log-probabilities that a file of base logits gives back."""
    top = logits.max()
    low = max(logits.min(), np.float32(top - np.float32(LOWEST)))
    total = np.float32(np.log(np.exp(logits - top, dtype=np.float32).astype(np.float64).sum()))
    scale = np.float32((top - low) / np.float32(65535))
    codes = np.where(logits > low, np.rint((logits - low) / scale), 0)
    return (scale * codes + (low - top - total)).astype(np.float64)


def mean_and_error(total: float, squares: float, n: int) -> tuple[float, float]:
    mean = total / n
    variance = squares / n - mean * mean
    return mean, float(np.sqrt(variance / (n - 1))) if variance > 0 else 0.0


def percentile(values: list[float], fraction: float) -> float:
    place = fraction * (len(values) - 1)
    at = int(place)
    return (1 - (place - at)) * values[at] + (place - at) * values[min(at + 1, len(values) - 1)]


def statistics(
    logits: NDArray[np.float32], base: NDArray[np.float32], tokens: NDArray[np.int64], *, exact: bool
) -> dict[str, tuple[float, float | None]]:
    """Return numbers and their errors by name; shares as shares."""
    nll, nll_base, kld, p_diff, same = [], [], [], [], 0
    for q_logits, p_logits, token in zip(logits, base, tokens, strict=True):
        q = log_softmax(q_logits.astype(np.float64))
        p = log_softmax(p_logits.astype(np.float64)) if exact else through_16_bits(p_logits)
        nll.append(-q[token])
        nll_base.append(-p[token])
        counted = np.ones_like(p, dtype=bool) if exact else p > -LOWEST
        kld.append(sum(np.exp(p[counted]) * (p[counted] - q[counted])))
        p_diff.append(np.exp(q[token]) - np.exp(p[token]))
        same += int(q.argmax() == p.argmax())
    n = len(nll)
    x, y, d, k = (np.array(v) for v in (nll, nll_base, p_diff, kld))
    own, own_error = mean_and_error(x.sum(), (x * x).sum(), n)
    ref, ref_error = mean_and_error(y.sum(), (y * y).sum(), n)
    covariance = ((x * y).sum() / n - own * ref) / (n - 1)
    ratio, ratio_error = own - ref, np.sqrt(own_error**2 + ref_error**2 - 2 * covariance)
    ppl, ppl_base = np.exp(own), np.exp(ref)
    squares = (ppl * own_error) ** 2 + (ppl_base * ref_error) ** 2 - 2 * ppl * ppl_base * covariance
    mse, mse_error = mean_and_error((d**2).sum(), (d**4).sum(), n)
    top = same / n
    found: dict[str, tuple[float, float | None]] = {
        "Mean PPL(Q)": (ppl, ppl * own_error), "Mean PPL(base)": (ppl_base, ppl_base * ref_error),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": (covariance / (own_error * ref_error), None),
        "Mean ln(PPL(Q)/PPL(base))": (ratio, ratio_error),
        "Mean PPL(Q)/PPL(base)": (np.exp(ratio), np.exp(ratio) * ratio_error),
        "Mean PPL(Q)-PPL(base)": (ppl - ppl_base, np.sqrt(squares)),
        "Mean KLD": mean_and_error(k.sum(), (k * k).sum(), n),
        "Mean Δp": mean_and_error(d.sum(), (d * d).sum(), n),
        "RMS Δp": (np.sqrt(mse), 0.5 / np.sqrt(mse) * mse_error),
        "Same top p": (top, np.sqrt(top * (1 - top) / (n - 1))),
    }  # fmt: skip
    for name, values, shares in (("KLD", sorted(kld), ""), ("Δp", sorted(p_diff), "75.0 25.0")):
        found[f"Maximum {name}"], found[f"Minimum {name}"] = (values[-1], None), (values[0], None)
        found[f"Median {name}"] = (float(np.median(values)), None)
        for share in f"99.9 99.0 95.0 90.0 10.0 5.0 1.0 0.1 {shares}".split():
            found[f"{share}% {name}"] = (percentile(values, float(share) / 100), None)
    return found
