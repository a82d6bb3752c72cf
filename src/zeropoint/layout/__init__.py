"""Where elements lie: blocks of a tensor, codes in bytes. Plain torch, no number formats beyond their width."""
