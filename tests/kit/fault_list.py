"""The planted faults: what one wrong line in the scheduler does, and that somebody notices.

A fault is one or more edits: in the source of a function, a text that occurs once becomes another. If the code has changed
so that the text is gone, `test_every_fault_can_be_planted` says so: plant it anew where its idea lives now.

No fault moves a cursor wrongly after a victim: both queues are in the policy's order and victims come from the end, so no
cursor ever has to move. `victim_from_the_front` is what comes closest.
"""

from typing import NamedTuple


class Edit(NamedTuple):
    """In the function `target` ("module:function" under refold), `old` becomes `new`."""

    target: str
    old: str
    new: str


class Fault(NamedTuple):
    """A wrong scheduler, told in a sentence."""

    name: str
    sentence: str
    edits: tuple[Edit, ...]


def _fault(name: str, sentence: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, sentence, tuple(Edit(*edit) for edit in edits))


_REQUESTS = "projections.requests:"
_FOLD = "scheduler.fold:"
_STEPS = "scheduler.fold_steps:"
_COUNTERS = "projections.counters:"
_HASHES = "projections.block_hashes:"
_PLAN = "scheduler.planning:"
_COMPLETION = "scheduler.completion:"
_RESUME_GATE = "request.num_deliverable_stale_tokens > 0"

EPOCHS = (
    _fault(
        "stale_accumulated",
        "What turns stale is added to what was stale already, though that is still in flight and counted twice.",
        (_COUNTERS + "raise_epoch", "request.num_stale_output_tokens =", "request.num_stale_output_tokens +="),
    ),
    _fault(
        "in_flight_forgotten",
        "A preemption sets the tokens in flight to zero, though their output will come.",
        (_COUNTERS + "raise_epoch", "= request.num_in_flight_tokens", "= 0"),
    ),
    _fault(
        "epoch_not_raised",
        "A preemption leaves the epoch as it is, so that old output passes for new.",
        (_COUNTERS + "raise_epoch", "request.epoch += 1", "pass"),
    ),
    _fault(
        "placeholders_kept",
        "A preempted request keeps what it had computed, and with it the placeholders of what was in flight.",
        (_REQUESTS + "forget_computed", "request.num_computed_tokens = 0", "pass"),
    ),
    _fault(
        "prompt_kept_in_flight",
        "A preempted request counts what was in flight of its prompt as current, beside counting it as stale.",
        (_COUNTERS + "raise_epoch", "request.num_prompt_tokens_in_flight = 0", "pass"),
    ),
    _fault(
        "drafts_kept",
        "A preempted request keeps the drafts that were proposed for it.",
        (_COUNTERS + "raise_epoch", "request.drafts = []", "pass"),
    ),
    _fault(
        "stale_settles_placeholders",
        "Stale output is subtracted from the placeholders of the new epoch.",
        (
            _COUNTERS + "settle_stale",
            "request.num_stale_output_tokens -= n",
            "request.num_stale_output_tokens -= n; request.num_computed_tokens -= 1",
        ),
    ),
    _fault(
        "stale_applies_rejections",
        "The drafts that a stale step rejected are taken from what the new epoch has computed.",
        (
            _STEPS + "stale_output_consumed",
            "counters.settle_stale(request, n, deliverable)",
            "counters.settle_stale(request, n, deliverable); request.num_computed_tokens -= n - count if count else 0",
        ),
    ),
    _fault(
        "accepted_counted",
        "Stale output leaves the counters by the tokens that came back, not by those that were scheduled.",
        (
            _STEPS + "stale_output_consumed",
            "counters.settle_stale(request, n,",
            "counters.settle_stale(request, count,",
        ),
    ),
    _fault(
        "finished_not_drained",
        "Stale output of a request that has finished is skipped before it is counted.",
        (
            _STEPS + "stale_output_consumed",
            "counters.settle_stale(request, n, deliverable)",
            "request.finish_reason or counters.settle_stale(request, n, deliverable)",
        ),
    ),
    _fault(
        "drop_not_sticky",
        "A later preemption turns output that was to be dropped into output to deliver.",
        ("projections.steps:mark_stale", 'if step.stale.get(entry) != "drop":', "if True:"),
    ),
    _fault(
        "resume_before_drain",
        "A preempted request comes back while its deliverable stale output is still in flight.",
        ("scheduler.shaping:passed_over", _RESUME_GATE, "False"),
        (_STEPS + "_admit", "assert request.num_deliverable_stale_tokens == 0", "assert True"),
    ),
    _fault(
        "resume_before_drain_half",
        "The same, in the plan only: the applier is still right.",
        ("scheduler.shaping:passed_over", _RESUME_GATE, "False"),
    ),
    _fault(
        "reset_delivers",
        "A cache reset lets stale output through, though its positions will be sampled again.",
        ("scheduler.decide:_reset_cache", '"cache_reset", "drop"', '"cache_reset", "deliver"'),
    ),
    _fault(
        "pressure_drops",
        "Preemption under memory pressure throws valid stale tokens away.",
        ("scheduler.scratch:Plan.preempt", '"kv_pressure", "deliver"', '"kv_pressure", "drop"'),
    ),
    _fault(
        "dropped_delivered",
        "Output marked to be dropped is delivered all the same.",
        (_COMPLETION + "_completed", 'delivered=policy == "deliver" and count > 0', "delivered=count > 0"),
        (_STEPS + "stale_output_consumed", "assert deliverable or not delivered", "assert True"),
    ),
    _fault(
        "stale_never_finishes",
        "A stale token that is a stop token doesn't end the preempted request.",
        (_COMPLETION + "_completed", 'if count and policy != "drop":', "if count and policy is None:"),
    ),
)

COMPLETION = (
    _fault(
        "rejected_stay_computed",
        "Rejected drafts stay counted as computed.",
        (_COUNTERS + "settle", "request.num_computed_tokens -= drafts + 1 - count", "pass"),
    ),
    _fault(
        "trim_forgotten",
        "What was accepted behind a stop token is delivered too.",
        (
            _COMPLETION + "_kept",
            'ends.append(_end(request, "stop", i + 1, token, time_ns, refused=refused))\n            return tokens[: i + 1]',
            'ends.append(_end(request, "stop", i + 1, token, time_ns, refused=refused))\n            return tokens',
        ),
    ),
    _fault(
        "length_before_stop",
        "A stop token at the last place counts as running out of length.",
        (
            _COMPLETION + "_kept",
            "if token in request.stop_ids and",
            "if total < request.max_total_tokens and token in request.stop_ids and",
        ),
    ),
    _fault(
        "answer_twice",
        "An answer that came before isn't refused.",
        (_COMPLETION + "_expected_step", "or command.step < state.window.in_flight[0].step", ""),
    ),
    _fault(
        "answers_out_of_order",
        "An answer is taken for the oldest step's, whichever it is.",
        (_COMPLETION + "_expected_step", "if command.step != step.step:", "if False:"),
    ),
    _fault(
        "old_worker_trusted",
        "An answer of a lost worker is taken for the new one's.",
        (
            _COMPLETION + "_expected_step",
            "command.generation != state.worker_generation or not state.worker_alive",
            "False",
        ),
        (_COMPLETION + "_expected_step", "or command.step < state.window.in_flight[0].step", ""),
        (_COMPLETION + "_expected_step", "if command.step != step.step:", "if False:"),
    ),
    _fault(
        "position_unchecked",
        "Nobody asks for which position the worker sampled.",
        (_COMPLETION + "_check_position", "if position != len(request.tokens):", "if False:"),
    ),
    _fault(
        "vocabulary_unchecked",
        "A token that the model doesn't have is taken over.",
        (_COMPLETION + "_check_shape", "max(command.token_ids) < vocab_size", "max(command.token_ids)"),
    ),
    _fault(
        "statistics_of_kept",
        "Acceptance counts what was kept after a stop or thrown away as stale, not what the verification accepted.",
        (
            _COMPLETION + "_completed",
            "columns.accepted.append(count - 1 if count else 0)",
            "columns.accepted.append(len(tokens) - 1 if tokens else 0)",
        ),
    ),
    _fault(
        "refusal_ignored",
        "A request goes on with tokens that its grammar refuses.",
        (_COMPLETION + "_completed", "refused = entry in command.refused_entries", "refused = False"),
    ),
    _fault(
        "finish_keeps_blocks",
        "A finished request keeps its blocks and its marks.",
        (_FOLD + "_request_finished", "_end_epoch(state, request, deliver=False)", "pass"),
    ),
    _fault(
        "finish_stays_queued",
        "A finished request stays in its queue.",
        (_FOLD + "_request_finished", "queues.leave(state.queues, request)", "pass"),
    ),
)

BLOCKS = (
    _fault(
        "free_before_fence",
        "A victim's blocks are free at once, while a step in flight may still write them.",
        (
            _FOLD + "_end_epoch",
            "blocks.release(state.pool, released, fence, run)",
            "blocks.release(state.pool, released, None, run)",
        ),
    ),
    _fault(
        "fence_lifted_early",
        "A fence is lifted when any step comes back.",
        ("projections.blocks:_lift_fences", "if fence > step:", "if False:"),
    ),
    _fault(
        "fenced_victim_counts_for_nothing",
        "Blocks behind a fence are no reason to wait: one more request gives way.",
        ("scheduler.room:make_room", "if plan.free.num_free + plan.free.num_fenced >= missing:", "if False:"),
    ),
    _fault(
        "published_at_schedule",
        "A block is published as soon as one of its places is scheduled, not when all are.",
        (
            _STEPS + "_publish_known",
            "full = (firsts[entry] + num_tokens[entry]) // block_size",
            "full = -(-(firsts[entry] + num_tokens[entry]) // block_size)",
        ),
    ),
    _fault(
        "never_revoked",
        "What was published stays findable when the worker that held it is lost.",
        (
            _FOLD + "_worker_lost",
            "state.pool = blocks.BlockPool(state.config.num_blocks, state.config.block_size)",
            """kept = state.pool; state.pool = blocks.BlockPool(state.config.num_blocks, state.config.block_size)
    for content_hash, block in kept.block_by_hash.items():
        state.pool.hashes[block] = content_hash; state.pool.block_by_hash[content_hash] = block
        del state.pool.free_blank[block]; state.pool.free_cached[block] = None""",
        ),
    ),
    _fault(
        "rejected_published",
        "A block is published with the last token's place in it, which was never computed.",
        (
            _STEPS + "_publish_filled",
            "(len(request.tokens) - 1) // block_size",
            "len(request.tokens) // block_size",
        ),
        (_COUNTERS + "settle_decodes", "if over == 1 or block_size == 1:", "if True:"),
        (_COUNTERS + "settle", "if over < count:", "if True:"),
    ),
    _fault(
        "published_for_another_epoch",
        "A step publishes for a request that has since been preempted.",
        (
            _STEPS + "stale_output_consumed",
            "            counters.append_stale(",
            "            step.filled.append(request); counters.append_stale(",
        ),
    ),
    _fault(
        "hits_ignored",
        "A known prefix is computed again.",
        ("scheduler.prefix_cache:prefix_hit", "if request.block_ids or", "if True or"),
    ),
    _fault(
        "whole_prompt_hit",
        "A prompt that is known whole is hit whole: nothing is left to sample from.",
        (
            "scheduler.prefix_cache:_known_prefix",
            "(len(request.tokens) - 1) // plan.block_size",
            "len(request.tokens) // plan.block_size",
        ),
    ),
    _fault(
        "salt_ignored",
        "Tenants with different salts share blocks.",
        (_HASHES + "root_hash", "\\x00{cache_salt}", ""),
    ),
    _fault(
        "adapter_ignored",
        "Requests of different adapters share blocks.",
        (_HASHES + "root_hash", "{adapter}\\x00", ""),
    ),
    _fault(
        "parent_ignored",
        "A block's hash leaves out what comes before it.",
        (
            _HASHES + "extend_block_hashes",
            "said = hashes[-1] if i else root_hash(request.cache_salt, request.adapter)",
            "said = b''",
        ),
        (
            _HASHES + "block_hash",
            "_sha256(parent + packed_tokens + media)",
            "_sha256(packed_tokens + media)",
        ),
    ),
    _fault(
        "media_ignored",
        "Two pictures are the same picture: their places hold the same tokens.",
        (
            _HASHES + "extend_block_hashes",
            "said += media_identity(request.media, start, block_size)",
            "pass",
        ),
        (
            _HASHES + "block_hash",
            "_sha256(parent + packed_tokens + media)",
            "_sha256(parent + packed_tokens)",
        ),
    ),
    _fault(
        "share_uncounted",
        "Sharing a block doesn't count one more owner.",
        (
            "projections.blocks:share",
            "counts[block] = count + 1",
            "counts[block] = count or 1",
        ),
    ),
    _fault(
        "run_uncounted",
        "Whoever shares what others hold as one isn't counted.",
        ("projections.blocks:share", "run.num_holders += 1", "pass"),
    ),
    _fault(
        "run_never_given_up",
        "The last who holds a shared prefix keeps its blocks from everybody.",
        ("projections.blocks:release", "if run.num_holders:", "if True:"),
    ),
    _fault(
        "run_given_up_early",
        "The first who leaves a shared prefix takes its blocks away from the others.",
        ("projections.blocks:release", "if run.num_holders:", "if False:"),
    ),
    _fault(
        "run_not_split",
        "A session that gives up some of a shared prefix's blocks gives them up for all.",
        (_FOLD + "_begin_turn", "blocks.split(state.pool, request.run)", "pass"),
    ),
    _fault(
        "run_planned_away",
        "A plan counts a victim's share of a prefix as free, though others hold it.",
        ("scheduler.free_blocks:FreeBlocks.release", "num_held = len(run.block_ids) if left else 0", "num_held = 0"),
    ),
    _fault(
        "hash_survives_taking",
        "A cached block that is taken is still found by its old hash.",
        ("projections.blocks:take", "_unpublish(pool, evicted)", "[pool.hashes.__setitem__(b, None) for b in evicted]"),
    ),
    _fault(
        "reset_keeps_hashes",
        "A cache reset forgets nothing.",
        (_FOLD + "_cache_reset", "blocks.forget_content(state.pool)", "pass"),
    ),
    _fault(
        "reset_keeps_encoder",
        "A cache reset forgets the blocks and keeps the encoder's outputs.",
        (_FOLD + "_cache_reset", "state.encoder = EncoderCache(state.config.encoder_cache_tokens)", "pass"),
    ),
    _fault(
        "loss_keeps_blocks",
        "A request that a lost worker held keeps its block table.",
        (_FOLD + "_start_over", "requests.forget_computed(request)", "pass"),
    ),
    _fault(
        "most_recent_first",
        "Of the cached blocks the one used last is evicted first.",
        ("scheduler.free_blocks:FreeBlocks.__init__", "iter(pool.free_cached)", "reversed(pool.free_cached)"),
    ),
    _fault(
        "cached_before_blank",
        "Cached blocks are taken while blank ones are free.",
        (
            "scheduler.free_blocks:FreeBlocks.__init__",
            "self._blank: Iterator[int] = reversed(pool.free_blank)",
            "self._blank: Iterator[int] = reversed(list(pool.free_blank)[1:])",
        ),
    ),
    _fault(
        "head_first",
        "A table is given back head first, so that the head of a prefix goes first.",
        ("projections.blocks:release", "list(reversed(block_ids))", "list(block_ids)"),
        ("projections.blocks:release", "for block in reversed(block_ids) if", "for block in block_ids if"),
    ),
)

PLANNING = (
    _fault(
        "early_stop_late",
        "One step too many is planned for a request whose last token is in flight.",
        (_PLAN + "_plan_alone", "if end >= request.max_total_tokens:", "if end > request.max_total_tokens:"),
        (_PLAN + "_is_decode", "first + n >= request.max_total_tokens", "first + n > request.max_total_tokens"),
        (_COUNTERS + "note_plain", "request.max_total_tokens - 1", "request.max_total_tokens"),
    ),
    _fault(
        "early_stop_early",
        "A request's last token is never planned.",
        (_PLAN + "_plan_alone", "if end >= request.max_total_tokens:", "if end >= request.max_total_tokens - 1:"),
        (_PLAN + "_is_decode", "first + n >= request.max_total_tokens", "first + n >= request.max_total_tokens - 1"),
    ),
    _fault(
        "plain_without_a_block",
        "A decode that needs a block is planned as one that needs nothing.",
        (
            _COUNTERS + "note_plain",
            "end = owned if owned < border else border",
            "end = 1 << 30",
        ),
    ),
    _fault(
        "due_too_late",
        "A token that fills a block isn't noticed.",
        (_STEPS + "step_scheduled", "margin = 2 if", "margin = 1 if"),
    ),
    _fault(
        "last_token_unnoticed",
        "Nobody notices that a request's last token has come.",
        (_STEPS + "_look_anew", "step.last_entries.append(entry)", "pass"),
    ),
    _fault(
        "batch_of_before",
        "A step's requests are those of the step before, if they are as many.",
        ("projections.batch:next_batch", "if batch.handles != handles:", "if len(batch.handles) != len(handles):"),
    ),
    _fault(
        "positions_of_before",
        "Who runs is planned with the positions of the step before, whoever was in that.",
        (_PLAN + "_running_columns", "left) == running:", "left)[:1] == running[:1]:"),
    ),
    _fault(
        "plain_with_drafts",
        "Drafts that are attached to a request wait until it next needs a block.",
        (_COUNTERS + "attach_drafts", "request.plain_until = 0", "pass"),
    ),
    _fault(
        "plain_with_a_hash",
        "A known hash isn't published before its request next needs a block.",
        (_HASHES + "extend_block_hashes", "request.plain_until = 0", "pass"),
    ),
    _fault(
        "window_overfull",
        "One step more than the window holds is planned.",
        (_PLAN + "plan_step", "len(state.window.in_flight) >= state", "len(state.window.in_flight) > state"),
    ),
    _fault(
        "one_seat_more",
        "One request more than there are seats comes in.",
        (
            _PLAN + "_plan_waiting",
            "plan.num_running >= plan.state.config.max_num_seqs",
            "plan.num_running > plan.state.config.max_num_seqs",
        ),
    ),
    _fault(
        "budget_ignored",
        "A prompt takes all the tokens that it wants.",
        (
            "scheduler.shaping:capped",
            "return min(wanted, token_budget, cap) if cap else min(wanted, token_budget)",
            "return min(wanted, cap) if cap else wanted",
        ),
        (
            "scheduler.scratch:Plan.note_shape",
            "assert 1 <= shape.num_tokens <= self.token_budget",
            "assert 1 <= shape.num_tokens",
        ),
    ),
    _fault(
        "prefill_cap_ignored",
        "One long prompt takes the whole step.",
        (
            "scheduler.shaping:capped",
            "min(wanted, token_budget, cap) if cap else",
            "min(wanted, token_budget) if cap else",
        ),
    ),
    _fault(
        "watermark_ignored",
        "The last free blocks go to a newcomer.",
        ("scheduler.room:needed_blocks", "config.watermark_blocks if plan.num_running else 0", "0"),
    ),
    _fault(
        "full_fit_ignored",
        "A request comes in that has room for its first chunk only.",
        ("scheduler.room:needed_blocks", "if not config.admit_full_sequence:", "if True:"),
    ),
    _fault(
        "admission_after_preemption",
        "A step that takes somebody's blocks lets another in.",
        (_PLAN + "plan_step", "if not plan.preemptions and not plan.starved:", "if True:"),
    ),
    _fault(
        "cadence_ignored",
        "A request samples in every step of a pipeline.",
        ("scheduler.shaping:running", "if too_close or request.grammar:", "if request.grammar:"),
    ),
    _fault(
        "cadence_forgotten",
        "The step in which a request sampled last isn't kept.",
        (_COUNTERS + "schedule", "request.last_sampling_step = step", "pass"),
        (_COUNTERS + "schedule_decodes", "request.last_sampling_step = step", "pass"),
    ),
    _fault(
        "pause_ignored",
        "A paused engine plans on.",
        (_PLAN + "plan_step", 'if state.paused == "all":', "if False:"),
    ),
    _fault(
        "pause_of_new_ignored",
        "A newcomer comes in while only those who ran may.",
        ("scheduler.shaping:passed_over", "or (held_back and never_ran)", ""),
    ),
    _fault(
        "drain_admits",
        "A draining engine takes submissions.",
        ("scheduler.admission:submit_request", 'if state.paused == "drain":', "if False:"),
    ),
    _fault(
        "grammar_gate_ignored",
        "A request runs before its grammar is compiled.",
        ("scheduler.shaping:passed_over", "or request.waits_for_grammar", ""),
    ),
    _fault(
        "grammar_runs_ahead",
        "A constrained request samples while its last token is still in flight.",
        ("scheduler.shaping:running", "if too_close or request.grammar:", "if too_close:"),
    ),
    _fault(
        "drafts_not_cleared",
        "Drafts stay attached after the step that verifies them.",
        (_COUNTERS + "schedule", "request.drafts = []", "pass"),
    ),
    _fault(
        "drafts_past_the_end",
        "Drafts may pass a request's last token.",
        ("scheduler.shaping:_most_drafts", ", request.max_total_tokens - certain - 1)", ")"),
        (_PLAN + "_is_decode", "first + n >= request.max_total_tokens", "first + 1 >= request.max_total_tokens"),
        (
            _COUNTERS + "note_plain",
            "(end if end < last else last) - num_drafts",
            "end - num_drafts if end - num_drafts < last else last",
        ),
    ),
    _fault(
        "batch_size_ignored",
        "A large batch drafts as much as a small one.",
        ("scheduler.scratch:drafts_for_batch", "if num_running <= batch:", "if True:"),
    ),
    _fault(
        "decided_by_address",
        "A decision depends on where an object lies in memory.",
        (
            "scheduler.room:needed_blocks",
            "config, block_size =",
            "if (id(object()) >> 4) % 2 and plan.num_running: return 1 << 30\n    config, block_size =",
        ),
    ),
    _fault(
        "event_aliased",
        "A request's block table is the very list that the journal's event holds.",
        (
            _STEPS + "_allocate_each",
            "request.block_ids.extend(block_ids)",
            "request.block_ids = request.block_ids + block_ids if request.block_ids else block_ids",
        ),
        (
            _REQUESTS + "forget_computed",
            "released, request.block_ids = request.block_ids, []",
            "released = request.block_ids[:]; request.block_ids.clear()",
        ),
    ),
)

POLICIES = (
    _fault(
        "priority_ignored",
        "Priority doesn't count in the order.",
        ("projections.queues:_priority_key", "return request.priority", "return 0"),
    ),
    _fault(
        "victim_by_age",
        "The youngest gives way, whatever its priority.",
        (
            "scheduler.room:make_room",
            "victim = running[plan.num_running - 1]",
            "victim = max(running[: plan.num_running], key=lambda r: r.handle)",
        ),
    ),
    _fault(
        "victim_from_the_front",
        "The first in the order gives way.",
        ("scheduler.room:make_room", "victim = running[plan.num_running - 1]", "victim = running[0]"),
    ),
    _fault(
        "newcomer_at_the_end",
        "Whoever enters a queue goes to its end.",
        (
            "projections.queues:enter",
            "queue.insert(bisect_left(queue, request.queue_key, key=_by_key), request)",
            "queue.append(request)",
        ),
    ),
    _fault(
        "share_tag_not_advanced",
        "What a tenant gets isn't charged to it.",
        (
            "projections.queues:_fair_share_key",
            "queues.tenant_tags[request.tenant] = start + cost",
            "queues.tenant_tags[request.tenant] = start",
        ),
    ),
    _fault(
        "share_clock_stopped",
        "Virtual time stands still: a tenant that was away has saved up.",
        (
            "projections.queues:enter",
            "if status is RUNNING and request.queue_key[0] > queues.virtual_now:",
            "if False:",
        ),
    ),
    _fault(
        "share_weight_ignored",
        "All tenants have the same share.",
        ("projections.queues:_fair_share_key", "config.tenant_weights.get(request.tenant, 1)", "1"),
    ),
    _fault(
        "not_reordered",
        "A new configuration leaves the requests in the old one's order.",
        (_FOLD + "_engine_opened", "queues.reorder(state.queues, event.config)", "pass"),
    ),
    _fault(
        "capacity_unchecked",
        "A reopened engine keeps what it can't hold.",
        ("scheduler.recovery:open_engine", "if not _can_hold(r, config)", "if False"),
    ),
)

SESSIONS = (
    _fault(
        "rewind_keeps_hash",
        "The next turn keeps the hash of a block whose last token it replaces.",
        (_REQUESTS + "begin_turn", "del request.block_hashes[len(request.tokens) // config.block_size :]", "pass"),
    ),
    _fault(
        "rewind_keeps_in_flight",
        "The end of a turn leaves what is in flight current.",
        (_FOLD + "_session_turn_ended", 'steps.mark_stale(state.window, request, "drop")', "pass"),
        (_FOLD + "_session_turn_ended", "counters.raise_epoch(request, 0)", "pass"),
    ),
    _fault(
        "rewind_keeps_computed",
        "The end of a turn keeps as computed what was only promised.",
        (_REQUESTS + "end_turn", "request.num_computed_tokens = request.next_position", "pass"),
    ),
    _fault(
        "last_token_kept",
        "The turn's last token stays in the context of the next.",
        (_REQUESTS + "begin_turn", "del request.tokens[-1]", "pass"),
    ),
    _fault(
        "chunk_applied_twice",
        "A chunk of input stays queued when it has been applied.",
        (_FOLD + "_begin_turn", "request.chunks.popleft()", "request.chunks[0]"),
    ),
    _fault(
        "sampling_of_the_last_turn",
        "A turn is sampled as the turn before.",
        (_REQUESTS + "begin_turn", "request.sampling = chunk.sampling", "pass"),
    ),
    _fault(
        "session_in_two_queues",
        "A session waits for input and runs on.",
        (_FOLD + "_session_turn_ended", "queues.leave(state.queues, request)", "pass"),
    ),
    _fault(
        "session_in_no_queue",
        "A session that waits for input is in no queue.",
        (_FOLD + "_session_turn_ended", "queues.enter(state.queues, request, IDLE)", "pass"),
    ),
    _fault(
        "sessions_never_give_way",
        "Sessions keep their blocks while others wait for them.",
        ("scheduler.scratch:Plan.reclaim_session", "if session.block_ids and", "if False and"),
    ),
    _fault(
        "reclaimed_while_shared",
        "A session's blocks are taken that a newcomer of the same step shares.",
        (
            "scheduler.scratch:Plan._keeps_blocks",
            "any(not set(session.block_ids).isdisjoint(newcomer.hit_block_ids) for newcomer in self.admissions)",
            "False",
        ),
    ),
    _fault(
        "expiry_off_by_one",
        "A session that has been idle for exactly as long as it may lives on.",
        (
            "scheduler.sessions:expire_sessions",
            "r.idle_since_ns <= command.idle_before_ns",
            "r.idle_since_ns < command.idle_before_ns",
        ),
    ),
)

ENCODER = (
    _fault(
        "encoder_evicted_while_used",
        "An encoder output may go while a request still needs it.",
        ("projections.encoder:use", "cache.evictable.pop(digest, None)", "pass"),
    ),
    _fault(
        "encoder_released_early",
        "An encoder output is let go before the places that it fills are certain.",
        (
            _STEPS + "output_delivered",
            "let_go_media(state, request, request.next_position)",
            "let_go_media(state, request, request.num_computed_tokens)",
        ),
    ),
    _fault(
        "encoder_leaked",
        "A request that lost its place keeps its hold on the encoder's outputs.",
        (_FOLD + "_end_epoch", "let_go_media(state, request)", "pass"),
    ),
    _fault(
        "encoder_first_of_two",
        "The first of two equal pictures lets go of both.",
        (
            "scheduler.media:let_go_media",
            "if not any(request.media[i].digest == media.digest for i in request.media_held):",
            "if True:",
        ),
    ),
    _fault(
        "encoder_budget_ignored",
        "The encoder does more in a step than it may.",
        ("scheduler.encoder_room:EncoderRoom.propose", "media.num_tokens > budget or going is None", "going is None"),
    ),
    _fault(
        "encoder_not_waited_for",
        "Places are computed before the encoder's output for them is there.",
        (
            "scheduler.encoder_room:EncoderRoom.propose",
            "return EncoderProposal(max(media.start - first, 0), items, evictions)",
            "continue",
        ),
    ),
)

TRIALS = (
    _fault(
        "token_clears_nobody",
        "Whoever gets a token stays under suspicion.",
        ("projections.suspicion:got_tokens", "forget(suspicion, handle)", "pass"),
    ),
    _fault(
        "accident_is_tried",
        "One worker's death is enough for a trial.",
        ("scheduler.trials:on_trial", "losses >= LOSSES_TO_TRY", "losses >= 1"),
    ),
    _fault(
        "all_suspects_tried",
        "All suspects are tried at once, so that nobody is ever alone.",
        ("scheduler.trials:on_trial", "worst[: max(1, len(worst) // 2)]", "worst"),
    ),
    _fault(
        "verdict_in_company",
        "A request is found out though others were in the step as well.",
        ("scheduler.trials:verdict", "len(state.window.in_flight[0].requests) != 1", "False"),
        (
            "scheduler.trials:verdict",
            "state.suspicion.num_alone.get(request.handle, 0) + 1 < LOSSES_ALONE_TO_CONVICT",
            "False",
        ),
    ),
    _fault(
        "verdict_too_early",
        "A request is found out the first time that it was alone.",
        (
            "scheduler.trials:verdict",
            "state.suspicion.num_alone.get(request.handle, 0) + 1 < LOSSES_ALONE_TO_CONVICT",
            "False",
        ),
    ),
    _fault(
        "quarantine_is_open",
        "What killed workers comes in again.",
        ("scheduler.admission:_check_quarantine", "if digest in state.suspicion.quarantined:", "if False:"),
    ),
    _fault(
        "lift_lifts_nothing",
        "What is let in again is refused all the same.",
        ("projections.suspicion:lift", "del suspicion.quarantined[digest]", "pass"),
    ),
    _fault(
        "others_run_on",
        "Who isn't tried runs on beside those who are.",
        (_PLAN + "plan_step", "trial is not None and plan.isolate(trial)", "False"),
    ),
    _fault(
        "others_come_in",
        "Who isn't tried comes in beside those who are.",
        (_PLAN + "_plan_waiting", "(trial is not None and request.handle not in trial)", "False"),
    ),
    _fault(
        "isolation_drops_output",
        "What is in flight of those who give way to a trial is thrown away.",
        ("scheduler.scratch:Plan.isolate", '"isolated", "deliver"', '"isolated", "drop"'),
    ),
    _fault(
        "dead_are_suspected",
        "Requests that have ended are suspected.",
        ("scheduler.trials:suspects_of_loss", "if r.status is not FINISHED", ""),
    ),
)

FAULTS: tuple[Fault, ...] = (*EPOCHS, *COMPLETION, *BLOCKS, *PLANNING, *POLICIES, *SESSIONS, *ENCODER, *TRIALS)
