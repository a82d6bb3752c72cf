"""What is known of data in one read: extremes, counts, exact sums, errors of codes."""
