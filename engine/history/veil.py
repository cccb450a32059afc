"""The veil: what a capsule has in the place of tokens, names, times and words.

Equal stays equal and different stays different, so that every decision comes out as it was; what was said is gone.
"""

from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Any

import msgspec

from refold.journal.content import is_placeholder
from refold.journal.errors import JournalError
from refold.journal.events import (
    ContentRedacted,
    EngineClosed,
    EngineConfig,
    EngineOpened,
    Event,
    LogitsRecorded,
    LogprobsDelivered,
    Media,
    PromptLogprobsDelivered,
    RequestAborted,
    RequestFinished,
    RequestQuarantined,
    RequestSubmitted,
    Sampling,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.journal.surprisals import blank

MAX_VOCABULARY = 1 << 23
_FIRST_NS = 946_684_800_000_000_000


class Veil:
    """What is put in the place of each token, name and time: always the same for the same."""

    def __init__(self) -> None:
        self._shift_ns: int | None = None
        self._tokens: dict[int, int] = {}
        self._unused: list[int] = []
        self._names: dict[tuple[str, str], str] = {}
        self._random = SystemRandom()
        self._found_out: set[int] = set()
        self._rules: dict[type[Event], Callable[[Any], Event]] = {
            EngineOpened: self._opened,
            EngineClosed: lambda e: msgspec.structs.replace(e, reason="dropped"),
            WorkerStarted: lambda e: msgspec.structs.replace(e, environment={}, kind=self.name("worker", e.kind)),
            WorkerLost: lambda e: msgspec.structs.replace(e, reason="dropped"),
            RequestSubmitted: self._submitted,
            RequestAborted: lambda e: msgspec.structs.replace(e, cause="dropped"),
            RequestFinished: self._finished,
            StepScheduled: self._scheduled,
            LogprobsDelivered: self._logprobs,
            PromptLogprobsDelivered: self._prompt_logprobs,
            LogitsRecorded: lambda e: msgspec.structs.replace(e, digests=[0] * len(e.digests)),
            RequestQuarantined: self._quarantined,
            ContentRedacted: lambda e: msgspec.structs.replace(e, positions=[], content_hashes=[], reason="dropped"),
        }

    def event(self, event: Event) -> Event:
        """The event behind the veil."""
        rule = self._rules.get(type(event))
        changes: dict[str, Any] = {}
        if rule is not None:
            event = rule(event)
        if hasattr(event, "token_ids"):
            changes["token_ids"] = self.tokens(event.token_ids)
        if getattr(event, "stop_token_id", None) is not None:
            changes["stop_token_id"] = self.token(event.stop_token_id)  # type: ignore[attr-defined]
        if isinstance(getattr(event, "sampling", None), Sampling):
            changes["sampling"] = self._sampling(event.sampling, getattr(event, "handle", 0))  # type: ignore[attr-defined]
        if hasattr(event, "time_ns") and event.time_ns:
            changes["time_ns"] = self.time(event.time_ns)
        return msgspec.structs.replace(event, **changes) if changes else event

    def time(self, time_ns: int) -> int:
        """A time that is as far from the first one as it was."""
        if self._shift_ns is None:
            self._shift_ns = _FIRST_NS - time_ns
        return time_ns + self._shift_ns

    def token(self, token_id: int) -> int:
        """The token in its place; a placeholder stays, and so does what no vocabulary has."""
        if is_placeholder(token_id):
            return token_id
        known = self._tokens.get(token_id)
        if known is None:
            if not self._unused or token_id >= self._vocab_size:
                return token_id
            known = self._tokens[token_id] = self._unused.pop()
        return known

    def tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Many of them."""
        return [self.token(token_id) for token_id in token_ids]

    def name(self, kind: str, text: str) -> str:
        """A name in its place: the kind and a number. Nothing stays nothing."""
        if not text:
            return text
        known = self._names.get((kind, text))
        if known is None:
            number = sum(1 for each, _ in self._names if each == kind) if len(self._names) < 64 else len(self._names)
            known = self._names[kind, text] = f"{kind}-{number}"
        return known

    _vocab_size = 0

    def _opened(self, event: EngineOpened) -> Event:
        config = event.config
        if config.vocab_size > self._vocab_size:
            if config.vocab_size > MAX_VOCABULARY:
                raise JournalError(
                    f"a vocabulary of {config.vocab_size:,} tokens: a capsule hides at most {MAX_VOCABULARY:,}"
                )
            fresh = list(range(self._vocab_size, config.vocab_size))
            self._random.shuffle(fresh)
            self._unused += fresh
            self._random.shuffle(self._unused)
            self._vocab_size = config.vocab_size
        veiled: EngineConfig = msgspec.structs.replace(
            config,
            model=self.name("model", config.model),
            model_fingerprint=self.name("fingerprint", config.model_fingerprint),
            eos_token_ids=tuple(self.tokens(config.eos_token_ids)),
            tenant_weights={self.name("tenant", name): weight for name, weight in config.tenant_weights.items()},
        )
        return msgspec.structs.replace(event, config=veiled, root_seed=0, stream="")

    def _submitted(self, event: RequestSubmitted) -> Event:
        return msgspec.structs.replace(
            event,
            request_id=f"req-{event.handle}",
            prompt_token_ids=self.tokens(event.prompt_token_ids),
            arrival_ns=self.time(event.arrival_ns) if event.arrival_ns > _FIRST_NS else event.arrival_ns,
            cache_salt=self.name("salt", event.cache_salt),
            tenant=self.name("tenant", event.tenant),
            adapter=self.name("adapter", event.adapter),
            grammar=self.name("grammar", event.grammar),
            media=[self._media(media) for media in event.media],
        )

    def _media(self, media: Media) -> Media:
        return msgspec.structs.replace(media, digest=self.name("media", media.digest))

    def _sampling(self, sampling: Sampling, handle: int) -> Sampling:
        stops = tuple(self.tokens(sampling.stop_token_ids))
        biases = tuple(sorted((self.token(token_id), bias) for token_id, bias in sampling.logit_bias))
        return msgspec.structs.replace(sampling, seed=handle, stop_token_ids=stops, logit_bias=biases)

    def _logprobs(self, event: LogprobsDelivered) -> Event:
        hidden = [
            number for count, top in zip(event.counts, event.num_top, strict=True) for number in blank(count, top)
        ]
        return msgspec.structs.replace(event, surprisals=hidden if event.surprisals else [])

    def _prompt_logprobs(self, event: PromptLogprobsDelivered) -> Event:
        return msgspec.structs.replace(event, surprisals=blank(event.count, event.num_top) if event.surprisals else [])

    def _quarantined(self, event: RequestQuarantined) -> Event:
        """What ends it is a decision's message, not a caller's. Its digest is the capsule's to tell."""
        self._found_out.add(event.handle)
        return event

    def _finished(self, event: RequestFinished) -> Event:
        """Messages that decisions make are kept, with their names veiled; a caller's is dropped."""
        if event.reason == "capacity" or not event.message or event.handle in self._found_out:
            return event
        for (kind, text), name in self._names.items():
            if kind == "grammar" and event.message == f"the grammar {text!r} refuses the last token":
                return msgspec.structs.replace(event, message=f"the grammar {name!r} refuses the last token")
        return msgspec.structs.replace(event, message="dropped")

    def _scheduled(self, event: StepScheduled) -> Event:
        if not (event.drafts or event.encoder_evictions):
            return event
        drafts = [msgspec.structs.replace(each, token_ids=self.tokens(each.token_ids)) for each in event.drafts]
        gone = [self.name("media", each) for each in event.encoder_evictions]
        return msgspec.structs.replace(event, drafts=drafts, encoder_evictions=gone)
