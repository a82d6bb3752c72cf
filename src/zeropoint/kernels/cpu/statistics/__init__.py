"""One-read statistics: extremes, counts, exact sums, errors of codes."""
