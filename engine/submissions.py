"""From what a client wrote to a question for the engine: all that comes from outside is checked here, before it is asked.

Identity, arrival time and seed are drawn here too. The seed of a request that brings none is a function of the engine's root
seed and the request's handle, so that one root seed and one order of submission always give the same tokens.

A request with several completions is as many requests, `ID#0` and so on. So that `ID` always means one thing, a name and the names
of its completions exclude each other, and no client gives a name that looks like a completion's.
"""

import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from refold.engine.checked import short
from refold.engine.messages import Ask
from refold.engine.models import Text
from refold.engine.prompts import (
    Extension,
    Prompt,
    check_priority,
    check_room,
    check_sampling,
    check_text,
    extension_token_ids,
    prompt_token_ids,
)
from refold.engine.sampling_params import SamplingParams
from refold.gpu.noise import child_seed
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Sampling
from refold.projections.requests import Request
from refold.scheduler.admission import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_SALT_CHARS
from refold.scheduler.commands import AbortRequest, Command, ExtendSession, SubmitRequest
from refold.scheduler.state import State

_LIKE_A_CHOICE = re.compile(r"#[0-9]+\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where submissions are made. `text` is the model's tokenizer, or why there is none."""

    config: EngineConfig
    text: Text | Rejected
    root_seed: int = field(default_factory=lambda: secrets.randbits(63))

    @property
    def text_or_none(self) -> Text | None:
        """The tokenizer, for output that can do without."""
        return None if isinstance(self.text, Rejected) else self.text

    def submission(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        resumable: bool = False,
        is_patient: bool = False,
    ) -> Ask:
        """The question that submits a request with one completion.

        Raises:
            Rejected: something in it can't be; names it, its value and the remedy.
        """
        params = check_sampling(sampling)
        if params.n > 1:
            raise Rejected(f"n is {params.n}: one completion is all that can be had here; leave it out")
        (ask,) = self.choices(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            resumable=resumable,
            is_patient=is_patient,
        )
        return ask

    def choices(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        resumable: bool = False,
        is_patient: bool = False,
        journaled: frozenset[str] = frozenset(),
    ) -> list[Ask]:
        """The questions that submit a request with as many completions as its `n` says: one, or one for each.

        Those that are `journaled` already are left out; the name of such a request isn't new, and passes whatever it looks like.

        Raises:
            Rejected: as for `submission`.
        """
        params = check_sampling(sampling)
        command = self._command(
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            resumable=resumable,
            is_new=not journaled,
        )
        has_seed = params.seed is not None
        commands = [command] if params.n == 1 else [choice_of(command, number) for number in range(params.n)]
        asks = [
            self._ask(each, has_seed=has_seed, is_patient=is_patient)
            for each in commands
            if each.request_id not in journaled
        ]
        return all_or_none(asks, command.request_id, journaled)

    def _ask(self, command: SubmitRequest, *, has_seed: bool, is_patient: bool) -> Ask:
        make = (lambda _: command) if has_seed else (lambda state: self._seeded(command, state))
        return Ask(make, command.request_id, is_patient=is_patient)

    def _command(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: int,
        cache_salt: str,
        tenant: str,
        resumable: bool,
        is_new: bool,
    ) -> SubmitRequest:
        config = self.config
        check_id = check_new_id if is_new else check_request_id
        token_ids = prompt_token_ids(prompt, self.text, config.vocab_size, config.max_model_len)
        check_room(params, len(token_ids), config.max_model_len)
        return SubmitRequest(
            request_id=uuid.uuid4().hex if request_id is None else check_id(request_id),
            prompt_token_ids=token_ids,
            sampling=params.resolve(0, config.vocab_size),
            arrival_ns=time.time_ns(),
            priority=check_priority(priority),
            cache_salt=check_text("cache_salt", cache_salt, MAX_SALT_CHARS),
            tenant=check_line("tenant", tenant, MAX_NAME_CHARS),
            resumable=resumable,
        )

    def extension(self, request_id: str, prompt: Extension, sampling: SamplingParams | None) -> Ask:
        """The question that extends a session. What `sampling` leaves open stays as it was in the turn before.

        Raises:
            Rejected: as for `submission`.
        """
        params = None if sampling is None else check_sampling(sampling)
        if params is not None and params.n > 1:
            raise Rejected(f"n is {params.n}: a session has one completion a turn; leave it out")
        token_ids = extension_token_ids(prompt, self.text, self.config.vocab_size, self.config.max_model_len)
        if params is not None:  # how long the context is by then, nobody knows yet: only what can never fit is refused
            check_room(params, 1, self.config.max_model_len)
        given = None if params is None else params.resolve(0, self.config.vocab_size)
        keeps_seed = params is not None and params.seed is None

        def make(state: State) -> ExtendSession:
            before = _last_sampling(state.requests.find_live(request_id))
            chosen = given or before
            if keeps_seed:
                chosen = msgspec.structs.replace(chosen, seed=before.seed)
            return ExtendSession(request_id=request_id, token_ids=token_ids, sampling=chosen)

        return Ask(make)

    def _seeded(self, command: SubmitRequest, state: State) -> SubmitRequest:
        seed = drawn_seed(self.root_seed, state.requests.next_handle)
        return msgspec.structs.replace(command, sampling=msgspec.structs.replace(command.sampling, seed=seed))


def choice_of(command: SubmitRequest, number: int) -> SubmitRequest:
    """One of the completions of a request: a request of its own, with a name and a seed that follow from the other's."""
    sampling = msgspec.structs.replace(command.sampling, seed=child_seed(command.sampling.seed, number))
    name = choice_id(command.request_id, number)
    if len(name) > MAX_REQUEST_ID_CHARS:
        raise Rejected(
            f"request_id has {len(command.request_id)} characters: with n more than 1, give at most {MAX_REQUEST_ID_CHARS - 3}"
        )
    return msgspec.structs.replace(command, request_id=name, sampling=sampling)


def choice_id(request_id: str, number: int) -> str:
    """What completion number `number` of a request is called."""
    return f"{request_id}#{number}"


def all_or_none(asks: Sequence[Ask], request_id: str, journaled: frozenset[str] = frozenset()) -> list[Ask]:
    """The same questions, as one: the first is refused if any name of theirs is taken, and the others if the first was.

    Nobody else can take a name in between: whoever has a request's first completion keeps all others from its names.
    """
    if not asks:
        return []
    first, names = asks[0], {request_id, choice_id(request_id, 0), *(ask.request_id for ask in asks)} - journaled

    def make_first(state: State) -> Command:
        for name in sorted(filter(None, names)):
            if name in state.requests.handle_by_id:
                raise Rejected(
                    f"request id {request_id!r} is taken: the journal has {name!r}; resume it, or submit under another id"
                )
        return first.make(state)

    return [replace(first, make=make_first), *(replace(ask, make=_made_after(first, ask.make)) for ask in asks[1:])]


def _made_after(first: Ask, make: Callable[[State], Command]) -> Callable[[State], Command]:
    """`make`, for a question that is refused if the `first` was."""

    def make_if_first_passed(state: State) -> Command:
        if first.reply.done() and (refused := first.reply.exception()) is not None:
            raise refused.with_traceback(None)
        return make(state)

    return make_if_first_passed


def check_new_id(request_id: object) -> str:
    """Return `request_id` if a new request can have it; raises Rejected otherwise. Journals may have others, of older clients."""
    checked = check_request_id(request_id)
    if looks_like_choice(checked):
        raise Rejected(
            f"request_id is {short(checked)}: # and a number at the end tell the completions of one request apart; give a name "
            "that ends otherwise"
        )
    return checked


def looks_like_choice(request_id: str) -> bool:
    """Whether an id could be the name of one of the completions of a request."""
    return _LIKE_A_CHOICE.search(request_id) is not None


def check_request_id(request_id: object) -> str:
    """Return `request_id` if it can be one; raises Rejected otherwise. Whether it's taken or known is not asked here."""
    checked = check_text("request_id", request_id, MAX_REQUEST_ID_CHARS)
    if not checked or not checked.isprintable():
        raise Rejected(f"request_id is {checked!a}: give 1 to {MAX_REQUEST_ID_CHARS} printable characters")
    return checked


def check_line(name: str, value: object, max_chars: int) -> str:
    """Return `value` if it is a text of printable characters; raises Rejected, with its name, otherwise."""
    checked = check_text(name, value, max_chars)
    if not checked.isprintable():
        raise Rejected(f"{name} is {checked[:80]!a}: give at most {max_chars} printable characters")
    return checked


def _last_sampling(session: Request | None) -> Sampling:
    """The parameters of a session's last turn, one that is queued included. Any for one that isn't live: it is refused."""
    if session is None:
        return Sampling(seed=0, max_tokens=1)
    return session.chunks[-1].sampling if session.chunks else session.sampling


def abort_of(request_id: str) -> Ask:
    """The question that aborts a request."""
    return Ask(lambda _: AbortRequest(request_id=request_id))


def drawn_seed(root_seed: int, handle: int) -> int:
    """63 bits, a function of the root seed and the handle."""
    digest = hashlib.blake2b(f"refold seed {root_seed} {handle}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def one_each(what: str, given: Any, prompts: Sequence[object]) -> list[Any]:
    """A value for each prompt: those given, or the one given for all.

    Raises:
        Rejected: there are not as many as prompts.
    """
    if not isinstance(given, list | tuple):
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise Rejected(f"{what} has {len(given)} values for {len(prompts)} prompts: give one for each")
    return list(given)


def check_list(what: str, given: Any) -> Any:
    """A list or a tuple, or Rejected: a text is a sequence too, of letters."""
    if isinstance(given, str | bytes):
        raise Rejected(
            f"{what} is the text {short(given)}: give a list of {what.replace('_', ' ')}, such as [{short(given)}]"
        )
    if not isinstance(given, Sequence):
        raise Rejected(f"{what} is {short(given)}: give a list of {what.replace('_', ' ')}")
    return given


def check_names(request_ids: Any) -> None:
    """Ids for several prompts, or None. What is wrong with one alone is found where it is used."""
    if request_ids is None:
        return
    if isinstance(request_ids, str | bytes):
        raise Rejected(f"request_ids is the text {short(request_ids)}: give one for each prompt, in a list, or None")
    names = [name for name in check_list("request_ids", request_ids) if isinstance(name, str)]
    if len(names) != len(set(names)):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise Rejected(f"request id {short(twice)} is given twice: give each prompt its own")


def check_callable(on_delta: Any) -> None:
    """What is to be called with every delta, or None."""
    if on_delta is not None and not callable(on_delta):
        raise Rejected(f"on_delta is {short(on_delta)}: give something to call, or None")
