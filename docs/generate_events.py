"""Writes docs/reference/events.md from the vocabulary: `python docs/generate_events.py`.

Types, defaults and the text of each event come from `journal/events.py`; what a field means is said here, once per name
and again only where an event means something of its own by it. A field without a meaning is an error, so that nobody adds
one unexplained.
"""

import inspect
import sys
import types
import typing
from pathlib import Path

import msgspec

from refold.journal import events
from refold.journal.content import TAKEN

PAGE = Path(__file__).parent / "reference" / "events.md"

HEAD = """<!-- Written by docs/generate_events.py from journal/events.py: edit those. -->

# Events

Schema version {version}. The body of a record is a JSON array of events; each is an object whose `type` is one of the names
below. Unknown fields and types are refused. These columns are not in the body, where their length stands in their place, but in
the record's content, an array that begins with a salt and has them in the same order: {taken}.

{theory}

"""

NESTED = (
    events.EngineConfig,
    events.Sampling,
    events.Media,
    events.Admission,
    events.BlockAllocation,
    events.Drafts,
    events.EncoderInput,
)

MEANINGS = {
    "EngineOpened.stream": "the name of the stream that it was written to; no hash covers the name under which a store keeps it",
    "admissions": "the requests that enter the running batch with this step",
    "admit_full_sequence": "admit a request only if all its known tokens fit, not just its first chunk",
    "allocations": "blocks newly owned by entries of this step",
    "arrival_ns": "wall clock at arrival, nanoseconds since 1970",
    "block_ids": "the blocks, in the order in which they join the block table",
    "block_size": "tokens per KV block",
    "cache_salt": "prefixes are shared only among requests with the same salt",
    "cause": "who or what asked",
    "chunk_entries": "entries that end before the request's last known position and sample nothing",
    "config": "all that decisions depend on",
    "counts": "tokens that came back, per entry",
    "OutputDelivered.counts": "tokens that came back, per entry; empty means one each",
    "delivered": "per entry: handed out (`true`) or thrown away (`false`)",
    "digest": "SHA-256 of the folded state just before this event, in hexadecimal",
    "enable_prefix_caching": "share the KV blocks of equal prefixes",
    "engine_epoch": "which life of the engine; each one that opens the journal takes the next number",
    "entry": "index of the entry in the step's columns",
    "environment": "what the worker's numbers depend on: device, versions, threads",
    "eos_token_ids": "tokens that end a sequence, unless the request ignores them",
    "epoch": "the epoch that the request runs in from here",
    "evicted_block_ids": "blocks whose cached content was given up for this step's allocations",
    "first_output_indices": "output index of each entry's first token",
    "StaleOutputConsumed.first_output_indices": "output index of each entry's first delivered token; -1 where none was",
    "first_positions": "per entry: position in the request of the first token computed",
    "for_handle": "the request that needed the blocks",
    "free_blocks": "blocks that were free then",
    "generation": "which worker, counted from 1",
    "handle": "the request",
    "handles": "the requests, one per entry, in batch order",
    "WorkerLost.handles": "the requests that had work in flight or blocks",
    "hit_block_ids": "cached blocks that it shares: the tokens in them are not computed again",
    "ignore_eos": "go on after an end-of-sequence token",
    "kind": "what sort of worker",
    "long_prefill_token_threshold": "most prompt tokens of one request in a step; 0 for no cap",
    "max_in_flight_steps": "steps scheduled ahead of the worker's answer; 1 is synchronous scheduling",
    "max_model_len": "most tokens of a request, prompt and output together",
    "max_num_batched_tokens": "most tokens computed in a step",
    "max_num_seqs": "most requests that run at once",
    "max_tokens": "most output tokens",
    "message": "what went wrong, for people",
    "min_tokens": "output tokens before which no token ends the request",
    "model": "its name, file or folder",
    "model_fingerprint": "digest of its weights and configuration",
    "needed_blocks": "blocks that were needed",
    "num_blocks": "KV blocks in the pool",
    "num_computed_tokens": "tokens whose keys and values were lost with the blocks",
    "num_output_tokens": "tokens delivered in all",
    "num_stale_output_tokens": "scheduled tokens, still in flight, that are stale from now on",
    "num_tokens": "per entry: tokens to compute",
    "StaleOutputConsumed.num_tokens": "per entry: tokens that leave the stale counter",
    "policy": "order of the waiting queue",
    "priority": "smaller runs first, under the policy `priority`",
    "prompt_token_ids": "the prompt",
    "reason": "why",
    "refold_version": "the version that wrote what follows",
    "released_block_ids": "the blocks that it gave back",
    "request_id": "the client's name for it; written nowhere else",
    "reset_running": "whether running requests were preempted for it",
    "root_seed": "seeds of requests that bring none are drawn from it",
    "sampling": "how its tokens are chosen",
    "seed": "seed of the sampling noise",
    "stale_policy": "what happens to stale tokens when they come back",
    "step": "number of the step",
    "steps": "the steps in flight that went with it",
    "stop_token_id": "the token that ended it, if one did",
    "stop_token_ids": "tokens that end the request with reason `stop`",
    "temperature": "0 is greedy",
    "token_ids": "the tokens of all entries, one after the other",
    "top_k": "choose among the k likeliest tokens; 0 for no limit",
    "top_p": "choose among the likeliest tokens that together have this probability",
    "vocab_size": "token ids run from 0 to one less",
    "watermark_blocks": "blocks kept free at admission while something runs",
    "accepted_drafts": "per entry: drafts that the verification accepted; empty if the step had none",
    "adapter": "prefixes are shared only among requests with the same adapter",
    "computed": "whether this step runs the encoder for it",
    "decode_stagger": "steps between two sampling entries of one request in flight",
    "drafts": "draft tokens of the scheduler's",
    "encoder_budget_tokens": "most embeddings that the encoder computes in a step",
    "encoder_cache_tokens": "embeddings that the encoder cache holds",
    "encoder_evictions": "digests dropped from the encoder cache before the step runs",
    "encoder_inputs": "media that entries of this step need",
    "grammar": "name of the grammar that its output must follow",
    "media": "multimodal inputs, in order of their place in the prompt",
    "EncoderInput.media": "number of the media item in its request",
    "Media.digest": "digest of the item's content",
    "mode": "what is held back",
    "num_drafts": "per entry: how many of its tokens are drafts, the last ones; empty if none has any",
    "num_speculative_tokens": "most drafts of an entry",
    "Media.num_tokens": "places that it takes in the prompt",
    "SessionTurnEnded.num_output_tokens": "tokens delivered in this turn",
    "SessionTurnEnded.handle": "the session",
    "SessionExtended.handle": "the session",
    "SessionClosed.handle": "the session",
    "SessionExtended.token_ids": "the chunk",
    "DraftsProposed.token_ids": "the drafts",
    "Drafts.token_ids": "the drafts",
    "resumable": "whether it is a session, whose input comes in chunks",
    "speculation": "where drafts come from",
    "speculation_by_batch": "pairs of batch size and most drafts, the smaller batch first",
    "start": "position of its first place in the prompt",
    "tenant": "whose share it counts against, under the policy `fair_share`",
    "tenant_weights": "shares by tenant; 1 for those not named",
    "positions": "the records that lost some of their content",
    "content_hashes": "SHA-256 of what is left of each record's content, in hexadecimal; empty where nothing is",
    "ContentRedacted.handles": "the requests whose tokens were erased",
    "ContentRedacted.reason": "who asked, and why",
    "frequency_penalty": "taken off the logit of a token for each time that it is among the outputs",
    "presence_penalty": "taken off the logit of a token that is among the outputs",
    "repetition_penalty": "more than 1 makes tokens of prompt and outputs less likely; 1 is none",
    "logit_bias": "pairs of a token and what is added to its logit",
    "min_p": "drop tokens less likely than this share of the likeliest; 0 for none",
    "logprobs": "likeliest tokens told beside each chosen one, with their log-probabilities; `null` for none of it",
    "prompt_logprobs": "the same for each token of the prompt",
    "record_logits": "record a digest of each row of logits",
    "num_top": "per entry: likeliest tokens told beside each token",
    "PromptLogprobsDelivered.num_top": "likeliest tokens told beside each token",
    "PromptLogprobsDelivered.count": "tokens of the prompt, all but the first",
    "LogprobsDelivered.counts": "tokens handed out, per entry",
    "surprisals": "per token: rank, surprisal, and id and surprisal of each of the likeliest",
    "digests": "per row: 64 bits",
    "LogitsRecorded.handles": "whose row, one per row",
    "content_digest": "what tells its like, in hexadecimal",
    "num_lost_workers": "workers that died with it since its last token",
    "suspects": "the live requests of the step that it died at, if it may have been for one of them",
    "time_ns": "when, wall clock, nanoseconds since 1970",
}


def page() -> str:
    """The whole page."""
    module_text = inspect.cleandoc(events.__doc__ or "").partition("\n\n")[2]
    parts = [HEAD.format(version=events.SCHEMA_VERSION, theory=module_text, taken=_taken())]
    parts += [_section(event, "##") for event in events.EVENT_TYPES]
    parts += ["## Parts of events\n\n", *(_section(part, "###") for part in NESTED)]
    return "".join(parts).rstrip("\n") + "\n"


def _taken() -> str:
    return ", ".join(f"`{event.__name__}.{field}`" for event, field in TAKEN.items())


def meaning(struct: str, field: str) -> str:
    """What a field says.

    Raises:
        KeyError: nobody has written that down yet.
    """
    own = MEANINGS.get(f"{struct}.{field}") or MEANINGS.get(field)
    if own is None:
        raise KeyError(f"{struct}.{field} has no meaning: add it to MEANINGS in docs/generate_events.py")
    return own


def _section(struct: type[msgspec.Struct], mark: str) -> str:
    rows = [
        f"| `{field.name}` | {_json_type(field.type)} | {_default(field)} | {meaning(struct.__name__, field.name)} |"
        for field in msgspec.structs.fields(struct)
    ]
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    return f"{mark} {struct.__name__}\n\n{inspect.getdoc(struct)}\n\n" + "\n".join(table) + "\n\n"


def _json_type(kind: typing.Any) -> str:
    plain = {
        msgspec.UnsetType: "absent",
        int: "integer",
        str: "string",
        bool: "boolean",
        float: "number",
        type(None): "null",
    }
    if kind in plain:
        return plain[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (list, tuple):
        return f"array of {_json_type(arguments[0])}"
    if origin is dict:
        return f"object of {_json_type(arguments[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_json_type(argument) for argument in arguments)
    assert issubclass(kind, msgspec.Struct), kind
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.UNSET:
        return "absent"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
