"""A page of memory that a process and its children share, and that outlives whoever gets killed."""

import mmap
import struct

_WORD = struct.Struct("<q")


class Shared:
    """How many records are acknowledged, and what the victim does: two words that outlive it."""

    STAGES = ("born", "open", "append", "maintain", "read", "close")

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def acknowledged(self) -> int:
        return int(_WORD.unpack_from(self._page, 0)[0])

    @acknowledged.setter
    def acknowledged(self, position: int) -> None:
        _WORD.pack_into(self._page, 0, position)

    @property
    def extra(self) -> int:
        return int(_WORD.unpack_from(self._page, 128)[0])

    @extra.setter
    def extra(self, number: int) -> None:
        _WORD.pack_into(self._page, 128, number)

    @property
    def note(self) -> str:
        return self._page[256:512].rstrip(b"\0").decode()

    @note.setter
    def note(self, text: str) -> None:
        self._page[256:512] = text.encode()[:256].ljust(256, b"\0")

    @property
    def stage(self) -> str:
        return self.STAGES[_WORD.unpack_from(self._page, 64)[0]]

    @stage.setter
    def stage(self, name: str) -> None:
        _WORD.pack_into(self._page, 64, self.STAGES.index(name))
