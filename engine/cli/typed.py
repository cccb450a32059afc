"""Commands as one can type them: whatever a path or an id holds, the shell gives it back as it is."""

import os
from collections.abc import Sequence

from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores.location import shown


def quoted(word: str) -> str:
    """A word for a shell: as it is if that is safe, in quotes if not, `$'...'` if a terminal must not see it raw."""
    import shlex

    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def typed(verb: str, *operands: str, options: Sequence[str | int] = ()) -> str:
    """A `refold` command: its verb, its options, then what it is about. A URL's password is not shown."""
    words = [quoted(shown(str(word))) for word in (*options, *operands)]
    if any(operand.startswith("-") for operand in operands):
        words.insert(len(options), "--")
    return " ".join(["refold", verb, *words])


def of_stream(stream: str) -> tuple[str, ...]:
    """The option that names a stream to a verb; none for the usual one."""
    return () if stream == DEFAULT_STREAM else ("--stream", stream)


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
