"""The numbers for the error of a disk that is full: how much room it has left, and what was to be written.

Without them a quota, a small volume and a full one look alike.
"""

import os
from pathlib import Path


def room_at(path: Path) -> str:
    """` (12,288 bytes free in /var/lib)` for the file system that `path` is on or would be; empty if it can't be asked."""
    for folder in path.absolute().parents:
        try:
            found = os.statvfs(folder)
        except (OSError, ValueError):
            continue
        return f" ({found.f_bavail * found.f_frsize:,} bytes free in {folder})"
    return ""


def writing(first: int, last: int, num_bytes: int | None = None) -> str:
    """`write records 12 to 14 (4,812 bytes) to`, as an `explain` goes on."""
    size = "" if num_bytes is None else f" ({num_bytes:,} bytes)"
    return f"write {f'records {first} to {last}' if last > first else f'record {first}'}{size} to"
