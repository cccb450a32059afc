"""Writing a file whole or not at all, without taking what has its name for a file."""

import codecs
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast


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
    beside = target.with_name(f"refold-{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """As `whole_file`, for text, which is written as UTF-8."""
    with whole_file(path) as file:
        yield cast("TextIO", codecs.getwriter("utf-8")(file))
