"""The host side of the kernels: tensors to arrays, threads over rows, errors with their place.

Nothing here is compiled: the cache of compiled kernels does not depend on these files.
"""
