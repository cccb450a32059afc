"""Configuration at the edge: what callers may write, checked before anything depends on it.

pydantic checks types and ranges; what leaves this module are the frozen messages of the journal (`Sampling`,
`EngineConfig`). A value that can't be is one `Rejected`: the field, the value and what to write instead, in one line.
"""

from os import PathLike
from typing import Annotated, Literal, TypedDict

from msgspec import UNSET
from pydantic import Field, field_validator, model_validator

from refold.engine.checked import Checked, short
from refold.engine.models import START_TIMEOUT_S, STEP_TIMEOUT_S, Dtype, Model, WorkerPlace, is_simulated
from refold.engine.sampling_params import MAX_SEED
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Policy, Speculation
from refold.journal.store import DEFAULT_STREAM
from refold.scheduler.admission import MAX_NAME_CHARS
from refold.scheduler.recovery import MAX_TENANT_WEIGHT

KV_BUDGET_BYTES = 512 << 20
"""What the default pool may take; `num_blocks` overrules it."""

DEFAULT_NUM_BLOCKS = 4_096

_MAX_IDLE_S = 10.0**9
_Weight = Annotated[int, Field(ge=1, le=MAX_TENANT_WEIGHT)]
_BatchAndDrafts = tuple[Annotated[int, Field(ge=1, le=1 << 16)], Annotated[int, Field(ge=0, le=8)]]


class EngineArgs(Checked):
    """What an engine can be told. Only `model` has no default; every other one suits a laptop.

    Attributes:
        model: `smollm2`, a GGUF file, a folder of safetensors, or `simulated` (no weights, no torch).
        journal: `sqlite:///FILE`, a plain path, `postgresql://USER@HOST/DATABASE`, or `memory:`, which dies with the
            process.
        stream: which of the journal's streams this engine writes.
        durability: `synced` hands a token out once its record is on disk; `buffered` as soon as it is queued for the disk.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool; None for what half a GiB holds.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed per step, at most.
        max_model_len: tokens per request, prompt and output; None for what the model can.
        max_in_flight_steps: steps scheduled ahead of the worker's answer; 1 is synchronous scheduling.
        policy: `fcfs`, `priority` (small numbers first), or `fair_share` (tenants by their weights).
        tenant_weights: a tenant's share under `fair_share`; 1 for those not named.
        enable_prefix_caching: share the KV blocks of equal prefixes.
        long_prefill_token_threshold: cap on one request's prefill per step; 0 for none.
        watermark_blocks: blocks kept free at admission while something runs.
        admit_full_sequence: admit a request when all its known tokens fit, not just its first chunk.
        decode_stagger: steps between two samples of one request in flight; more than 1 suits a pipeline of devices. None for 1, or
            under `ngram` for max_in_flight_steps: what follows a token can't be looked up before the token is known.
        speculation: `off`, or drafts from the scheduler's prompt look-up (`ngram`) or the worker's (`worker`), which knows its newest tokens
            and so drafts with steps in flight. The tokens are what they are without.
        num_speculative_tokens: drafts per request and step, at most.
        speculation_by_batch: pairs (batch size, drafts), ascending: up to that many running requests, at most that many
            drafts each, and none in a larger batch; empty for no such rule.
        session_idle_s: seconds after which a session that waits for input is closed; None for never.
        snapshot_every_records: how many records may lie behind the newest snapshot of the state before the next is made, beside the
            engine; 0 for never. A journal opens by its newest snapshot and the records behind it.
        anchor: a file that gets the journal's head, at most every `anchor_every_s` seconds and when the engine closes; None for none.
            The journal must pass through the head that is there when the engine opens.
        anchor_every_s: see there; 0 for every commit.
        anchor_key: file with the Ed25519 private key that signs it, in PEM; None for no signature.
        record_logits: record a digest of each row of logits that a token was chosen from, for `refold replay --execute` to compare. Costs
            a percent or so of the worker's time, and 9 bytes a token.
        audit: keep the audit read model up to date beside the engine, at low priority; without it, whoever asks by SQL projects what is
            missing first. Needs a journal file or database.
        seed: root of the seeds drawn for requests that bring none; None draws one.
        threads: CPU threads of the worker; None for its own choice.
        dtype: of weights and KV cache. `bfloat16` takes half the memory of `float32` and half the time to read it, and rounds: the tokens
            differ sooner or later. `int8` is weights and the rows they are multiplied with in bytes, the cache in bfloat16:
            fastest, coarse, and needs a C++ compiler.
        worker: `process` runs the worker in a process of its own, which may be killed, hang or run out of memory without harm to
            the engine; `thread` in this one, for debuggers and notebooks. None for a process, or a thread if it's simulated.
        step_timeout_s: seconds after which a worker process that still computes one step is given up. A thread can't be given up: beside
            `worker="thread"`, a `make_worker`, or a simulated model, whose worker is a thread unless told otherwise, it is refused, as
            `start_timeout_s` is.
        start_timeout_s: seconds that a worker process has until its first sign of life; a busy machine may need more.
    """

    model: str = Field(min_length=1, max_length=4096, description="a model's name, file or folder")
    journal: str = Field(
        default="memory:", min_length=1, max_length=4096, description="sqlite:///FILE, a path or memory:"
    )
    stream: str = Field(
        default=DEFAULT_STREAM, min_length=1, max_length=200, description="1 to 200 printable characters"
    )
    durability: Literal["synced", "buffered"] = Field(default="synced", description="'synced' or 'buffered'")
    block_size: int = Field(default=16, ge=1, le=1024, description="1 to 1024")
    num_blocks: int | None = Field(default=None, ge=1, le=1 << 24, description="1 to 16777216, or None")
    max_num_seqs: int = Field(default=64, ge=1, le=1 << 16, description="1 to 65536")
    max_num_batched_tokens: int = Field(default=512, ge=1, le=1 << 20, description="1 to 1048576")
    max_model_len: int | None = Field(default=None, ge=2, le=1 << 24, description="2 to the model's length, or None")
    max_in_flight_steps: int = Field(default=2, ge=1, le=8, description="1 to 8")
    policy: Policy = Field(default="fcfs", description="'fcfs', 'priority' or 'fair_share'")
    tenant_weights: dict[str, _Weight] = Field(
        default={}, max_length=1 << 16, description=f"a dict from tenant to a weight of 1 to {MAX_TENANT_WEIGHT}"
    )
    enable_prefix_caching: bool = Field(default=True, description="True or False")
    long_prefill_token_threshold: int = Field(default=0, ge=0, le=1 << 24, description="0 (no cap) to 16777216")
    watermark_blocks: int = Field(default=0, ge=0, le=1 << 24, description="0 to less than num_blocks")
    admit_full_sequence: bool = Field(default=True, description="True or False")
    decode_stagger: int | None = Field(default=None, ge=1, le=8, description="1 to 8, or None")
    speculation: Speculation = Field(default="off", description="'off', 'ngram' or 'worker'")
    num_speculative_tokens: int = Field(default=3, ge=1, le=8, description="1 to 8")
    speculation_by_batch: tuple[_BatchAndDrafts, ...] = Field(
        default=(), max_length=64, strict=False, description="pairs (batch size, 0 to 8 drafts), e.g. ((8, 4), (32, 1))"
    )
    session_idle_s: float | None = Field(
        default=None, gt=0, le=_MAX_IDLE_S, description="more than 0 seconds, at most 10^9, or None"
    )
    snapshot_every_records: int = Field(default=4096, ge=0, le=1 << 40, description="0 for never, at most 2^40")
    anchor: str | None = Field(default=None, min_length=1, max_length=4096, description="a file, or None")
    anchor_every_s: float = Field(default=60.0, ge=0, le=_MAX_IDLE_S, description="0 seconds or more, at most 10^9")
    anchor_key: str | None = Field(default=None, min_length=1, max_length=4096, description="a file in PEM, or None")
    record_logits: bool = Field(default=False, description="True or False")
    audit: bool = Field(default=False, description="True or False")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="0 to 2^63 - 1, or None")
    threads: int | None = Field(default=None, ge=1, le=1024, description="1 to 1024, or None")
    dtype: Dtype = Field(default="float32", description="'float32', 'bfloat16' or 'int8'")
    worker: WorkerPlace | None = Field(default=None, description="'process', 'thread' or None")
    step_timeout_s: float = Field(
        default=STEP_TIMEOUT_S, gt=0, le=_MAX_IDLE_S, description="more than 0 seconds, at most 10^9"
    )
    start_timeout_s: float = Field(
        default=START_TIMEOUT_S, gt=0, le=_MAX_IDLE_S, description="more than 0 seconds, at most 10^9"
    )

    @field_validator("stream")
    @classmethod
    def _is_a_name(cls, stream: str) -> str:
        if not stream.isprintable():
            raise ValueError("give 1 to 200 printable characters")
        return stream

    @model_validator(mode="after")
    def _fit_together(self) -> "EngineArgs":
        complaint = (
            _complaint_of_timeouts(self)
            or _complaint_of_audit(self)
            or _complaint_of_tenants(self)
            or _complaint_of_batches(self)
        )
        if complaint:
            raise ValueError(complaint)
        return self

    def _stagger(self) -> int:
        if self.decode_stagger is not None:
            return self.decode_stagger
        return self.max_in_flight_steps if self.speculation == "ngram" else 1

    def resolve(self, model: Model) -> EngineConfig:
        """All that decisions depend on, for this model.

        Raises:
            Rejected: the options don't fit the model or each other.
        """
        max_model_len = model.max_model_len if self.max_model_len is None else self.max_model_len
        if max_model_len > model.max_model_len:
            raise Rejected(
                f"max_model_len is {max_model_len}: model {model.name!r} takes {model.max_model_len} at most"
            )
        num_blocks = _default_num_blocks(model, self.block_size) if self.num_blocks is None else self.num_blocks
        if self.watermark_blocks >= num_blocks:
            raise Rejected(
                f"watermark_blocks is {self.watermark_blocks}: give less than num_blocks, which is {num_blocks}"
            )
        return EngineConfig(
            model=model.name,
            model_fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_in_flight_steps=self.max_in_flight_steps,
            policy=self.policy,
            enable_prefix_caching=self.enable_prefix_caching,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark_blocks=self.watermark_blocks,
            admit_full_sequence=self.admit_full_sequence,
            decode_stagger=self._stagger(),
            speculation=self.speculation,
            num_speculative_tokens=0 if self.speculation == "off" else self.num_speculative_tokens,
            speculation_by_batch=self.speculation_by_batch,
            tenant_weights=self.tenant_weights,
            record_logits=True if self.record_logits else UNSET,
        )


class EngineOptions(TypedDict, total=False):
    """`EngineArgs` without its first two, for the type checker of whoever calls `Engine`."""

    stream: str
    durability: Literal["synced", "buffered"]
    block_size: int
    num_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_in_flight_steps: int
    policy: Policy
    tenant_weights: dict[str, int]
    enable_prefix_caching: bool
    long_prefill_token_threshold: int
    watermark_blocks: int
    admit_full_sequence: bool
    decode_stagger: int | None
    speculation: Speculation
    num_speculative_tokens: int
    speculation_by_batch: tuple[tuple[int, int], ...]
    session_idle_s: float | None
    snapshot_every_records: int
    record_logits: bool
    audit: bool
    anchor: str | None
    anchor_every_s: float
    anchor_key: str | None
    seed: int | None
    threads: int | None
    dtype: Dtype
    worker: WorkerPlace | None
    step_timeout_s: float
    start_timeout_s: float


PROCESS_TIMEOUTS = ("step_timeout_s", "start_timeout_s")
"""What a worker in the engine's own process can't be held to."""


def _complaint_of_timeouts(args: EngineArgs) -> str:
    given = [name for name in PROCESS_TIMEOUTS if name in args.model_fields_set]
    if not given or args.worker == "process":
        return ""
    told = f"{given[0]} is {getattr(args, given[0])} with "
    if args.worker == "thread":
        return f"{told}worker 'thread', which can't be given up: leave one of them out"
    if not is_simulated(args.model):
        return ""
    return (
        f"{told}a simulated model, whose worker is a thread unless told otherwise and can't be given up: leave it out, or give "
        "worker 'process'"
    )


def _complaint_of_tenants(args: EngineArgs) -> str:
    if args.tenant_weights and args.policy != "fair_share":
        return f"tenant_weights is given with policy {args.policy!r}: they count under 'fair_share' only"
    for name in args.tenant_weights:
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            return f"tenant_weights names {short(name)}: give tenants of at most {MAX_NAME_CHARS} printable characters"
    return ""


def _complaint_of_audit(args: EngineArgs) -> str:
    if args.audit and args.journal.startswith("memory:"):
        return (
            "audit is True with a journal in memory or a store of your own: name a journal file or database by its URL"
        )
    return ""


def _complaint_of_batches(args: EngineArgs) -> str:
    sizes = [size for size, _ in args.speculation_by_batch]
    if sizes != sorted(set(sizes)):
        return f"speculation_by_batch has batch sizes {short(sizes)}: give them in ascending order, each once"
    return ""


def _default_num_blocks(model: Model, block_size: int) -> int:
    if not model.kv_bytes_per_token:
        return DEFAULT_NUM_BLOCKS
    return max(1, min(DEFAULT_NUM_BLOCKS, KV_BUDGET_BYTES // (model.kv_bytes_per_token * block_size)))


def as_url(journal: object) -> str:
    """A journal's URL or path, for `EngineArgs` to judge.

    Raises:
        Rejected: it's neither.
    """
    if isinstance(journal, str | PathLike):
        return str(journal)
    raise Rejected(f"journal is {short(journal)}: give sqlite:///FILE, a path, memory: or a store")
