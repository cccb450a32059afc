"""What one run submits, and how to go on when it is interrupted.

An interruption can fall between the moment a prompt is durable and the moment its receipt comes back. So what is in the
journal is asked of the journal, once the engine is closed: who is told to give a prompt again must not submit it twice.
"""

from typing import TYPE_CHECKING

from refold.engine.cli.console import reading
from refold.engine.cli.typed import typed
from refold.engine.history.plain import count

if TYPE_CHECKING:
    from refold.engine.cli.prompts_in import Asked
    from refold.journal.errors import JournalError


class Submission:
    """The prompts of one run and where the journal ended before them: what an error's hint must know."""

    def __init__(self, asked: "list[Asked]", model: str, journal: str) -> None:
        self.asked = asked
        self.is_open = False
        self.num_receipts = 0
        self.since = 0
        self._model, self._journal = model, journal

    def how_to_go_on(self) -> str:
        """What to do after an interruption, by what is in the journal. The engine must be closed."""
        if not self.is_open:
            return "nothing was submitted yet: run the same command again"
        if is_memory(self._journal):
            return "the journal was in memory only, and is gone with its requests"
        finish = f"`{typed('run', options=('--model', self._model, '--journal', self._journal))}` finishes what is left"
        num_journaled, is_unfinished = self._journaled()
        if num_journaled == len(self.asked):
            return f"the journal is whole: {finish}, and so does the same command"
        known = f"{num_journaled} of {count(len(self.asked), 'prompt')} {'is' if num_journaled == 1 else 'are'} in the journal"
        if is_unfinished:
            return f"{known}: {finish}; the same command does that and submits the others"
        return f"{known}{', and finished' if num_journaled else ''}: the same command submits the others"

    def how_to_go_on_once_mended(self, error: "JournalError") -> str:
        """The same after the journal's storage failed under the run; empty where only the error's own hint helps."""
        from refold.journal.errors import JournalError

        if type(error) is not JournalError or not self.is_open:  # the others are no matter of mending a disk
            return ""
        try:
            return f"once that is mended: {self.how_to_go_on()}"
        except JournalError:  # it can't even be read; but who got a receipt is in it
            known = f"{self.num_receipts} of {count(len(self.asked), 'prompt')}, or a few more"
            return f"once that is mended, the same command finishes what is in the journal ({known}) and submits the others"

    def _journaled(self) -> tuple[int, bool]:
        """How many prompts are in the journal, and whether something of them is unfinished."""
        from refold.journal.codec import decode
        from refold.journal.events import RequestFinished, RequestSubmitted

        submitted = {name for each in self.asked for name in each.journaled}
        unfinished: set[int] = set()
        with reading(self._journal) as reader:
            for event in (event for record in reader.read(start=self.since) for event in decode(record)):
                if isinstance(event, RequestSubmitted):
                    submitted.add(event.request_id)
                    unfinished.add(event.handle)
                elif isinstance(event, RequestFinished):
                    unfinished.discard(event.handle)
        num = sum(bool(each.ids()) and submitted.issuperset(each.ids()) for each in self.asked)
        return num, bool(unfinished)


def is_memory(journal: str) -> bool:
    """Whether a journal lives in memory only."""
    from refold.journal.stores.location import locate

    return locate(journal).kind == "memory"
