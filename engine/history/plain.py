"""Plain text: escapes, counts and lists, for people and for terminals."""

from collections.abc import Sequence

_MAX_NAMED = 4


def safe(text: str) -> str:
    """The text with everything that a terminal would obey or can't show written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def safe_text(text: str) -> str:
    """Text for a terminal: lines stay lines, anything else that isn't printable is escaped."""
    return "\n".join(safe(line) for line in text.split("\n"))


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: what came from a shell, or from a worker, may have characters that can't."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(items: Sequence[str], limit: int = _MAX_NAMED) -> str:
    """`a, b, c and 7 more`."""
    if len(items) <= limit:
        return ", ".join(items)
    return ", ".join(items[: limit - 1]) + f" and {len(items) - limit + 1} more"
