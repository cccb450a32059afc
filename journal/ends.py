"""The end of a stream that can be read, and that nobody vouches for."""

from typing import Protocol, runtime_checkable

from refold.journal.store import DEFAULT_STREAM, JournalReader


@runtime_checkable
class EndChecked(Protocol):
    """A reader that reads a stream also where it can't vouch for its end."""

    def check_end(self, stream: str = DEFAULT_STREAM) -> None:
        """See whether it can.

        Raises:
            JournalCorrupt: it can't; kind `unmarked`.
        """
        ...


def check_end(reader: JournalReader, stream: str = DEFAULT_STREAM) -> None:
    """See to it that nobody has to doubt whether a stream still ends where it was acknowledged to.

    Raises:
        JournalCorrupt: everybody has to; kind `unmarked`.
    """
    if isinstance(reader, EndChecked):
        reader.check_end(stream)
