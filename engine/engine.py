"""The embeddable engine.

    async with Engine("smollm2", "sqlite:///refold.db") as engine:
        async for delta in engine.generate("Why is the sky blue?"):
            print(delta.text, end="", flush=True)

or, without asyncio:

    with Engine("smollm2", "sqlite:///refold.db") as engine:
        for completion in engine.run(["Why is the sky blue?", "Count to ten."]):
            print(completion.text)

The engine has threads of its own and may be used from any thread and any event loop at once. Whatever was submitted is in
the journal: a request that a crash, a kill or `close` left unfinished goes on when the journal is opened again, and
`resume` attaches to it where its client left off.
"""

import asyncio
import contextlib
import hashlib
import queue
import secrets
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, Unpack

from refold.engine.config import EngineArgs, EngineOptions, SamplingParams, short
from refold.engine.core import EngineCore
from refold.engine.delivery import Delivery, Reader, bell_of_running_loop
from refold.engine.messages import Ask, EngineStopped
from refold.engine.models import MakeWorker, Text, find_model
from refold.engine.opening import Recovery, find_output, fold_journal, opening_commands
from refold.engine.prompts import Prompt, check_priority, check_sampling, check_text, prompt_token_ids
from refold.engine.streams import Completion, Delta, OnDelta, Transcript
from refold.journal.errors import RefoldError, Rejected
from refold.journal.events import EngineConfig
from refold.journal.store import JournalStore
from refold.journal.stores import open_store
from refold.journal.writer import JournalWriter
from refold.migrations import ensure
from refold.projections.outbox import Output
from refold.scheduler.admission import MAX_REQUEST_ID_CHARS, MAX_SALT_CHARS
from refold.scheduler.commands import AbortRequest, ResetCache, SubmitRequest
from refold.scheduler.state import State

__all__ = ["Completion", "Delta", "Engine", "EngineStopped", "Recovery", "Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at a glance. Totals are over the whole journal, not just this life of the engine.

    Attributes:
        running: requests in the batch.
        waiting: requests in the queue, preempted ones included.
        in_flight_steps: steps that the worker has not answered.
        free_blocks: KV blocks that may be taken, of `num_blocks`.
        requests: requests submitted.
        finished: how many ended with which reason.
        steps: steps scheduled.
        tokens: tokens generated.
        preemptions: requests that lost their place for want of memory or to a cache reset.
        stale_tokens_delivered: tokens of an ended epoch that were valid and kept.
        stale_tokens_dropped: those that were thrown away.
        lost_workers: workers replaced.
        durable_position: records on disk.
    """

    running: int
    waiting: int
    in_flight_steps: int
    free_blocks: int
    num_blocks: int
    requests: int
    finished: dict[str, int]
    steps: int
    tokens: int
    preemptions: int
    stale_tokens_delivered: int
    stale_tokens_dropped: int
    lost_workers: int
    durable_position: int


class Engine:
    """An engine on one stream of one journal. Use it as a context manager, or `open` and `close` it.

    Attributes:
        recovery: what opening the journal found and did; None before `open`.
        config: what the engine's decisions depend on; None before `open`.
    """

    def __init__(
        self,
        model: str,
        journal: str | JournalStore = "memory:",
        *,
        make_worker: MakeWorker | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Check the arguments; nothing is opened yet.

        Args:
            model: `smollm2`, a GGUF file, a folder of safetensors, or `simulated`.
            journal: `sqlite:///FILE`, a plain path, `memory:`, or a store of your own, which stays yours to close.
            make_worker: builds a worker of your own for the model, in place of the built-in one.
            **options: see `EngineArgs`.

        Raises:
            Rejected: an argument can't be; names it, its value and the remedy.
        """
        self._given_store = None if isinstance(journal, str) else journal
        url = journal if isinstance(journal, str) else "memory:"
        self.args = EngineArgs(model=model, journal=url, **options)
        self.recovery: Recovery | None = None
        self.config: EngineConfig | None = None
        self._make_worker = make_worker
        self._text: Text | Rejected = Rejected("the engine is not open: open it first")
        self._store: JournalStore | None = None
        self._core: EngineCore | None = None
        self._root_seed = 0
        self._state_lock = threading.Lock()
        self._closed = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Open the journal, fold it, start the worker, and go on with whatever was unfinished. Blocking.

        Raises:
            Rejected: the model can't be used, or isn't the one that the journal's unfinished requests run on.
            JournalOwned: another live engine writes this journal.
            JournalError: the journal can't be opened, or is damaged.
            WorkerLost: the worker didn't start.
        """
        with self._state_lock:
            if self._core is not None or self._closed:
                raise Rejected("an engine opens once: make a new one")
            model = find_model(self.args.model, self.args.threads)
            config = self.args.resolve(model)
            make_worker = self._make_worker or model.make_worker
            try:
                self._text = model.load_text()
            except Rejected as error:
                self._text = error
            store = self._given_store or _open_store(self.args.journal)
            try:
                self._core = self._begin(store, config, lambda: make_worker(config))
            except BaseException:
                if store is not self._given_store:
                    store.close()
                raise
            self._store, self.config = store, config
        return self

    def close(self) -> None:
        """Finish the steps in flight, record how things stand, free everything. Idempotent. Blocking.

        Unfinished requests stay in the journal and go on when it is opened again.

        Raises:
            RefoldError: the engine failed while it was closing.
        """
        with self._state_lock:
            core, store = self._core, self._store
            if self._closed or core is None:
                self._closed = True
                return
            self._closed = True
            had_failed = core.cause is not None
            core.stop()
            core.join()
            if store is not None and store is not self._given_store:
                store.close()
        if core.cause is not None and not had_failed:
            raise core.cause.with_traceback(None)

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    async def __aenter__(self) -> Self:
        opening = asyncio.get_running_loop().run_in_executor(None, self.open)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda _: threading.Thread(target=self.close, daemon=True).start())
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._leave, error)

    def _leave(self, error: BaseException | None) -> None:
        """Close; a failure of the engine that the caller is already told about isn't told twice."""
        try:
            self.close()
        except RefoldError:
            if error is None:
                raise

    def _begin(self, store: JournalStore, config: EngineConfig, make_worker: Callable[[], Any]) -> EngineCore:
        head = store.open_stream(self.args.stream)
        folded = fold_journal(store, self.args.stream, head)
        self._root_seed = secrets.randbits(63) if self.args.seed is None else self.args.seed
        core = EngineCore(
            folded.state, Delivery(folded.outbox), folded.totals, make_worker, durability=self.args.durability
        )
        writer = JournalWriter(
            store, self.args.stream, head, on_durable=core.on_durable, on_failed=core.on_journal_failed
        )
        try:
            core.start(writer, opening_commands(head, self._root_seed, config))
        except BaseException:
            writer.close()
            raise
        try:
            core.ready.result()
        except BaseException:
            core.stop()
            core.join()
            raise
        self.recovery = folded.recovery
        return core

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Submit a request and stream its output. Leaving the loop before its end aborts the request.

        Args:
            prompt: text, token ids, or messages with `role` and `content`.
            sampling: how tokens are chosen; None for the defaults.
            request_id: 1 to 256 printable characters, never used before; None for one of the engine's making.
            priority: small runs first, under the policy `priority`.
            cache_salt: requests share cached prefixes only with those of the same salt.

        Yields:
            Deltas, indices without gap or repeat; the last one has a `finish_reason`.

        Raises:
            Rejected: the request can't be served; nothing of it reached the journal.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        ask = self._submission(prompt, sampling, request_id, priority, cache_salt)
        finished = False
        try:
            output = await self._accepted(ask)
            async with contextlib.aclosing(self._follow(output, 0)) as deltas:
                async for delta in deltas:
                    finished = delta.finish_reason is not None
                    yield delta
        finally:
            if not finished:
                self._abort_quietly(ask)

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Submit a request and let go of it; returns its id once it is in the journal. Arguments as for `generate`."""
        ask = self._submission(prompt, sampling, request_id, priority, cache_salt)
        return (await self._accepted(ask)).request_id

    def enqueue(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """`submit`, for threads without an event loop."""
        ask = self._submission(prompt, sampling, request_id, priority, cache_salt)
        return _known(self._live().ask(ask).result()).request_id

    async def resume(self, request_id: str, after: int = -1) -> AsyncGenerator[Delta, None]:
        """Attach to a request that was submitted before, in this life of the engine or an earlier one.

        Leaving the loop doesn't abort the request.

        Args:
            request_id: whose.
            after: the last output index that the client has; -1 for none. Text goes on exactly there.

        Raises:
            NotFound: the journal has no such request.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        check_text("request_id", request_id, MAX_REQUEST_ID_CHARS)
        if type(after) is not int or not -1 <= after < 2**31:
            raise Rejected(f"after is {short(after)}: give the last index seen, or -1")
        output = self._live().delivery.find(request_id)
        if output is None:
            output = await asyncio.to_thread(self._find, request_id)
        async with contextlib.aclosing(self._follow(output, after + 1)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str) -> None:
        """End a request with reason `abort`. Doesn't wait; of an id that is not live, nothing happens."""
        check_text("request_id", request_id, MAX_REQUEST_ID_CHARS)
        self._live().ask(Ask(lambda _: AbortRequest(request_id=request_id)))

    def unfinished(self) -> list[str]:
        """The ids of requests that have not ended, in order of admission."""
        return self._live().delivery.unfinished()

    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        request_ids: Sequence[str | None] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        on_delta: OnDelta | None = None,
    ) -> list[Completion]:
        """Serve prompts to their end and return their completions, in order. Blocking; needs no event loop.

        Args:
            prompts: each as for `generate`.
            sampling: one for all, or one for each.
            request_ids: one for each, or None.
            priority: of all.
            cache_salt: of all.
            on_delta: called in this thread with every delta as it comes, of whichever request.

        Raises:
            Rejected: a request can't be served. As after any exception, the others of this call are aborted.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        samplings = _one_each("sampling", sampling, len(prompts))
        ids = _one_each("request_ids", request_ids, len(prompts))
        core = self._live()
        asks: list[Ask] = []
        try:
            for prompt, each, request_id in zip(prompts, samplings, ids, strict=True):
                asks.append(self._submission(prompt, each, request_id, priority, cache_salt))
                core.ask(asks[-1])
            return self._wait([_known(ask.reply.result()) for ask in asks], on_delta)
        except BaseException:
            for ask in asks:
                self._abort_quietly(ask)
            raise

    def wait(self, request_ids: Sequence[str] | None = None, on_delta: OnDelta | None = None) -> list[Completion]:
        """Wait for requests that were submitted before, and return their completions. Blocking; aborts nothing.

        Args:
            request_ids: whose; None for all that have not ended yet.
            on_delta: called in this thread with every delta, from the first token on.

        Raises:
            NotFound: the journal has no such request.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        core = self._live()
        ids = core.delivery.unfinished() if request_ids is None else list(request_ids)
        outputs = []
        for request_id in ids:
            check_text("request_id", request_id, MAX_REQUEST_ID_CHARS)
            outputs.append(core.delivery.find(request_id) or self._find(request_id))
        return self._wait(outputs, on_delta)

    # -- the engine itself --------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running: bool = False) -> None:
        """Forget every cached block. Blocks for one turn of the engine.

        Args:
            reset_running: preempt what runs first; it is computed again.

        Raises:
            Rejected: something runs, and `reset_running` is False.
        """
        if type(reset_running) is not bool:
            raise Rejected(f"reset_running is {short(reset_running)}: give True or False")
        self._live().ask(Ask(lambda _: ResetCache(reset_running=reset_running))).result()

    def stats(self) -> Stats:
        """The engine at a glance, read while it runs: each number is right, but not all at the same instant."""
        core = self._live()
        state, totals = core.state, core.totals
        return Stats(
            running=len(state.queues.running),
            waiting=len(state.queues.waiting),
            in_flight_steps=len(state.window.in_flight),
            free_blocks=state.pool.num_free,
            num_blocks=state.pool.num_blocks,
            requests=totals.requests,
            finished=dict(totals.finished),
            steps=totals.steps,
            tokens=totals.tokens,
            preemptions=totals.preemptions,
            stale_tokens_delivered=totals.stale_tokens_delivered,
            stale_tokens_dropped=totals.stale_tokens_dropped,
            lost_workers=totals.lost_workers,
            durable_position=core.durable_position,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _live(self) -> EngineCore:
        if self._core is None:
            raise EngineStopped("the engine is not open: use `with Engine(...)`, or open it")
        if self._closed:
            raise EngineStopped("the engine is closed: open the journal again; what was unfinished continues then")
        return self._core

    def _submission(
        self, prompt: Prompt, sampling: SamplingParams | None, request_id: str | None, priority: int, cache_salt: str
    ) -> Ask:
        """The submission as a question to the engine: all that comes from outside is checked here."""
        core, config = self._live(), self.config
        assert config is not None
        if core.cause is not None:
            raise core.cause.with_traceback(None)
        params = check_sampling(sampling)
        identity = (
            uuid.uuid4().hex if request_id is None else check_text("request_id", request_id, MAX_REQUEST_ID_CHARS)
        )
        command = SubmitRequest(
            request_id=identity,
            prompt_token_ids=prompt_token_ids(prompt, self._text, config.vocab_size, config.max_model_len),
            sampling=params.resolve(0, config.vocab_size),
            arrival_ns=time.time_ns(),
            priority=check_priority(priority),
            cache_salt=check_text("cache_salt", cache_salt, MAX_SALT_CHARS),
        )

        def make(state: State) -> SubmitRequest:
            if params.seed is not None:
                return command
            seed = _drawn_seed(self._root_seed, state.requests.next_handle)
            return SubmitRequest(
                request_id=identity,
                prompt_token_ids=command.prompt_token_ids,
                sampling=params.resolve(seed, config.vocab_size),
                arrival_ns=command.arrival_ns,
                priority=command.priority,
                cache_salt=command.cache_salt,
            )

        return Ask(make, identity)

    async def _accepted(self, ask: Ask) -> Output:
        """Wait for the reply to a submission. A client that is cancelled meanwhile doesn't take the reply with it."""
        return _known(await asyncio.shield(asyncio.wrap_future(self._live().ask(ask))))

    async def _follow(self, output: Output, cursor: int) -> AsyncGenerator[Delta, None]:
        delivery = self._live().delivery
        bell, rung = bell_of_running_loop(), asyncio.Event()
        transcript = Transcript(delivery, output, self._text_or_none())
        reader = delivery.attach(output, cursor, lambda _: bell.ring(rung))
        try:
            while True:
                await rung.wait()
                rung.clear()
                chunk = delivery.take(reader)
                if chunk is None:
                    continue
                yield transcript.add(chunk)
                if chunk.finish_reason is not None:
                    return
        finally:
            delivery.detach(reader)

    def _wait(self, outputs: list[Output], on_delta: OnDelta | None) -> list[Completion]:
        delivery, text = self._live().delivery, self._text_or_none()
        rung: queue.SimpleQueue[Reader] = queue.SimpleQueue()
        transcripts = [Transcript(delivery, output, text) for output in outputs]
        deltas: list[list[Delta]] = [[] for _ in outputs]
        readers = {delivery.attach(output, 0, rung.put): index for index, output in enumerate(outputs)}
        unfinished = set(readers)
        try:
            while unfinished:
                reader = rung.get()
                chunk = delivery.take(reader) if reader in unfinished else None
                if chunk is None:
                    continue
                index = readers[reader]
                deltas[index].append(transcripts[index].add(chunk))
                if chunk.finish_reason is not None:
                    unfinished.discard(reader)
                if on_delta is not None:
                    on_delta(deltas[index][-1])
        finally:
            for reader in readers:
                delivery.detach(reader)
        return [transcript.completion(each) for transcript, each in zip(transcripts, deltas, strict=True)]

    def _find(self, request_id: str) -> Output:
        """A request that the outbox doesn't have, from the journal. Reads all of it."""
        core, store = self._live(), self._store
        assert store is not None
        found = find_output(store, self.args.stream, request_id, core.durable_position)
        return found if found.finish_reason is not None else _known(core.delivery.find(request_id))

    def _text_or_none(self) -> Text | None:
        return None if isinstance(self._text, Rejected) else self._text

    def _abort_quietly(self, ask: Ask) -> None:
        """Abort a submission whose client is gone, now or as soon as it is accepted."""
        request_id = ask.request_id
        assert request_id is not None
        order = Ask(lambda _: AbortRequest(request_id=request_id))

        def abort(reply: "Future[Output | None]") -> None:
            # Never before the reply: refused for its id, it would abort the request that has the id.
            if reply.exception() is None and self._core is not None:
                with contextlib.suppress(RefoldError):
                    self._core.ask(order)

        ask.reply.add_done_callback(abort)


def _open_store(url: str) -> JournalStore:
    ensure(url)
    return open_store(url)


def _known(output: Output | None) -> Output:
    assert output is not None, "a request that is accepted or unfinished is in the outbox"
    return output


def _drawn_seed(root_seed: int, handle: int) -> int:
    """The seed of a request that brings none: 63 bits, a function of the root seed and the order of submission."""
    digest = hashlib.blake2b(f"refold seed {root_seed} {handle}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _one_each(what: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise Rejected(f"{what} has {len(given)} values for {count} prompts: give one for each")
    return list(given)
