"""A portrait: one state as plain data, with the counters under the names that engineers know them by."""

from typing import Any

import msgspec

from refold.projections.requests import FINISHED, Request
from refold.projections.steps import InFlightStep
from refold.scheduler.state import State, digest


def portrait(state: State) -> dict[str, Any]:
    """The state as JSON-ready data. Counts are tokens, blocks or steps, as their names say."""
    return {
        "engine": _engine(state),
        "window": [_step(state, step) for step in state.window.in_flight],
        "next_step": state.window.next_step,
        "running": [r.request_id for r in state.queues.running],
        "waiting": [r.request_id for r in state.queues.waiting],
        "requests": [request_portrait(r) for r in state.requests.by_handle.values()],
        "pool": pool_portrait(state),
        "encoder_cache": {"num_used": state.encoder.used, "capacity": state.encoder.capacity},
        "digest": digest(state),
    }


def _engine(state: State) -> dict[str, Any]:
    return {
        "engine_epoch": state.engine_epoch,
        "is_open": state.is_open,
        "paused": state.paused,
        "worker_generation": state.worker_generation,
        "worker_alive": state.worker_alive,
        "config": msgspec.to_builtins(state.opened_config),
    }


def _step(state: State, step: InFlightStep) -> dict[str, Any]:
    by_handle = state.requests.by_handle
    return {
        "step": step.step,
        "requests": [by_handle[handle].request_id for handle in step.handles],
        "num_tokens": list(step.num_tokens),
        "chunk_entries": sorted(step.chunk_entries),
        "stale": {by_handle[step.handles[entry]].request_id: policy for entry, policy in sorted(step.stale.items())},
    }


def request_portrait(r: Request) -> dict[str, Any]:
    """One request's counters, in tokens where they don't say otherwise."""
    return {
        "request_id": r.request_id,
        "handle": r.handle,
        "status": r.status,
        "finish_reason": r.finish_reason if r.status is FINISHED else None,
        "epoch": r.epoch,
        "num_prompt_tokens": r.num_prompt_tokens,
        "num_output_tokens": r.num_output_tokens,
        "next_output_index": r.next_output_index,
        "num_computed_tokens": r.num_computed_tokens,
        "num_in_flight_tokens": r.num_in_flight_tokens,
        "num_stale_output_tokens": r.num_stale_output_tokens,
        "num_deliverable_stale_tokens": r.num_deliverable_stale_tokens,
        "num_output_placeholders": r.num_output_placeholders,
        "num_sampling_in_flight": r.num_sampling_in_flight,
        "num_preemptions": r.num_preemptions,
        "num_drafts": len(r.drafts),
        "max_total_tokens": r.max_total_tokens,
        "waits_for_grammar": r.waits_for_grammar,
        "is_session": r.resumable,
        "priority": r.priority,
        "num_blocks": len(r.block_ids),
        "block_ids": list(r.block_ids),
    }


def pool_portrait(state: State) -> dict[str, Any]:
    """The pool's counts, in blocks."""
    pool = state.pool
    return {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "num_owned_blocks": sum(1 for count in pool.ref_counts if count),
        "num_shared_blocks": sum(1 for count in pool.ref_counts if count > 1),
        "num_fenced_blocks": pool.num_fenced,
        "num_blank_blocks": len(pool.free_blank),
        "num_cached_blocks": len(pool.free_cached),
        "num_hashed_blocks": len(pool.block_by_hash),
    }
