"""The text of the views, as each revision made them: plain SQL that SQLite (3.40 or newer) and PostgreSQL both understand."""

from functools import cache
from importlib.resources import files


@cache
def read_view(folder: str, name: str) -> str:
    """The SELECT of a view, as the revision with that folder made it."""
    text = (files(__name__) / folder / f"{name}.sql").read_text(encoding="utf-8").strip()
    assert ";" not in text, f"{folder}/{name}.sql is one SELECT"
    return text


def newest_view(name: str) -> str:
    """The SELECT of a view, as the last revision that changed it made it."""
    folders = sorted(folder.name for folder in files(__name__).iterdir() if folder.joinpath(f"{name}.sql").is_file())
    return read_view(folders[-1], name)
