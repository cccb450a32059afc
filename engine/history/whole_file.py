"""Writing a file whole or not at all, without taking what has its name for a file."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the place of `path`: what was there stays until all of it is on disk, and if something fails.

    A link stays a link, whose target is written. A pipe or a device stays one, too: it is written as it is.

    Raises:
        OSError: it can't be written.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as beside:
        try:
            yield cast("BinaryIO", beside)
            beside.flush()
            os.fsync(beside.fileno())
            Path(beside.name).replace(target)
        except BaseException:
            Path(beside.name).unlink()
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
