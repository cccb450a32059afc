"""Where a journal lives: one URL, or a bare path, names the store.

`memory:` is a journal that dies with its process. `sqlite:///relative.db`, `sqlite:////absolute.db` and a bare path are one
SQLite file. `segments:///relative`, `segments:////absolute`, a bare path that ends with a slash and the bare path of a folder
that exists are a folder of segment files. `postgresql://USER@HOST/DATABASE` is a PostgreSQL database. Everything else is
refused here, before any driver is imported.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from refold.journal.errors import JournalError

_SQLITE = "sqlite:///"
_SEGMENTS = "segments:///"
_POSTGRESQL = ("postgresql://", "postgresql+psycopg://", "postgres://")
_SQLITE_FILES = ("", "-wal", "-shm", "-journal", ".mark", ".lock")
_PASSWORD = re.compile(r"(?<=://)([^/@?#]*?):[^@/]+@|(?<=[?&])(password=)[^&]*")
_USE = "use sqlite:///FILE, segments:///FOLDER, postgresql://USER@HOST/DATABASE, a plain path, or memory:"


class Location(NamedTuple):
    """A parsed URL: the store's kind (a key of `kinds.KINDS`), the absolute path if it is a file, and the URL as given."""

    kind: Literal["memory", "sqlite", "segments", "postgresql"]
    path: Path | None
    url: str


class NoStore(JournalError):
    """A URL that names no store: a typing error, say. Nothing is wrong with any journal, and the same URL never does."""


def locate(url: str) -> Location:
    """What `url` names. The file need not exist.

    Raises:
        NoStore: the URL names no store that this refold knows.
    """
    if url in {"memory:", "memory://"}:
        return Location("memory", None, url)
    if url.startswith(_SQLITE):
        return Location("sqlite", _path(url, url.removeprefix(_SQLITE)), url)
    if url.startswith(_SEGMENTS):
        return Location("segments", _path(url, url.removeprefix(_SEGMENTS)), url)
    if url.startswith(_POSTGRESQL):
        return Location("postgresql", None, _database(url))
    if "://" in url or url.startswith(("sqlite:", "segments:")):
        raise NoStore(f"{shown(url)!r} names no journal store: {_USE}")
    path = _path(url, url)
    return Location("segments" if url.endswith("/") or os.path.isdir(path) else "sqlite", path, url)  # noqa: PTH112 - it raises nothing


def sqlite_path(url: str) -> Path:
    """The file behind a URL that must name a SQLite journal.

    Raises:
        JournalError: it names something else.
    """
    kind, path, _ = locate(url)
    if kind != "sqlite" or path is None:
        raise NoStore(f"{shown(url)!r} is no journal file: use sqlite:///FILE or a plain file path")
    return path


def is_part_of(url: str, file: Path) -> bool:
    """Whether a file is one of those that make up the journal at `url`, under whatever name."""
    kind, path, _ = locate(url)
    if path is None:
        return False
    if kind == "segments":
        return file.resolve().is_relative_to(path.resolve())
    parts = [path.with_name(path.name + suffix) for suffix in _SQLITE_FILES]
    if file.exists():  # by what it is: it may be a link
        return any(_is_same(file, part) for part in parts)
    return file.resolve() in {part.resolve() for part in parts}


def _is_same(file: Path, part: Path) -> bool:
    with contextlib.suppress(OSError):  # one of them is gone, by now
        return file.samefile(part)
    return False


def shown(url: str) -> str:
    """The URL as it may appear on a screen: without its password."""
    return _PASSWORD.sub(lambda match: f"{match[1]}:***@" if match[2] is None else f"{match[2]}***", url)


def place_of(url: str) -> str:
    """Where a journal is, as messages and logs call it: its path, or its URL without a password."""
    location = locate(url)
    return shown(url) if location.path is None else str(location.path)


def _database(url: str) -> str:
    try:
        name = urlsplit(url).path.strip("/")
        url.encode("utf-8")
    except ValueError:
        name = ""
    if not name or "/" in name or "\0" in url:
        raise NoStore(f"{shown(url)!r} names no database: use postgresql://USER@HOST/DATABASE")
    return url


def file_path(location: Location) -> Path:
    """The path of a location that has one."""
    assert location.path is not None, f"{location.kind} has no path"
    return location.path


def _path(url: str, text: str) -> Path:
    bad = not text or text == ":memory:" or text.startswith("file:") or "\0" in text
    if bad or (url.startswith((_SQLITE, _SEGMENTS)) and "?" in text):
        raise NoStore(f"{url!r} names no file: {_USE}, without options")
    try:
        text.encode("utf-8")
        return Path(text).expanduser().absolute()
    except (UnicodeEncodeError, RuntimeError) as error:
        raise NoStore(f"{url!r} names no file: {error}; use another file name") from error
