"""Settings: what a request and an engine were told, as the journal keeps it (`RequestSubmitted`, `EngineOpened`).

Fields that came later have a default that means what their absence meant, and aren't written while they hold it.
"""

from typing import Literal

import msgspec

Policy = Literal["fcfs", "priority", "fair_share"]
Speculation = Literal["off", "ngram", "worker"]


class Sampling(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen. Concrete: the seed is drawn before the request is journaled.

    `temperature` 0 means greedy. `top_k` 0 means no limit. `stop_token_ids` finish the request with reason `stop`, as
    does the model's end of sequence unless `ignore_eos`; both are masked until `min_tokens` tokens are out.

    `repetition_penalty` divides positive logits of tokens that the request has seen (prompt and outputs), and multiplies
    negative ones; `presence_penalty` is taken off the logits of its outputs, `frequency_penalty` once per occurrence.
    `logit_bias` holds pairs (token, what is added to its logit), ascending, each token once. `min_p` drops what is less
    likely than that share of the likeliest. `logprobs`: how many of the likeliest tokens are told beside each chosen one,
    null for no log-probabilities at all; `prompt_logprobs`, the same of each token of the prompt.
    """

    seed: int
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def asks_logprobs(self) -> bool:
        """Whether any log-probabilities are wanted."""
        return self.logprobs is not None or self.prompt_logprobs is not None


class EngineConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """All that decisions depend on. Written whole (defaults too): a journal explains itself.

    All but `record_logits`: it came later, and is written only where it's set.

    `max_in_flight_steps` is the depth of the window; 1 is synchronous scheduling. `max_num_batched_tokens` is the token
    budget of a step. `long_prefill_token_threshold` caps one request's prefill in a step (0: no cap).
    `watermark_blocks` stay free at admission while something runs. `admit_full_sequence` admits a request only if
    all its known tokens fit, not just its first chunk. `vocab_size` bounds what a worker may answer.

    `decode_stagger` is the distance in steps between two sampling entries of a request in flight (pipeline parallelism).
    `speculation`: drafts come from the scheduler's prompt look-up (`ngram`) or from the worker (`worker`), at most
    `num_speculative_tokens` of them; `speculation_by_batch` holds pairs (batch size, drafts): up to that many running
    requests, at most that many drafts, and none beyond the last pair. `encoder_budget_tokens` and `encoder_cache_tokens`
    count embeddings, per step and in all. `tenant_weights` are shares under `fair_share`; 1 if not named.
    `record_logits`: the worker digests each row of logits, for `LogitsRecorded`.
    """

    model: str
    model_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight_steps: int = 2
    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    admit_full_sequence: bool = True
    decode_stagger: int = 1
    speculation: Speculation = "off"
    num_speculative_tokens: int = 0
    speculation_by_batch: tuple[tuple[int, int], ...] = ()
    encoder_budget_tokens: int = 0
    encoder_cache_tokens: int = 0
    tenant_weights: dict[str, int] = {}
    record_logits: bool | msgspec.UnsetType = msgspec.UNSET
