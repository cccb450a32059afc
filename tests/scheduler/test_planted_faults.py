"""These tests can fail: with one wrong line in the scheduler, the sentence about that line is false, or a life goes wrong.

The faults are those of `tests.kit.fault_list`. What the simulator makes of all of them is in `tests/simulation`; here, no
conduct looks on: the laws, the worker's reading, the tokens that are due and the sentences of this folder are all there is.
"""

from collections.abc import Callable

import pytest

from refold.journal.events import RequestFinished
from tests.kit.drive import Drive
from tests.kit.faults import planted
from tests.kit.sentences import all_due, all_of, name_of, outputs, random_life
from tests.scheduler import (
    test_batching,
    test_fences,
    test_preemption,
    test_prefix_cache,
    test_recovery,
    test_wrong_answers,
)

MOST_LIVES = 120

LIVES = {
    "stale_accumulated": 29,
    "in_flight_forgotten": 0,
    "epoch_not_raised": 0,
    "placeholders_kept": 0,
    "stale_settles_placeholders": 0,
    "stale_applies_rejections": 3,
    "accepted_counted": 0,
    "finished_not_drained": 0,
    "resume_before_drain": 3,
    "resume_before_drain_half": 3,
    "dropped_delivered": 0,
    "stale_never_finishes": 3,
    "finish_keeps_blocks": 0,
    "finish_stays_queued": 0,
    "free_before_fence": 0,
    "fence_lifted_early": 0,
    "published_at_schedule": 0,
    "published_for_another_epoch": 0,
    "whole_prompt_hit": 0,
    "parent_ignored": 0,
    "share_uncounted": 0,
    "hash_survives_taking": 0,
    "reset_keeps_hashes": 0,
    "cached_before_blank": 0,
    "early_stop_early": 0,
    "window_overfull": 0,
    "one_seat_more": 1,
    "budget_ignored": 0,
    "event_aliased": 0,
    "victim_by_age": 1,
    "victim_from_the_front": 0,
    "newcomer_at_the_end": 0,
}
"""Fault -> the short life in which it was first noticed."""


def nobody_was_wronged(drive: Drive) -> bool:
    """Everybody got what was due, those who were aborted a part of it."""
    aborted = {name_of(drive, e.handle) for e in all_of(RequestFinished, drive.records) if e.reason == "abort"}
    got = outputs(drive)
    return all(got[name] == (due[: len(got[name])] if name in aborted else due) for name, due in all_due(drive).items())


def first_wrong_life(seeds: list[int]) -> int | None:
    """The first of these lives in which something is noticed."""
    for seed in seeds:
        try:
            if not nobody_was_wronged(random_life(seed)):
                return seed
        except Exception:  # noqa: BLE001 - whatever it is, the fault was noticed
            return seed
    return None


@pytest.mark.parametrize("seed", sorted(set(LIVES.values())))
def test_without_a_fault_nothing_is_wrong_with_these_lives(seed: int) -> None:
    assert nobody_was_wronged(random_life(seed))


@pytest.mark.parametrize("fault", LIVES)
def test_a_fault_is_noticed_in_a_short_life(fault: str) -> None:
    """The known life first; if the code has moved on, another may do."""
    with planted(fault):
        assert first_wrong_life([LIVES[fault], *range(MOST_LIVES)]) is not None, (
            f"{MOST_LIVES} lives and nobody noticed"
        )


Sentence = tuple[Callable[..., None], tuple[object, ...]]

SENTENCES: dict[str, Sentence] = {
    "drop_not_sticky": (
        test_preemption.test_what_was_to_be_dropped_stays_so_when_a_later_epoch_is_to_be_delivered,
        (),
    ),
    "stale_accumulated": (test_preemption.test_a_second_bump_assigns_what_is_stale_and_does_not_add_to_it, ()),
    "placeholders_kept": (test_preemption.test_its_counters_start_anew_and_what_is_in_flight_stays_in_flight, ()),
    "resume_before_drain": (
        test_preemption.test_a_victim_with_deliverable_output_in_flight_does_not_come_back_though_there_is_room,
        (),
    ),
    "reset_delivers": (test_preemption.test_after_a_drop_it_comes_back_at_once, ()),
    "pressure_drops": (test_preemption.test_the_victim_gives_up_its_place_its_blocks_and_all_that_it_computed, ()),
    "stale_never_finishes": (
        test_preemption.test_a_stale_token_finishes_a_preempted_request_and_no_queue_keeps_it,
        (),
    ),
    "victim_by_age": (test_preemption.test_by_priority_the_least_urgent_goes_and_the_urgent_run, ()),
    "admission_after_preemption": (test_preemption.test_nobody_is_let_in_by_a_step_that_preempts, ()),
    "free_before_fence": (test_fences.test_a_victims_blocks_are_fenced_until_its_last_step_comes_back, ()),
    "fence_lifted_early": (test_fences.test_a_victims_blocks_are_fenced_until_its_last_step_comes_back, ()),
    "fenced_victim_counts_for_nothing": (test_fences.test_a_fenced_victim_is_no_reason_for_a_second_victim, ()),
    "hits_ignored": (test_prefix_cache.test_a_known_prompt_costs_its_tail_and_at_least_one_token, (9, 1)),
    "whole_prompt_hit": (test_prefix_cache.test_a_known_prompt_costs_its_tail_and_at_least_one_token, (8, 4)),
    "salt_ignored": (test_prefix_cache.test_a_salt_or_an_adapter_keeps_contents_apart, ({"cache_salt": "b"},)),
    "adapter_ignored": (test_prefix_cache.test_a_salt_or_an_adapter_keeps_contents_apart, ({"adapter": "b"},)),
    "never_revoked": (test_prefix_cache.test_nothing_is_published_that_no_step_wrote, ()),
    "reset_keeps_hashes": (test_prefix_cache.test_a_reset_forgets_every_content, ()),
    "most_recent_first": (test_prefix_cache.test_of_the_cached_the_longest_unused_goes_first, ()),
    "cached_before_blank": (
        test_prefix_cache.test_blocks_without_content_go_first_the_last_freed_before_the_others,
        (),
    ),
    "head_first": (test_prefix_cache.test_the_tail_of_a_prefix_is_taken_before_its_head, ()),
    "early_stop_late": (test_batching.test_no_token_is_computed_in_vain_at_any_depth, (3, 2)),
    "prefill_cap_ignored": (test_batching.test_long_prompts_share_a_step_by_cap_and_budget, ()),
    "watermark_ignored": (test_batching.test_the_watermark_stays_free_while_somebody_runs, (2, False)),
    "full_fit_ignored": (test_batching.test_a_request_comes_in_only_if_all_its_known_tokens_fit, ()),
    "length_before_stop": (test_batching.test_a_stop_token_in_the_last_place_is_a_stop, (1,)),
    "priority_ignored": (test_batching.test_few_seats_go_to_the_best, ()),
    "answer_twice": (test_wrong_answers.test_an_answer_is_taken_once, (1,)),
    "answers_out_of_order": (test_wrong_answers.test_steps_come_back_in_order, ()),
    "old_worker_trusted": (
        test_wrong_answers.test_an_answer_from_an_earlier_worker_is_refused_even_for_a_step_of_the_same_shape,
        (),
    ),
    "position_unchecked": (
        test_wrong_answers.test_a_position_is_told_with_the_request_and_the_one_that_is_next,
        (),
    ),
    "vocabulary_unchecked": (test_wrong_answers.test_the_vocabulary_ends_where_it_says, (1000, False)),
    "loss_keeps_blocks": (test_recovery.test_with_the_worker_go_its_steps_and_every_block, ()),
    "capacity_unchecked": (
        test_recovery.test_a_smaller_pool_ends_what_it_can_not_hold_and_serves_the_rest,
        (),
    ),
}


@pytest.mark.parametrize("fault", SENTENCES)
def test_with_the_fault_the_sentence_about_it_is_false(fault: str) -> None:
    sentence, of = SENTENCES[fault]
    sentence(*of)
    with planted(fault), pytest.raises((Exception, pytest.fail.Exception)):
        sentence(*of)
