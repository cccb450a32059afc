"""Forks: what if the engine had been another one from here on?

The history up to a position stays as it is. There the engine is opened again, as if it had been restarted, under the same
configuration with some changes; whoever asked for something afterwards asks for it again, at the same time; the model says
what it said. How long steps take is modelled: as the recorded steps did, or as told.

A fair comparison needs the same model on both sides. So the history is also played again without any change (`same`), next to
the figures of what was recorded. Crashes behind the fork are not played again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from refold.engine.checked import short
from refold.engine.history.checkpoints import image_of, state_of
from refold.engine.history.figures import Figures, Meter
from refold.engine.history.recording import RecordedTiming, Recording, fitted, recorded
from refold.engine.history.replay import unheard
from refold.engine.history.rerun import LinearTiming, Rerun, Timing
from refold.journal.errors import NotFound, Rejected
from refold.journal.events import EngineConfig
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.scheduler.recovery import MAX_TENANT_WEIGHT
from refold.scheduler.state import State

_FIXED = {"model", "model_fingerprint", "vocab_size", "eos_token_ids"}
_MOST = {
    "block_size": (1, 1024),
    "num_blocks": (1, 1 << 24),
    "max_num_seqs": (1, 1 << 16),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_model_len": (2, 1 << 24),
    "max_in_flight_steps": (1, 8),
    "decode_stagger": (1, 8),
    "num_speculative_tokens": (0, 8),
    "long_prefill_token_threshold": (0, 1 << 24),
    "watermark_blocks": (0, 1 << 24),
    "encoder_budget_tokens": (0, 1 << 24),
    "encoder_cache_tokens": (0, 1 << 24),
}


class Fork(NamedTuple):
    """Figures behind the fork: as recorded, played again under the same configuration, and under the changed one."""

    position: int
    config: EngineConfig
    changed: EngineConfig
    timing: LinearTiming
    is_recorded_timing: bool
    recorded: Figures
    same: Figures
    fork: Figures
    num_refused: int
    num_unfinished: int


def changed_config(config: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """The configuration with some fields changed; values may be text, as on a command line.

    Raises:
        Rejected: there is no such field, the value isn't one of its, or the whole doesn't fit together.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
    values: dict[str, Any] = {}
    for name, given in changes.items():
        if name not in types or name in _FIXED:
            raise Rejected(f"{name[:40]!r} can't be set: there are {', '.join(sorted(types.keys() - _FIXED))}")
        values[name] = _value(name, given, types[name])
    made = msgspec.structs.replace(config, **values)
    if made.watermark_blocks >= made.num_blocks:
        raise Rejected(
            f"watermark_blocks is {made.watermark_blocks}: give less than num_blocks, which is {made.num_blocks}"
        )
    return made


def _value(name: str, given: Any, kind: Any) -> Any:
    try:
        value = _read(given) if isinstance(given, str) else given
        converted = msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Rejected(f"{name} can't be {given!r}: {error}") from error
    low, high = _MOST.get(name, (0, 0))
    if name in _MOST and not low <= converted <= high:
        raise Rejected(f"{name} is {converted}: give {low} to {high}")
    for tenant, weight in converted.items() if name == "tenant_weights" else ():
        if not 1 <= weight <= MAX_TENANT_WEIGHT:
            raise Rejected(f"tenant_weights[{short(tenant)}] is {weight}: give a weight of 1 to {MAX_TENANT_WEIGHT}")
    return converted


def _read(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def fork(
    reader: JournalReader,
    position: int,
    changes: Mapping[str, Any],
    timing: LinearTiming | None = None,
    stream: str = DEFAULT_STREAM,
    on_record: Callable[[], object] = unheard,
) -> Fork:
    """Play the history behind `position` again, unchanged and changed.

    Raises:
        NotFound: there is no record at `position`, or nothing behind it.
        Rejected: the changes make no configuration, or there is no timing to be had.
        JournalCorrupt, Contradiction: as `replay`.
    """
    image, begin_ns, before, meter = b"", 0, 0, Meter()
    recording: Recording | None = None
    for record, events, state, recording in recorded(reader, stream, on_record):
        if record.position == position:
            image, begin_ns, before = image_of(state), record.time_ns, len(recording.arrivals)
        if record.position <= position:
            meter = _meter(state)
        else:
            meter.observe(record.time_ns, events)
    if recording is None or not image:
        raise NotFound(f"position {position}: the journal has no such record")
    config = state_of(image).opened_config
    if config is None:
        raise NotFound(f"position {position}: no engine has opened the journal there yet")
    changed = changed_config(config, changes)
    fit = timing or fitted(recording.steps)
    arrivals = recording.arrivals[before:]
    runs = []
    for each in (config, changed):
        how: Timing = timing or RecordedTiming(recording.steps, fit)
        run = Rerun(state_of(image), begin_ns, how, recording.oracle)
        measured = _meter(run.state)
        for facts in (run.open(each), run.facts(arrivals)):
            for fact in facts:
                measured.observe(fact.time_ns, fact.events)
        runs.append((measured.figures(), run))
    (same, _), (other, last) = runs
    return Fork(
        position=position,
        config=config,
        changed=changed,
        timing=fit,
        is_recorded_timing=timing is None,
        recorded=meter.figures(),
        same=same,
        fork=other,
        num_refused=last.num_refused,
        num_unfinished=len(last.state.requests.live()),
    )


def _meter(state: State) -> Meter:
    return Meter(state.pool.block_size)
