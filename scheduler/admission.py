"""Admission: what comes in, and what is refused at the door.

A request that can never fit is refused here, with the numbers, rather than queued for ever: the pool must be able to hold
it alone. What was admitted once is never refused later, except by a new configuration (`capacity`).
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Event, RequestSubmitted, Sampling
from refold.scheduler.commands import SubmitRequest
from refold.scheduler.state import State
from refold.scheduler.trials import content_digest

MAX_REQUEST_ID_CHARS = 256
MAX_SALT_CHARS = 256
MAX_NAME_CHARS = 256
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20


def submit_request(state: State, command: SubmitRequest) -> list[Event]:
    """Admit a request to the queue."""
    if not state.is_open:
        raise Rejected(f"request {command.request_id!r}: the engine is closed; open it first")
    if state.paused == "drain":
        raise Rejected(
            f"request {command.request_id!r}: the engine is draining; send it to another, or wait for it to resume"
        )
    _check_identity(state, command)
    _check_prompt(command, state.config)
    _check_media(command, state.config, _sizes_in_use(state) if command.media else {})
    check_sampling(command.request_id, command.sampling, state.config, resumable=command.resumable)
    _check_fits(command, state.config)
    if state.suspicion.quarantined:
        _check_quarantine(state, command)
    return [
        RequestSubmitted(
            handle=state.requests.next_handle,
            request_id=command.request_id,
            prompt_token_ids=command.prompt_token_ids,
            sampling=command.sampling,
            arrival_ns=command.arrival_ns,
            priority=command.priority,
            cache_salt=command.cache_salt,
            tenant=command.tenant,
            adapter=command.adapter,
            media=command.media,
            resumable=command.resumable,
            grammar=command.grammar,
        )
    ]


def _check_quarantine(state: State, command: SubmitRequest) -> None:
    digest = content_digest(command.prompt_token_ids, command.adapter, command.media)
    if digest in state.suspicion.quarantined:
        culprit = state.suspicion.quarantined[digest][1]
        raise Rejected(
            f"request {command.request_id!r} asks for what {culprit!r} asked for, which killed its workers: that is "
            "quarantined; lift the quarantine once the cause is mended"
        )


def num_blocks_at_most(num_prompt_tokens: int, max_tokens: int, config: EngineConfig) -> int:
    """Blocks that a request can come to need. Its last token is never computed, so it needs no place."""
    longest = min(num_prompt_tokens + max_tokens, config.max_model_len)
    return -(-(longest - 1) // config.block_size)


def _check_identity(state: State, command: SubmitRequest) -> None:
    request_id = command.request_id
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise Rejected(
            f"request id {request_id[:40]!r} ({len(request_id)} characters): give 1 to {MAX_REQUEST_ID_CHARS} printable ones"
        )
    if request_id in state.requests.handle_by_id:
        raise Rejected(f"request id {request_id!r} is taken: resume it, or submit under another id")
    if len(command.cache_salt) > MAX_SALT_CHARS or not _encodable(command.cache_salt):
        raise Rejected(
            f"cache salt of {len(command.cache_salt)} characters: give at most {MAX_SALT_CHARS}, valid Unicode"
        )
    names = [("tenant", command.tenant), ("adapter", command.adapter)]
    for what, name in (*names, *(("media digest", media.digest) for media in command.media)):
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise Rejected(
                f"request {request_id!r}: {what} {name[:40]!r} ({len(name)} characters): give at most {MAX_NAME_CHARS} "
                "printable ones"
            )
    if not _encodable(command.grammar):
        raise Rejected(f"request {request_id!r}: the grammar holds half a surrogate pair: give valid Unicode")
    if not -(2**63) <= command.priority < 2**63:
        raise Rejected(f"priority {command.priority}: give a 64-bit integer; small runs first")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_prompt(command: SubmitRequest, config: EngineConfig) -> None:
    prompt = command.prompt_token_ids
    if not prompt:
        raise Rejected(f"request {command.request_id!r}: the prompt is empty; give at least one token")
    if len(prompt) >= config.max_model_len:
        raise Rejected(
            f"request {command.request_id!r}: the prompt has {len(prompt)} tokens, the model takes {config.max_model_len} "
            f"with at least one of them generated; shorten the prompt to {config.max_model_len - 1}"
        )
    check_prompt_tokens(command.request_id, prompt, config)


def check_prompt_tokens(request_id: str, tokens: Sequence[Any], config: EngineConfig) -> None:
    """Refuse what is no token, and tokens that the model doesn't have."""
    # Three passes in C: a generator took ten times as long, which a prompt of thousands of tokens feels.
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= config.vocab_size):
        index = next(i for i, t in enumerate(tokens) if type(t) is not int or not 0 <= t < config.vocab_size)
        raise Rejected(
            f"request {request_id!r}: prompt token {tokens[index]!r} at index {index} is not one of the model's "
            f"{config.vocab_size} tokens (0 to {config.vocab_size - 1})"
        )


def _sizes_in_use(state: State) -> dict[str, int]:
    """Embeddings of each media digest that is cached, or that a live request waits for."""
    waited_for = {media.digest: media.num_tokens for request in state.requests.live() for media in request.media}
    return waited_for | state.encoder.sizes


def _check_media(command: SubmitRequest, config: EngineConfig, sizes: dict[str, int]) -> None:
    end = 0
    room = min(config.encoder_budget_tokens, config.encoder_cache_tokens)
    for media in command.media:
        if media.start < end or media.num_tokens < 1 or media.start + media.num_tokens > len(command.prompt_token_ids):
            raise Rejected(
                f"request {command.request_id!r}: media {media.digest[:16]!r} at {media.start}, {media.num_tokens} places, "
                "overlaps another or leaves the prompt; give spans in order, inside the prompt"
            )
        if media.num_tokens > room:
            raise Rejected(
                f"request {command.request_id!r}: media {media.digest[:16]!r} has {media.num_tokens} embeddings, the encoder "
                f"takes {room} at a time; raise encoder_budget_tokens and encoder_cache_tokens"
            )
        if sizes.setdefault(media.digest, media.num_tokens) != media.num_tokens:
            raise Rejected(
                f"request {command.request_id!r}: media {media.digest[:16]!r} has {sizes[media.digest]} embeddings elsewhere "
                f"and {media.num_tokens} here; a digest names one input, of one size"
            )
        end = media.start + media.num_tokens


def check_sampling(request_id: str, sampling: Sampling, config: EngineConfig, *, resumable: bool) -> None:
    """Refuse parameters out of range."""
    for complaint in (*_complaints(sampling, resumable=resumable), *_complaints_of_bias(sampling, config.vocab_size)):
        raise Rejected(f"request {request_id!r}: {complaint}")


def _complaints(sampling: Sampling, *, resumable: bool) -> Iterator[str]:
    """What is out of range: one line for each limit."""
    if not 1 <= sampling.max_tokens < 2**31:
        yield f"max_tokens is {sampling.max_tokens}; give at least 1"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield f"min_tokens is {sampling.min_tokens}; give 0 to max_tokens"
    if not 0.0 <= sampling.temperature < inf:
        yield f"temperature is {sampling.temperature}; give 0 or more"
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"top_p is {sampling.top_p}; give more than 0 and at most 1"
    if not 0 <= sampling.top_k < 2**31:
        yield f"top_k is {sampling.top_k}; give 0 (no limit) or more"
    if not 0.0 <= sampling.min_p <= 1.0:
        yield f"min_p is {sampling.min_p}; give 0 to 1"
    if not 0 <= sampling.seed < 2**63:
        yield f"seed is {sampling.seed}; give 0 to 2^63 - 1"
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    if not least <= sampling.repetition_penalty <= most:
        yield f"repetition_penalty is {sampling.repetition_penalty}; give {least:g} to {most:g}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(sampling, name) <= MAX_PENALTY:
            yield f"{name} is {getattr(sampling, name)}; give -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            yield f"{name} is {value}; give 0 to {MAX_LOGPROBS}, or none"
    if sampling.prompt_logprobs is not None and resumable:
        yield "a session has no prompt_logprobs: its prompt comes in turns; leave them out"


def _complaints_of_bias(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    biased = [token for token, _ in sampling.logit_bias]
    if not biased:
        return
    if len(biased) > MAX_BIASES or biased != sorted(set(biased)):
        yield f"logit_bias has {len(biased)} tokens; give at most {MAX_BIASES}, in ascending order, each once"
    if not 0 <= min(biased) <= max(biased) < vocab_size:
        yield f"logit_bias names a token that is none of the model's {vocab_size}"
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in sampling.logit_bias):
        yield f"logit_bias has a bias beyond {MAX_BIAS:g}; give -{MAX_BIAS:g} to {MAX_BIAS:g}"


def _check_fits(command: SubmitRequest, config: EngineConfig) -> None:
    prompt, max_tokens = len(command.prompt_token_ids), command.sampling.max_tokens
    needed = num_blocks_at_most(prompt, max_tokens, config)
    if needed > config.num_blocks:
        raise Rejected(
            f"request {command.request_id!r}: {prompt} prompt tokens and max_tokens {max_tokens} can need {needed} blocks "
            f"of {config.block_size}, the pool has {config.num_blocks}; lower max_tokens or enlarge the pool"
        )
