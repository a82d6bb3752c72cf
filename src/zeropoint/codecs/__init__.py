"""File layouts: how a quantized tensor lies in the files that an engine reads, one module a layout."""
