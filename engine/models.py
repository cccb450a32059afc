"""Models as the shell sees them: a description, a maker of workers, and text.

`simulated` needs neither weights nor torch; options follow a question mark: `simulated?step_ms=2&vocab=64&eos=0&len=256`.
Every other name is described by `refold.gpu.weights`, from metadata alone; torch is imported by the worker that needs it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import parse_qsl

from refold.gpu.batch import Worker
from refold.gpu.loading import Loading
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig

SIMULATED = "simulated"
MakeWorker = Callable[[EngineConfig], Worker]
WorkerPlace = Literal["process", "thread"]
Dtype = Literal["float32", "bfloat16", "int8"]
STEP_TIMEOUT_S = 300.0
START_TIMEOUT_S = 60.0


class Detokenizes(Protocol):
    """Tokens in, text out, never half a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is left at the end of the output, or of a turn: what follows starts afresh."""
        ...


class Text(Protocol):
    """A model's tokenizer and chat template."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens; without special tokens where it continues something. Raises Rejected."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation. Raises Rejected."""
        ...

    def detokenizer(self, prior_token_ids: Sequence[int]) -> Detokenizes:
        """A detokeniser that continues after `prior_token_ids`, whose text is out already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model by name. `kv_bytes_per_token` is 0 where the cache costs nothing."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    kv_bytes_per_token: int
    make_worker: MakeWorker
    load_text: Callable[[], Text]


class WorkerOptions(NamedTuple):
    """How a model's worker is to be run. `place` None: a process for a model with weights, a thread for the simulated one.

    `dtype` of weights and KV cache. `loading`: by which a process that loads its model can be given up on.
    """

    threads: int | None = None
    place: WorkerPlace | None = None
    step_timeout_s: float = STEP_TIMEOUT_S
    dtype: Dtype = "float32"
    start_timeout_s: float = START_TIMEOUT_S
    loading: Loading | None = None


def find_model(name: str, worker: WorkerOptions = WorkerOptions()) -> Model:  # noqa: B008 - a constant
    """The model that `name` means, with a worker run as told.

    Raises:
        Rejected: there is none, or its files are broken.
    """
    if is_simulated(name):
        return _simulated(name, _options(name, name.partition("?")[2]), worker)
    return _weighted(name, worker)


def is_simulated(name: str) -> bool:
    """Whether this model has no weights, so that its worker is a thread of this process unless told otherwise."""
    return name.partition("?")[0] == SIMULATED


_SIMULATED_OPTIONS = {"step_ms": (0, 60_000), "vocab": (2, 1 << 24), "eos": (-1, (1 << 24) - 1), "len": (2, 1 << 24)}


def _options(name: str, text: str) -> dict[str, int]:
    values = {"step_ms": 0, "vocab": 32_000, "eos": 2, "len": 4_096}
    for key, value in parse_qsl(text, keep_blank_values=True):
        low, high = _SIMULATED_OPTIONS.get(key, (1, 0))
        if low > high:
            raise Rejected(f"model {name[:80]!r}: {key[:40]!r} is no option; there are {', '.join(_SIMULATED_OPTIONS)}")
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 9 and low <= int(value) <= high):
            raise Rejected(f"model {name[:80]!r}: {key} is {value[:40]!r}; give {low} to {high}")
        values[key] = int(value)
    return values


def _simulated(name: str, options: dict[str, int], worker: WorkerOptions) -> Model:
    vocab_size, eos = options["vocab"], options["eos"]
    if eos >= vocab_size:
        raise Rejected(
            f"model {name[:80]!r}: eos is {eos}; give less than vocab, which is {vocab_size}, or -1 for none"
        )
    facts = f"refold simulated model 1 {vocab_size} {eos}"
    return Model(
        name=name,
        fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
        vocab_size=vocab_size,
        eos_token_ids=() if eos < 0 else (eos,),
        max_model_len=options["len"],
        kv_bytes_per_token=0,
        make_worker=lambda config: _worker(config, worker, "thread"),
        load_text=lambda: NumberText(vocab_size),
    )


class NumberText:
    """The simulated model's text: a prompt's bytes are its tokens, an output token is its number and a space."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - it has none
        """One token per byte of UTF-8."""
        return [byte % self._vocab_size for byte in text.encode()]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Role and content, one line each."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def detokenizer(self, prior_token_ids: Sequence[int]) -> Detokenizes:  # noqa: ARG002 - numbers need no context
        """A detokeniser without memory."""
        return _Numbers()


class _Numbers:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in token_ids)

    def flush(self) -> str:
        return ""


def _weighted(name: str, worker: WorkerOptions) -> Model:
    from refold.gpu.native import check_switch  # noqa: PLC0415 - the simulated model needs none of it
    from refold.gpu.weights import describe_model  # noqa: PLC0415

    check_switch()
    description = describe_model(name)
    spec = description.spec
    assert spec is not None, name
    return Model(
        name=description.name,
        fingerprint=description.fingerprint,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        max_model_len=description.max_model_len,
        kv_bytes_per_token=spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 * _BYTES[worker.dtype],
        make_worker=lambda config: _worker(config, worker, "process"),
        load_text=lambda: _load_text(name),
    )


_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "int8": 2}


def _worker(config: EngineConfig, options: WorkerOptions, usual_place: WorkerPlace) -> Worker:
    if (options.place or usual_place) == "process":
        from refold.gpu.process import ProcessWorker  # noqa: PLC0415 - who only reads a journal starts no process

        return ProcessWorker(
            config,
            threads=options.threads,
            dtype=options.dtype,
            step_timeout_s=options.step_timeout_s,
            start_timeout_s=options.start_timeout_s,
            loading=options.loading,
        )
    from refold.gpu.factory import create_worker  # noqa: PLC0415 - may bring torch

    return create_worker(config, threads=options.threads, dtype=options.dtype)


def _load_text(name: str) -> Text:
    from refold.engine.text import load_tokenizer  # noqa: PLC0415 - brings tokenizers

    return load_tokenizer(name)
