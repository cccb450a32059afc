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

import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Unpack, get_args

from refold.engine.asking import abort_when_accepted, accepted, found, is_live, known
from refold.engine.checked import short
from refold.engine.choices import (
    abort_all,
    all_accepted,
    all_enqueued,
    grouped,
    name_of,
    names_under,
    outputs_of,
)
from refold.engine.life import Life
from refold.engine.lifecycle import Lifecycle
from refold.engine.messages import Ask, EngineStopped
from refold.engine.opening import Recovery
from refold.engine.prompts import Prompt
from refold.engine.quarantine import lift_live, quarantined_live
from refold.engine.redacting import Redaction, redact_live
from refold.engine.request_options import RequestOptions, given_to
from refold.engine.sampling_params import SamplingParams
from refold.engine.session import Session
from refold.engine.stats import Stats, snapshot
from refold.engine.streams import Completion, Delta, OnDelta, complete, follow, follow_choices
from refold.engine.submissions import (
    abort_of,
    check_callable,
    check_list,
    check_names,
    check_request_id,
    choice_id,
    one_each,
)
from refold.journal.errors import Rejected
from refold.journal.events import PauseMode
from refold.projections.outbox import Output
from refold.scheduler.commands import PauseEngine, ResetCache, ResumeEngine, SubmitRequest
from refold.scheduler.stall import StallReport, stall_report

__all__ = ["Completion", "Delta", "Engine", "EngineStopped", "Recovery", "Session", "StallReport", "Stats"]


class Engine(Lifecycle):
    """An engine on one stream of one journal. Use it as a context manager, or `open` and `close` it."""

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Submit a request and stream its output. Leaving the loop before its end aborts the request.

        With `n` completions the deltas of all of them come as they are made, each with its `choice` and as a request of its own,
        `ID#0` and so on.

        Args:
            prompt: text, token ids, or messages with `role` and `content`.
            sampling: how tokens are chosen; None for the defaults.
            request_id: 1 to 256 printable characters, not `#` and a number at the end, never used before; None for one of the
                engine's making.
            priority: small runs first, under the policy `priority`.
            cache_salt: requests share cached prefixes only with those of the same salt.
            tenant: whose share it counts against, under the policy `fair_share`.

        Yields:
            Deltas, indices without gap or repeat; the last one has a `finish_reason`, that of each completion.

        Raises:
            Rejected: the request can't be served; nothing of it reached the journal.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        life = self._live()
        asks = life.desk.choices(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            is_patient=True,
        )
        left = len(asks)
        try:
            outputs = await all_accepted(life, asks)
            stream = follow_choices(life.core.delivery, outputs, life.desk.text_or_none)
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    left -= delta.finish_reason is not None
                    yield delta
        finally:
            if left:
                abort_all(life, asks)

    def check(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> None:
        """Refuse what a submission would be refused for, and do nothing else; also before `open`. Arguments as for `generate`.

        What only the journal knows is not asked: whether the id is taken; see `knows`.

        Raises:
            Rejected: the request, or the model, can't be served.
        """
        would_submit(self, prompt, sampling, **given_to("check", options))

    def knows(self, request_id: str) -> bool:
        """Whether the journal has a request of this name, finished or not, so that one can `resume` it; else the name is free."""
        names = {check_request_id(request_id), choice_id(request_id, 0)}
        return self._live().core.look(lambda state: not names.isdisjoint(state.requests.handle_by_id)).result()

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Submit a request and let go of it; returns its id once it is in the journal. Arguments as for `generate`."""
        life = self._live()
        asks = life.desk.choices(prompt, sampling, **given_to("submit", options))
        await all_accepted(life, asks)
        return name_of(asks)

    def enqueue(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """`submit`, for threads without an event loop."""
        life = self._live()
        asks = life.desk.choices(prompt, sampling, **given_to("enqueue", options))
        all_enqueued(life, asks)
        return name_of(asks)

    def choices(self, request_id: str) -> list[str]:
        """The ids of a request's completions: its own, or those of each where it has `n`.

        Raises:
            NotFound: the journal has no such request.
            Rejected: it was redacted.
        """
        return [output.request_id for output in outputs_of(self._live(), check_request_id(request_id))]

    async def resume(self, request_id: str, after: int = -1) -> AsyncGenerator[Delta, None]:
        """Attach to a request that was submitted before, in this life of the engine or an earlier one.

        Leaving the loop doesn't abort the request.

        Args:
            request_id: whose.
            after: the last output index that the client has; -1 for none. Text goes on exactly there.

        Raises:
            NotFound: the journal has no such request.
            Rejected: it was redacted, or has no output at `after`.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        life = self._live()
        output = await found(life, request_id, after)
        stream = follow(life.core.delivery, output, after + 1, life.desk.text_or_none)
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    async def open_session(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Session:
        """Submit a request whose input comes in turns; `prompt` is the first one's. Arguments and errors as for `generate`.

        Returns once it is in the journal. A session lives until it is closed, aborted or idle for `session_idle_s`.
        """
        life = self._live()
        ask = life.desk.submission(prompt, sampling, resumable=True, **given_to("open_session", options))
        try:
            return Session(life, await accepted(life.core, ask), 0)
        except BaseException:
            abort_when_accepted(life.core, ask)
            raise

    async def attach_session(self, request_id: str, after: int = -1) -> Session:
        """A session that was opened before, in this life of the engine or an earlier one. Arguments as for `resume`.

        Raises:
            NotFound: the journal has no such request.
            Rejected: the request is no session.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        life = self._live()
        output = await found(life, request_id, after)
        if not output.is_session:
            raise Rejected(f"request {request_id!r} is no session: resume it")
        return Session(life, output, after + 1)

    def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`, with all its completions. Doesn't wait.

        Returns:
            Whether there is a live request with this id. False if it has ended or never was: then nothing happens.
        """
        life = self._live()
        ids = names_under(life, check_request_id(request_id))
        was_live = any(is_live(life, each) for each in ids)
        for each in ids:
            life.core.ask(abort_of(each))
        return was_live

    def redact(self, request_id: str, reason: str = "") -> Redaction:
        """Erase what a finished request said and was told, from the journal and from the engine. Blocking; reads the journal.

        All else stays provable: the hash chain, the schedule, the counters. The prefix cache is forgotten. `reason` (who asked,
        and why) is recorded.

        Raises:
            NotFound: the journal has no such request.
            Rejected: it isn't over, nothing is left of it, or the journal's store can't erase.
        """
        return redact_live(self._live(), request_id, reason, self.args.journal)

    def unfinished(self, *, sessions: bool = False) -> list[str]:
        """The ids of requests that have not ended, in order of admission; with `sessions`, of the sessions instead."""
        return self._live().core.delivery.unfinished(sessions=sessions)

    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        request_ids: Sequence[str | None] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        on_delta: OnDelta | None = None,
    ) -> list[Completion]:
        """Serve prompts to their end and return their completions, in order. Blocking; needs no event loop.

        Where `n` completions are asked for, the prompt's completion is the first, and has all of them as its `choices`.

        Args:
            prompts: each as for `generate`.
            sampling: one for all, or one for each.
            request_ids: one for each, or None.
            priority: of all.
            cache_salt: of all.
            tenant: of all.
            on_delta: called in this thread with every delta as it comes, of whichever request.

        Raises:
            Rejected: a request can't be served. As after any exception, the others of this call are aborted.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        check_list("prompts", prompts)
        check_names(request_ids)
        check_callable(on_delta)
        life = self._live()
        columns = (prompts, one_each("sampling", sampling, prompts), one_each("request_ids", request_ids, prompts))
        submit = partial(life.desk.choices, priority=priority, cache_salt=cache_salt, tenant=tenant)
        groups = [submit(prompt, params, request_id=name) for prompt, params, name in zip(*columns, strict=True)]
        asks = [ask for group in groups for ask in group]
        try:
            for ask in asks:
                life.core.ask(ask)
            outputs = [known(ask.reply.result()) for ask in asks]
            return self._completed(life, outputs, [len(group) for group in groups], on_delta)
        except BaseException:
            abort_all(life, asks)
            raise

    @staticmethod
    def _completed(
        life: Life, outputs: Sequence[Output], sizes: Sequence[int], on_delta: OnDelta | None
    ) -> list[Completion]:
        numbers = [number for size in sizes for number in range(size)]
        return grouped(complete(life.core.delivery, outputs, life.desk.text_or_none, on_delta, numbers), sizes)

    def wait(self, request_ids: Sequence[str] | None = None, on_delta: OnDelta | None = None) -> list[Completion]:
        """Wait for requests that were submitted before, and return their completions. Blocking; aborts nothing.

        Args:
            request_ids: whose; None for all that have not ended yet, without sessions: those end when they are closed.
            on_delta: called in this thread with every delta, from the first token on.

        Raises:
            NotFound: the journal has no such request.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        check_callable(on_delta)
        life = self._live()
        ids = self.unfinished() if request_ids is None else check_list("request_ids", request_ids)
        groups = [outputs_of(life, check_request_id(request_id)) for request_id in ids]
        outputs = [output for group in groups for output in group]
        return self._completed(life, outputs, [len(group) for group in groups], on_delta)

    # -- the engine itself --------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running: bool = False) -> None:
        """Forget every cached block. Blocks until this is in the journal.

        Args:
            reset_running: preempt what runs first; it is computed again.

        Raises:
            Rejected: something runs, and `reset_running` is False.
        """
        if type(reset_running) is not bool:
            raise Rejected(f"reset_running is {short(reset_running)}: give True or False")
        self._live().core.ask(Ask(lambda _: ResetCache(reset_running=reset_running))).result()

    def pause(self, mode: PauseMode = "all") -> None:
        """Hold scheduling back until `unpause`, or until the engine closes. Blocks until this is in the journal.

        Args:
            mode: `all`, no step at all; `new`, nobody starts who has not run yet; `drain`, as `new`, and submissions are
                rejected. Steps in flight come back and are delivered.
        """
        if mode not in get_args(PauseMode):
            raise Rejected(f"mode is {short(mode)}: give 'all', 'new' or 'drain'")
        self._live().core.ask(Ask(lambda _: PauseEngine(mode=mode))).result()

    def unpause(self) -> None:
        """Let scheduling go on. Blocks until this is in the journal; when nothing is paused, nothing happens."""
        self._live().core.ask(Ask(lambda _: ResumeEngine())).result()

    def quarantined(self) -> list[str]:
        """The ids of requests that killed workers, so that their content is rejected when it is submitted again."""
        return [request_id for each in quarantined_live(self._live()) for request_id in each.request_ids]

    def lift_quarantine(self, request_id: str) -> None:
        """Let the content of a quarantined request be computed again. Blocks until this is in the journal.

        Where several requests were found out with one content, such as the `n` completions of a prompt, any of them will do.

        Raises:
            Rejected: nothing that it asked for is quarantined.
        """
        lift_live(self._live(), request_id)

    def stall_report(self) -> StallReport:
        """Who can't be scheduled now and what each waits for, how many blocks are free, and who holds the rest. Printable."""
        return self._live().core.look(stall_report).result()

    def stats(self) -> Stats:
        """The engine at a glance, read while it runs."""
        return snapshot(self._live().core)


def would_submit(
    engine: Engine, prompt: Prompt, sampling: SamplingParams | None, **options: Unpack[RequestOptions]
) -> list[SubmitRequest]:
    """What a submission would be, one for each completion; nothing is submitted. A seed that isn't given is any. Raises as `check`."""
    return engine._ready_to_begin().rehearse(prompt, sampling, **options)  # noqa: SLF001 - of this module's own class


def enqueue_rest(
    engine: Engine,
    prompt: Prompt,
    sampling: SamplingParams | None,
    journaled: frozenset[str],
    **options: Unpack[RequestOptions],
) -> None:
    """Submit the completions of a request that the journal doesn't have yet, where it has some. Raises as `Engine.enqueue`."""
    life = engine._live()  # noqa: SLF001 - of this module's own class
    all_enqueued(life, life.desk.choices(prompt, sampling, journaled=journaled, **options))
