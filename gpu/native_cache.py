"""Where compiled libraries are kept: the user's cache, or where that can't be, a folder of the user's own among temporary files.

A folder is of use if a file can be made in it and a library loaded from it. Where one isn't, stderr is told once what is done
instead.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def in_first_usable(attempt: Callable[[Path], T]) -> T:
    """What `attempt` makes in the first folder where it can. Raises the first folder's OSError if it can nowhere."""
    first: OSError | None = None
    usual = usual_folder()
    for folder in (partial(made, usual), temporary_folder):
        try:
            place = folder()
            found = attempt(place)
        except OSError as error:
            first = first or error
        else:
            if first is not None:
                _tell(usual, first, place)
            return found
    assert first is not None
    raise first


def usual_folder() -> Path:
    """In the user's cache. Somebody without a home has none, and a path that can't be made."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() raises
    return Path(home) / "refold"


def made(folder: Path) -> Path:
    """The folder, made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def temporary_folder() -> Path:
    """The same one for all of this user's workers, if it is surely nobody else's; else a new one."""
    folder = Path(tempfile.gettempdir()) / f"refold-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        told = folder.lstat()
        if not (stat.S_ISDIR(told.st_mode) and told.st_uid == os.getuid() and not told.st_mode & 0o022):
            return Path(tempfile.mkdtemp(prefix="refold-"))
    return folder


def _tell(usual: Path, error: OSError, place: Path) -> None:
    told = (
        f"refold: the compiled library can't be kept in {usual} ({error.strerror or error}); it is in {place} now, "
        "and is compiled again when that is gone: let XDG_CACHE_HOME name a folder that can be written\n"
    )
    try:
        sys.stderr.write(told)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # there is no stderr
        return
