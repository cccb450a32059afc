"""An engine's lifecycle: how it is opened, closed, and used as a context manager, with asyncio and without."""

import asyncio
import os
import threading
from os import PathLike
from types import TracebackType
from typing import Self, Unpack

from refold.engine.checked import short
from refold.engine.config import PROCESS_TIMEOUTS, EngineArgs, EngineOptions, as_url
from refold.engine.life import Life, Prepared, begin, prepare
from refold.engine.messages import CLOSED, INTERRUPTED, EngineStopped
from refold.engine.models import MakeWorker, Text
from refold.engine.opening import Recovery
from refold.journal.errors import RefoldError, Rejected
from refold.journal.events import EngineConfig
from refold.journal.store import JournalStore

_NOT_OPEN = "the engine is not open: use `with Engine(...)`, or open it"
_CLOSED_UNOPENED = "the engine was closed before it was opened, and stays closed: make a new one"


class Lifecycle:
    """What `Engine` is before and after it serves anybody."""

    def __init__(
        self,
        model: str,
        journal: str | PathLike[str] | JournalStore = "memory:",
        *,
        make_worker: MakeWorker | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Check the arguments; nothing is opened yet.

        Args:
            model: `smollm2`, a GGUF file, a folder of safetensors, or `simulated`.
            journal: `sqlite:///FILE`, a plain path, `postgresql://USER@HOST/DATABASE`, `memory:`, or a store of your own,
                which stays yours to close.
            make_worker: builds a worker of your own for the model, in place of the built-in one.
            **options: see `EngineArgs`.

        Raises:
            Rejected: an argument can't be; names it, its value and the remedy.
        """
        if make_worker is not None and not callable(make_worker):
            raise Rejected(f"make_worker is {short(make_worker)}: give something that makes a worker when it is called")
        if make_worker is not None and options.get("worker") == "process":
            raise Rejected(
                "worker is 'process' and make_worker is given: a worker of your own is where you make it; for a process of its "
                "own, let make_worker return one that speaks to it, as refold.gpu.process.ProcessWorker does"
            )
        if make_worker is not None and (given := [name for name in PROCESS_TIMEOUTS if name in options]):
            raise Rejected(
                f"{given[0]} is given with make_worker: a worker of your own can't be given up from here; let it raise WorkerLost "
                "when it takes too long"
            )
        self._given_store = journal if isinstance(journal, JournalStore) else None
        url = "memory:" if isinstance(journal, JournalStore) else as_url(journal)
        self.args = EngineArgs(model=model, journal=url, **options)
        self._make_worker = make_worker
        self._prepared: Prepared | None = None
        self._life: Life | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_entered = False
        self._pid = os.getpid()

    def find_model(self) -> Self:
        """Look for the model and what belongs to it, without opening anything.

        Raises:
            Rejected: there is no such model, or it can't be computed here.
        """
        with self._lock:
            self._ready_to_begin()
        return self

    def open(self, *, await_worker: bool = True) -> Self:
        """Open the journal, fold it, start the worker, and go on with whatever was unfinished. Blocking.

        Args:
            await_worker: False to return as soon as requests can be journaled, while the worker still loads its weights.
                If the model turns out to be unfit, what was submitted meanwhile ends with reason `error`; see `await_worker`.

        Raises:
            Rejected: the model can't be used, or isn't the one that the journal's unfinished requests run on.
            JournalOwned: another live engine writes this journal.
            JournalError: the journal can't be opened, or is damaged.
            WorkerLost: the worker didn't start.
        """
        with self._lock:
            if self._life is not None:
                raise Rejected("an engine opens once: make a new one")
            if self._is_closed:  # by whoever gave up an opening that had not begun yet: it must not begin now
                raise Rejected(_CLOSED_UNOPENED)
            self._pid = os.getpid()
            life = begin(self.args, self._ready_to_begin(), self._given_store)
            if await_worker:
                try:
                    life.core.ready.result()
                except BaseException:
                    life.end()
                    raise
            self._life = life
        return self

    def await_worker(self) -> None:
        """Wait for the first worker of an engine that was opened without waiting for it. Blocking.

        Raises:
            Rejected: the model can't be used.
            WorkerLost: the worker didn't start. What was submitted goes on when the journal is opened again.
        """
        if self._life is None:
            raise self._never_opened()
        self._life.core.ready.result()

    @property
    def tokenizer(self) -> Text | None:
        """The model's tokenizer and chat template, also before `open`; None if it has none. Raises Rejected as `open` does."""
        return self._ready_to_begin().desk.text_or_none

    def _ready_to_begin(self) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare(self.args, self._make_worker)
        return self._prepared

    def close(self) -> None:
        """Finish the steps in flight, record how things stand, free everything. Idempotent. Blocking.

        Unfinished requests stay in the journal and go on when it is opened again.

        Raises:
            RefoldError: the engine failed while it was closing.
        """
        self._close(CLOSED)

    def _close(self, reason: str) -> None:
        if self._is_of_another_process:  # its threads aren't here, and what is open is the parent's
            return
        with self._lock:
            if self._life is None or self._is_closed:
                self._is_closed = True
                return
            self._is_closed = True
            core = self._life.core
            had_failed = core.cause is not None
            self._life.end(reason)
        if core.cause is not None and not had_failed:
            raise core.cause.with_traceback(None)

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        """Open, unless `open` was called just before: `with engine.open(await_worker=False): ...`."""
        return self if self._enters() else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    async def __aenter__(self) -> Self:
        try:
            return self if self._enters() else await asyncio.to_thread(self.open)
        except asyncio.CancelledError as error:  # it goes on opening, and nobody would close it
            threading.Thread(target=self._leave, args=(error,), name="refold-close").start()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._leave, error)

    def _enters(self) -> bool:
        """Whether this engine was opened by hand, and is entered for the first time."""
        enters = self._life is not None and not self._is_entered
        self._is_entered = True
        return enters

    def _leave(self, error: BaseException | None) -> None:
        """Close. To a caller that leaves with an error, a failure of the engine isn't told once more."""
        try:
            self._close(INTERRUPTED if isinstance(error, KeyboardInterrupt) else CLOSED)
        except RefoldError:
            if error is None:
                raise

    def _live(self) -> Life:
        if self._life is None:
            raise self._never_opened()
        if self._is_of_another_process:
            raise EngineStopped(
                f"this engine lives in process {self._pid}, of which process {os.getpid()} is a fork: use it there, or open another "
                "one here, on another journal"
            )
        if self._is_closed or self._life.core.cause is not None:
            raise self._life.core.why_stopped()
        return self._life

    @property
    def _is_of_another_process(self) -> bool:
        return self._life is not None and self._pid != os.getpid()

    def _never_opened(self) -> EngineStopped:
        return EngineStopped(_CLOSED_UNOPENED if self._is_closed else _NOT_OPEN)

    @property
    def recovery(self) -> Recovery | None:
        """What opening the journal found and did; None before `open`."""
        return None if self._life is None else self._life.recovery

    @property
    def config(self) -> EngineConfig:
        """What the engine's decisions depend on."""
        return self._live().config
