"""Where compiled kernels are kept: one folder for each state of the sources.

Numba renews a cached kernel when its own file changes, not when a file it calls into does; after an upgrade
it would go on running machine code of the old version. A folder named by the hash of all kernel sources
cannot go stale.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def source_hash() -> str:
    """Return a hash of the sources in this folder, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> str:
    """Return a writable folder.

    Below NUMBA_CACHE_DIR, else below the user's cache, else one for this process alone.
    """
    asked = os.environ.get("NUMBA_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in (asked, os.path.join(users, "zeropoint")):
        if base:
            folder = Path(base) / f"kernels-{source_hash()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(folder, os.W_OK):
                return str(folder)
    return tempfile.mkdtemp(prefix="zeropoint-kernels-")
