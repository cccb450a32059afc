"""Where a journal lives: one URL, or a bare path, names the store.

`memory:` is a journal that dies with its process. `sqlite:///relative.db`, `sqlite:////absolute.db` and a bare path are
one SQLite file. Everything else is refused here, before any driver is imported.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from refold.journal.errors import JournalError

_SQLITE = "sqlite:///"


class Location(NamedTuple):
    """A parsed URL: the store's kind (a key of `kinds.KINDS`), the absolute path if it is a file, and the URL as given."""

    kind: Literal["memory", "sqlite"]
    path: Path | None
    url: str


def locate(url: str) -> Location:
    """What `url` names. The file need not exist.

    Raises:
        JournalError: the URL names no store that this refold knows.
    """
    if url in {"memory:", "memory://"}:
        return Location("memory", None, url)
    if url.startswith(_SQLITE):
        return Location("sqlite", _path(url, url.removeprefix(_SQLITE)), url)
    if "://" in url or url.startswith("sqlite:"):
        raise JournalError(f"{url!r} names no journal store: use sqlite:///FILE, a plain file path, or memory:")
    return Location("sqlite", _path(url, url), url)


def sqlite_path(url: str) -> Path:
    """The file behind a URL that must name a SQLite journal.

    Raises:
        JournalError: it names something else.
    """
    path = locate(url).path
    if path is None:
        raise JournalError(f"{url!r} is no journal file: use sqlite:///FILE or a plain file path")
    return path


def _path(url: str, text: str) -> Path:
    bad = not text or text == ":memory:" or text.startswith("file:") or "\0" in text
    if bad or (url.startswith(_SQLITE) and "?" in text):
        raise JournalError(f"{url!r} names no file: use sqlite:///FILE without options, a plain file path, or memory:")
    try:
        text.encode("utf-8")
        return Path(text).expanduser().absolute()
    except (UnicodeEncodeError, RuntimeError) as error:
        raise JournalError(f"{url!r} names no file: {error}; use another file name") from error
