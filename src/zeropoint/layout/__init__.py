"""Where elements lie: blocks of a tensor, codes in bytes. It knows no number formats beyond their width."""
