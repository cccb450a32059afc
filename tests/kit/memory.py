"""A folder whose files cost nothing: what tests wait for on a disk is mostly its syncs, and no test cuts the power."""

import os
import shutil
from pathlib import Path

_ENOUGH_BYTES = 1 << 30


def memory_folder() -> str | None:
    """Where files are kept in memory, if there is such a place with room for all that the tests write (containers have 64 MB)."""
    folder = Path("/dev/shm")
    if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ENOUGH_BYTES:
        return str(folder)
    return None
