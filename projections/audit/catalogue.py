"""The views: what each answers and what its columns mean.

This is the contract: within a major version columns are only added, and never change their meaning.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from refold.projections.audit.columns import MEANINGS


class View(NamedTuple):
    """A view, which is also a named query.

    Attributes:
        name: of both.
        question: that it answers.
        shown: the columns that a terminal shows, in order.
        order: how a named query sorts.
        filters: columns that a named query can be narrowed by.
        example: a question of its own kind, as SQL.
        own: what columns mean here, where it isn't what they mean everywhere.
    """

    name: str
    question: str
    shown: str
    order: str
    filters: tuple[str, ...]
    example: str
    own: Mapping[str, str] = MappingProxyType({})


VIEWS = (
    View(
        "requests",
        "Which requests were there, how long did each wait for what, and how did it end?",
        "request_id status finish_reason num_prompt_tokens num_cached_tokens num_output_tokens queued_ns "
        "time_to_first_token_ns mean_inter_token_ns total_ns num_preemptions",
        "submitted_ns, handle",
        ("request_id",),
        "SELECT request_id, time_to_first_token_ns FROM requests ORDER BY time_to_first_token_ns DESC LIMIT 3",
    ),
    View(
        "request_events",
        "What happened to a request, event by event?",
        "position event_index time_ns request_id kind step num_tokens detail",
        "position, event_index",
        ("request_id", "step"),
        "SELECT position, kind, step, detail FROM request_events WHERE request_id = 'req-1' ORDER BY position, event_index",
        {
            "num_tokens": "tokens that the event is about: of the prompt, scheduled, that came back, or that turned stale"
        },
    ),
    View(
        "events",
        "Which rare events were there (all but the steps and their outputs), of any request or of the engine?",
        "position event_index time_ns kind request_id detail",
        "position, event_index",
        ("request_id",),
        "SELECT kind, COUNT(*) AS num FROM events GROUP BY kind ORDER BY num DESC",
        {
            "request_id": "the request that it names; null for the engine's own",
            "num_tokens": "tokens that the event is about: of the prompt, or that turned stale or were lost",
        },
    ),
    View(
        "steps",
        "What did each step do: how many requests and tokens, prefill or decode, how full was the pool, how long did it take?",
        "step time_ns duration_ns outcome num_entries num_tokens num_prefill_tokens num_decode_tokens num_output_tokens "
        "num_owned_blocks num_blocks num_running num_waiting",
        "step",
        ("step",),
        "SELECT step, num_entries, num_prefill_tokens, num_decode_tokens FROM steps ORDER BY num_tokens DESC LIMIT 3",
        {"num_output_tokens": "tokens that went out when it came back", "position": "record that scheduled it"},
    ),
    View(
        "step_entries",
        "Who was in the batch of a step, with what, and what came of it?",
        "step entry request_id kind first_position num_tokens num_drafts outcome num_output_tokens",
        "step, entry",
        ("request_id", "step"),
        "SELECT entry, request_id, kind, num_tokens, outcome FROM step_entries WHERE step = 2 ORDER BY entry",
        {
            "kind": "`decode`, `prefill` (of a prompt's end; it samples), or `chunk` (of a prefill; it samples nothing)",
            "outcome": "`in flight`, `delivered`, `stale, delivered`, `stale, dropped` or `lost`",
            "num_output_tokens": "tokens that came back",
            "num_tokens": "tokens scheduled, drafts included",
        },
    ),
    View(
        "preemptions",
        "Who was preempted, for whom and why, what did it cost, and how long did it delay the request?",
        "time_ns request_id reason for_request_id needed_blocks free_blocks num_released_blocks num_stale_tokens stale_policy "
        "drained_after_ns delay_ns num_recomputed_tokens",
        "position, event_index",
        ("request_id",),
        "SELECT request_id, for_request_id, needed_blocks, free_blocks, delay_ns FROM preemptions ORDER BY delay_ns DESC",
        {"num_hit_tokens": "tokens that the prefix cache still had when the request went on"},
    ),
    View(
        "stale_output",
        "Which work in flight turned stale, of which epoch and why, and was it delivered or dropped?",
        "request_id step entry from_epoch cause policy num_tokens outcome num_output_tokens",
        "step, entry",
        ("request_id", "step"),
        "SELECT outcome, COUNT(*) AS num_entries, SUM(num_tokens) AS num_tokens FROM stale_output GROUP BY outcome",
        {
            "cause": "what ended the epoch: a reason of preemption, `turn_ended` or `finished`",
            "outcome": "`in flight`, `delivered`, `dropped` or `lost`",
            "num_output_tokens": "tokens that came back",
            "num_tokens": "tokens scheduled",
        },
    ),
    View(
        "tokens",
        "Where does each token of an output come from: which step, which place in its batch, drafted or sampled?",
        "request_id output_index token_id step entry num_batch_mates origin is_stale delivered_ns",
        "request_id, output_index",
        ("request_id",),
        "SELECT output_index, token_id, step, entry, origin FROM tokens WHERE request_id = 'req-1' ORDER BY output_index LIMIT 5",
        {
            "token_id": "the token; null if it was redacted",
            "origin": "`drafted` (and accepted) or `sampled`",
            "is_stale": "1 if its epoch was over when it came back, and it was delivered all the same",
            "position": "record that delivered it",
        },
    ),
    View(
        "batch_mates",
        "With whom did a token share the batch that it was computed in?",
        "request_id output_index step entry mate_entry mate_request_id mate_kind mate_num_tokens",
        "output_index, mate_entry",
        ("request_id", "output_index"),
        "SELECT DISTINCT mate_request_id FROM batch_mates WHERE request_id = 'req-1' ORDER BY mate_request_id",
    ),
    View(
        "counters",
        "How did the scheduler's counters of a request move, event by event? (Summed up in SQL, not by the engine's code.)",
        "request_id position event_index num_in_flight_tokens num_stale_output_tokens num_deliverable_stale_tokens "
        "num_output_placeholders num_output_tokens",
        "position, event_index, handle",
        ("request_id",),
        "SELECT position, num_in_flight_tokens, num_output_placeholders FROM counters WHERE request_id = 'req-1' "
        "ORDER BY position LIMIT 5",
        {"num_output_tokens": "tokens delivered so far", "num_in_flight_tokens": "tokens scheduled and not come back"},
    ),
    View(
        "counters_by_minute",
        "How much of everything was there in each minute?",
        "minute num_submitted num_finished num_steps num_output_tokens num_prefill_tokens num_preemptions num_hit_tokens "
        "max_owned_blocks max_running max_waiting",
        "minute",
        ("minute",),
        "SELECT minute, num_finished, num_output_tokens, num_preemptions FROM counters_by_minute ORDER BY minute",
    ),
    View(
        "kv_occupancy",
        "How full was the pool of KV blocks, step by step?",
        "step time_ns num_owned_blocks num_blocks fraction num_new_blocks num_evicted_blocks num_running num_waiting",
        "step",
        ("step",),
        "SELECT MAX(num_owned_blocks) AS most, MAX(fraction) AS fraction FROM kv_occupancy",
    ),
    View(
        "prefix_hits",
        "Which tokens were not computed again because the prefix cache had them, and whose work was that?",
        "request_id step first_position num_tokens num_blocks computed_by_request_id computed_in_step adapter cache_salt",
        "step, request_id, first_position",
        ("request_id", "step"),
        "SELECT request_id, num_tokens, computed_by_request_id FROM prefix_hits ORDER BY num_tokens DESC LIMIT 3",
        {"num_tokens": "tokens shared", "first_position": "of the shared tokens", "position": "record of the step"},
    ),
    View(
        "speculation",
        "How many drafts were accepted, by their place in the run of drafts?",
        "draft_position num_drafted_tokens num_accepted_tokens acceptance",
        "draft_position",
        (),
        "SELECT draft_position, acceptance FROM speculation ORDER BY draft_position",
        {"num_drafted_tokens": "drafts verified at this place", "num_accepted_tokens": "of them, accepted"},
    ),
    View(
        "engine_lives",
        "When did an engine open the journal, how did its life end, and what was lost with it?",
        "engine_epoch opened_ns fate lived_ns close_reason num_recovered_requests num_steps num_output_tokens num_lost_steps "
        "num_lost_tokens",
        "engine_epoch",
        (),
        "SELECT engine_epoch, fate, num_recovered_requests, num_lost_steps FROM engine_lives ORDER BY engine_epoch",
        {
            "num_steps": "steps scheduled in this life",
            "num_output_tokens": "tokens that went out in this life",
            "num_lost_steps": "steps in flight when it crashed",
            "num_lost_tokens": "tokens scheduled in them",
        },
    ),
    View(
        "worker_losses",
        "When was a worker lost, why, and what went with it?",
        "generation lost_ns reason num_lost_steps num_lost_tokens num_lost_requests kind",
        "generation",
        (),
        "SELECT generation, reason, num_lost_steps FROM worker_losses ORDER BY generation",
        {
            "num_lost_steps": "steps that were in flight",
            "num_lost_tokens": "tokens scheduled in them",
            "kind": "of the worker, as it calls itself",
            "reason": "as the engine recorded it",
        },
    ),
    View(
        "aborts",
        "Which requests ended before their time, why, and what had their clients got by then?",
        "request_id finish_reason cause message after_ns num_delivered_tokens max_tokens num_aborted_in_flight_tokens",
        "position",
        ("request_id",),
        "SELECT request_id, finish_reason, cause, num_delivered_tokens FROM aborts",
        {"cause": "who aborted it; null if it ended by itself", "position": "record that ended it"},
    ),
    View(
        "durations",
        "How long did things take: the middle, the slowest twentieth and the slowest hundredth, minute by minute?",
        "minute kind num p50_ns p95_ns p99_ns max_ns",
        "kind, minute",
        ("minute", "kind"),
        "SELECT kind, num, p50_ns, p99_ns FROM durations ORDER BY kind, minute",
        {
            "kind": "`queued` (submitted to first scheduled), `first_token` (submitted to first token), `inter_token`, `total`, or "
            "`preempted` (preempted to resumed); each counts in the minute in which it ended",
        },
    ),
    View(
        "tenants",
        "Who got how much of the engine?",
        "tenant num_submitted num_finished num_scheduled_tokens num_output_tokens num_preemptions share",
        "tenant",
        (),
        "SELECT tenant, num_scheduled_tokens, share FROM tenants ORDER BY share DESC",
    ),
    View(
        "tenants_by_minute",
        "Who got how much of the engine in each minute?",
        "minute tenant num_submitted num_finished num_scheduled_tokens num_output_tokens num_preemptions",
        "minute, tenant",
        ("minute", "tenant"),
        "SELECT tenant, num_output_tokens FROM tenants_by_minute ORDER BY minute, tenant",
    ),
    View(
        "integrity",
        "How far does the read model go, is what it was made of whole, and what was checked?",
        "stream chain num_records num_records_behind num_events num_digests num_redacted_requests num_violations head_hash damage",
        "stream",
        (),
        "SELECT stream, chain, num_records, num_violations FROM integrity",
    ),
    View(
        "violations",
        "What must not be? This view must be empty.",
        "rule position request_id step message",
        "position, rule",
        (),
        "SELECT COUNT(*) AS num FROM violations",
        {
            "rule": "which rule is broken",
            "position": "record where it shows; null if it is no one's",
            "message": "what is wrong",
            "request_id": "the request that it is about, if it is about one",
            "step": "the step that it is about, if it is about one",
        },
    ),
)
BY_NAME = {view.name: view for view in VIEWS}


def meaning(view: str, column: str) -> str:
    """What a column means.

    Raises:
        KeyError: nobody has said.
    """
    return BY_NAME[view].own.get(column) or MEANINGS[column]
