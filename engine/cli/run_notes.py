"""What `refold run` says before it serves anybody: what it found, and what may surprise."""

from typing import TYPE_CHECKING

from refold.engine.cli.failures import Complaint
from refold.engine.cli.output import named, note
from refold.engine.cli.submission import is_memory
from refold.engine.cli.typed import typed
from refold.engine.history.plain import count, listed, safe

if TYPE_CHECKING:
    from refold.engine.cli.prompts_in import Asked
    from refold.engine.engine import Engine
    from refold.engine.opening import Recovery


def require_something(journal: str) -> None:
    """Without a prompt there must be something that can be unfinished. More is known only once the journal is folded."""
    from refold.journal.errors import NotFound
    from refold.journal.stores import open_reader

    if is_memory(journal):
        raise nothing_to_do()
    try:
        open_reader(journal).close()
    except NotFound as error:
        raise nothing_to_do() from error


def tell_kind(journal: str) -> None:
    """Say what becomes of an empty folder: whoever names one may have meant a file in it."""
    from refold.journal.stores.location import file_path, locate
    from refold.journal.stores.segments.folder import look_at

    location = locate(journal)
    if location.kind == "segments" and look_at(file_path(location)) == "empty":
        note(
            f"{named(journal)} is an empty folder: it becomes a journal of segment files; for one file, name {named(journal)}/refold.db"
        )


def nothing_to_do() -> Complaint:
    """The complaint about a run without a prompt on a journal that has nothing left."""
    return Complaint("no prompt, and nothing unfinished in the journal", 'give a prompt: `refold run "Hello"`')


def warn_of_copies(asked: "list[Asked]") -> None:
    """Say that greedy completions of one prompt are alike."""
    most = max((each.sampling.n for each in asked if each.sampling.temperature == 0), default=1)
    if most > 1:
        note(
            f"temperature is 0, which takes the likeliest token: on a model with weights the {most} completions of a prompt are "
            "alike; give `--temperature 0.8`, say"
        )


def tell_repeated(asked: "list[Asked]") -> None:
    """Say that there are fewer answers than prompts, where some have one id and ask for the same."""
    if places := [safe(each.place) for each in asked if each.is_repeated]:
        note(f"given before, with the same id: {listed(places)}; what has one id is one request, and is printed once")


def tell_quarantine(engine: "Engine", journal: str) -> None:
    """Say that something is kept out: whoever submits it is refused."""
    if kept := engine.quarantined():
        whose = listed([safe(each) for each in kept])
        note(f"quarantined: what {whose} asked for, which killed workers; `{typed('quarantine', journal)}` tells more")


def report_recovery(recovery: "Recovery") -> None:
    """Say what an earlier engine left unfinished, and that it will be finished too."""
    if not recovery.requests:
        return
    end = "was closed" if recovery.was_closed else "ended without a word"
    ids = listed([safe(request_id) for request_id in recovery.request_ids])
    note(
        f"recovered: the last engine on this journal {end}; {count(recovery.requests, 'unfinished request')} with "
        f"{count(recovery.tokens, 'token')} so far will be finished too{': ' if ids else ''}{ids}"
    )
