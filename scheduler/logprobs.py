"""Log-probabilities of a step that came back: told with the tokens that they are of, and checked like them.

Who asked gets one for each token that is handed out, no more: what a stop cut off has none, and neither has what was thrown away.
Of the prompt they come with the first output, all at once: a request that is preempted before has nothing of it told, and
computes it again.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

from refold.journal.errors import WorkerLost
from refold.journal.events import (
    Event,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    StaleOutputConsumed,
)
from refold.journal.surprisals import MAX_SURPRISAL, EntrySurprisals, numbers_per_token
from refold.projections.steps import InFlightStep
from refold.scheduler.commands import CompleteStep


class _Wanted(NamedTuple):
    """What an entry has to tell: numbers of so many tokens, `num_top` likeliest beside each."""

    num_tokens: int
    num_top: int


def with_logprobs(step: InFlightStep, command: CompleteStep, vocab_size: int, events: list[Event]) -> list[Event]:
    """The facts of a step and, behind its output, the log-probabilities that came with it.

    Raises:
        WorkerLost: they aren't those that were asked for, or can't be any.
    """
    current = [e for e, count in enumerate(command.counts) if count and step.stale.get(e) != "drop"]
    wanted, of_prompts = {}, {}
    for entry in current:
        request = step.requests[entry]
        sampling = request.sampling
        if sampling.logprobs is not None:
            wanted[entry] = _Wanted(command.counts[entry], min(sampling.logprobs, vocab_size))
        if sampling.prompt_logprobs is not None and command.positions[entry] == request.num_prompt_tokens:
            top = min(sampling.prompt_logprobs, vocab_size)
            of_prompts[entry] = _Wanted(request.num_prompt_tokens - 1, top)
    told = _checked(step, command.logprobs, wanted, vocab_size)
    prompts = _checked(step, command.prompt_logprobs, of_prompts, vocab_size)
    num_outputs = sum(isinstance(event, OutputDelivered | StaleOutputConsumed) for event in events)
    return [*events[:num_outputs], *_delivered(step, told, events), *_of_prompts(step, prompts), *events[num_outputs:]]


def _delivered(step: InFlightStep, told: Sequence[EntrySurprisals], events: Iterable[Event]) -> list[Event]:
    if not told:
        return []
    kept = _handed_out(events)
    handles = [step.handles[each.entry] for each in told]
    counts = [kept[handle][1] for handle in handles]
    numbers: list[int] = []
    for each, count in zip(told, counts, strict=True):
        numbers += each.surprisals[: count * numbers_per_token(each.num_top)]
    event = LogprobsDelivered(
        step=step.step,
        handles=handles,
        first_output_indices=[kept[handle][0] for handle in handles],
        counts=counts,
        num_top=[each.num_top for each in told],
        surprisals=numbers,
    )
    return [event]


def _of_prompts(step: InFlightStep, told: Iterable[EntrySurprisals]) -> list[Event]:
    return [
        PromptLogprobsDelivered(
            handle=step.handles[each.entry],
            count=step.requests[each.entry].num_prompt_tokens - 1,
            num_top=each.num_top,
            surprisals=each.surprisals,
        )
        for each in told
    ]


def _handed_out(events: Iterable[Event]) -> dict[int, tuple[int, int]]:
    """Handle -> output index of its first token, and how many tokens it got."""
    found: dict[int, tuple[int, int]] = {}
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            counts = event.counts or repeat(1, len(event.handles))
            found |= zip(event.handles, zip(event.first_output_indices, counts, strict=True), strict=True)
    return found


def _checked(
    step: InFlightStep, told: Sequence[EntrySurprisals], wanted: Mapping[int, _Wanted], vocab_size: int
) -> list[EntrySurprisals]:
    """What the worker told and somebody wants, in the order of the entries.

    What it tells of entries that are thrown away is thrown away too: their request may have other wishes by now.
    """
    known = [each for each in told if step.stale.get(each.entry) != "drop"]
    if [each.entry for each in known] != list(wanted):
        raise WorkerLost(
            f"worker told log-probabilities of entries {[each.entry for each in known][:20]} of step {step.step}; those of "
            f"{list(wanted)[:20]} were asked for"
        )
    for each in known:
        num_tokens, num_top = wanted[each.entry]
        if each.num_top != num_top or len(each.surprisals) != num_tokens * numbers_per_token(num_top):
            raise WorkerLost(
                f"worker told {len(each.surprisals)} numbers of entry {each.entry} of step {step.step}, with {each.num_top} "
                f"likeliest tokens each; {num_tokens} tokens with {num_top} each were asked for"
            )
        _check_numbers(step, each, vocab_size)
    return known


def _check_numbers(step: InFlightStep, told: EntrySurprisals, vocab_size: int) -> None:
    size, numbers = numbers_per_token(told.num_top), told.surprisals
    for start in range(0, len(numbers), size):
        rank, top = numbers[start], numbers[start + 2 : start + size]
        ids, surprisals = top[::2], top[1::2]
        written = [numbers[start + 1], *surprisals]
        holds = (
            1 <= rank <= vocab_size,
            0 <= min(written) <= max(written) <= MAX_SURPRISAL,
            not ids or 0 <= min(ids) <= max(ids) < vocab_size,
            len(set(ids)) == len(ids),
            all(better <= worse for better, worse in pairwise(surprisals)),
        )
        if not all(holds):
            raise WorkerLost(
                f"worker told {numbers[start : start + size][:20]} of a token of entry {told.entry} of step {step.step}: "
                "that is no rank, or no log-probability, or not in order"
            )
