"""The folder of a journal: a marker that says what it is, and one folder of segments for each stream.

    JOURNAL/SEGMENTS                          "refold segments 1"
    JOURNAL/owner.lock                        held by the live engine
    JOURNAL/main/mark                         how far the stream was acknowledged
    JOURNAL/main/00000000000000000000.sealed  a compressed segment, with an index at its end
    JOURNAL/main/00000000000000004711.seg     the segment that is written; its name is its first position

A stream whose name isn't plain has a folder called `=` and the beginning of the name's digest; its segments say the name.
"""

import errno
import hashlib
import re
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from refold.journal.errors import JournalCorrupt, JournalError, NotFound, SchemaTooNew
from refold.journal.stores.no_file import NoFile
from refold.journal.stores.segments.files import OS_FILES, FileLayer, explain, read_file, write_file

MARKER = "SEGMENTS"
ARCHIVES_NAME = "archives"
FORMAT = "segments 1"
_MARKER_TEXT = b"refold segments 1\n"
_MARKER_PATTERN = re.compile(rb"refold segments (\d{1,9})\n")
_PLAIN = re.compile(r"[a-z0-9_-]{1,64}")
_SEGMENT_NAME = re.compile(r"(\d{20})\.(seg|sealed)")
DRAFT_SUFFIX = ".new"


class SegmentName(NamedTuple):
    """A segment by its file's name."""

    first: int
    sealed: bool

    @property
    def file_name(self) -> str:
        """Its file."""
        return f"{self.first:020d}.{'sealed' if self.sealed else 'seg'}"


def look_at(path: Path, files: FileLayer = OS_FILES) -> Literal["absent", "empty", "journal"]:
    """What lies at `path`. Writes nothing.

    Raises:
        JournalCorrupt: something that isn't a journal of ours (kind `foreign`).
        SchemaTooNew: a newer refold made it.
        JournalError: it can't be read.
    """
    try:
        names = set(files.listdir(path))
        if MARKER in names:
            _check_marker(path, read_file(files, path / MARKER))
            return "journal"
    except FileNotFoundError:
        return "absent"
    except NotADirectoryError as error:
        raise JournalCorrupt(f"{path} is not a folder: name another journal", position=0, kind="foreign") from error
    except NoFile as error:
        raise JournalError(f"{error.line}; {_mend(path)}") from error
    except OSError as error:
        raise explain(error, path, "look at") from error
    strangers = sorted(names - {MARKER + DRAFT_SUFFIX})
    if not strangers:
        return "empty"
    if any(segments_of(_listed(path / name, files)) for name in strangers):
        raise JournalError(f"{path} has segments, and its file {MARKER} is gone: {_mend(path)}")
    raise JournalCorrupt(
        f"{path} is a folder of something else (it has {strangers[0]!r}): name another journal",
        position=0,
        kind="foreign",
    )


def _check_marker(path: Path, text: bytes) -> None:
    if text == _MARKER_TEXT:
        return
    known = _MARKER_PATTERN.fullmatch(text)
    if known is None:
        raise JournalError(f"{path / MARKER} is not what refold wrote: {_mend(path)}")
    raise SchemaTooNew(f"{path} has segments of version {int(known[1])}, this refold knows 1: use a newer refold")


def _mend(path: Path) -> str:
    marker = shlex.quote(str(path / MARKER))
    return f"it says of what format the journal is, and nothing else; `echo refold {FORMAT} > {marker}` makes it anew"


def _listed(path: Path, files: FileLayer) -> list[str]:
    try:
        return files.listdir(path)
    except OSError:  # no folder, or none that we may look into
        return []


def require(path: Path, files: FileLayer = OS_FILES) -> None:
    """Refuse what isn't a journal of segments.

    Raises:
        NotFound: there is no journal.
        JournalError: there is something else.
    """
    if look_at(path, files) != "journal":
        raise NotFound(f"no journal at {path}: name an existing journal, or let an engine create it")


def create(path: Path, files: FileLayer = OS_FILES) -> bool:
    """Make the folder a journal, unless it is one. Whether anything was done.

    Raises:
        JournalError: there is something else, or it can't be written.
    """
    state = look_at(path, files)
    if state == "journal":
        return False
    try:
        if state == "absent":
            files.mkdir(path)
        write_file(files, path / MARKER, _MARKER_TEXT)
        files.fsync_dir(path.parent)
    except FileExistsError:
        return create(path, files)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise JournalError(f"cannot create {path}: its folder does not exist; make that first") from error
        raise explain(error, path, "create") from error
    return True


def stream_folder(path: Path, stream: str) -> Path:
    """Where the segments of a stream are."""
    plain = _PLAIN.fullmatch(stream)
    return path / (stream if plain else "=" + hashlib.sha256(stream.encode("utf-8", "replace")).hexdigest()[:32])


def segments_of(names: list[str]) -> list[SegmentName]:
    """The segments among the names in a stream's folder, in order. A sealed one counts instead of what it was made from."""
    found: dict[int, bool] = {}
    for match in filter(None, map(_SEGMENT_NAME.fullmatch, names)):
        first = int(match[1])
        found[first] = found.get(first, False) or match[2] == "sealed"
    return [SegmentName(first, found[first]) for first in sorted(found)]


def leftovers(names: list[str]) -> list[str]:
    """The names of drafts, and of segments that have been sealed: what a crash leaves for the next owner to remove."""
    sealed = {name.removesuffix(".sealed") for name in names if name.endswith(".sealed")}
    return [n for n in names if n.endswith(DRAFT_SUFFIX) or (n.endswith(".seg") and n.removesuffix(".seg") in sealed)]
