"""How to sample: what callers may write of it, and the journal's form (`Sampling`) that leaves here."""

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from refold.engine.checked import Checked, short
from refold.journal.errors import Rejected
from refold.journal.events import Sampling
from refold.scheduler.admission import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)

MAX_SEED = 2**63 - 1
MAX_CHOICES = 64
_MAX_INT = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class SamplingParams(Checked):
    """How a request's tokens are chosen.

    Greedy is `temperature=0`. Without a `seed` the engine draws one; with one, the same prompt gives the same tokens
    whatever else runs. Generation ends with reason `stop` at the model's end of sequence (unless `ignore_eos`) or at one of
    `stop_token_ids`, both masked for the first `min_tokens` tokens, and with `length` after `max_tokens`. More than the model's length
    leaves behind the prompt is refused; the default ends there in silence.

    In this order: `repetition_penalty` makes tokens of prompt and output less likely, `presence_penalty` those of the output,
    `frequency_penalty` those of the output the more the oftener they came; `logit_bias` is added to the logits of single tokens;
    then `temperature`, `top_k`, `top_p`, and `min_p`, which drops what is less likely than that share of the likeliest.

    `logprobs` tells what the model thought of each token, and of so many of the likeliest beside it; `prompt_logprobs`, the same
    of the prompt. `n` completions are generated of one prompt, each with a seed of its own.

    Raises:
        Rejected: names the field, its value and what to give instead.
    """

    temperature: float = Field(default=1.0, ge=0, le=1e6, description="0 (greedy) to 1000000")
    top_k: int = Field(default=0, ge=0, le=_MAX_INT, description=f"0 (no limit) to {_MAX_INT}")
    top_p: float = Field(default=1.0, gt=0, le=1, description="more than 0, at most 1")
    max_tokens: int = Field(default=128, ge=1, le=_MAX_INT, description=f"1 to {_MAX_INT}")
    min_tokens: int = Field(default=0, ge=0, le=_MAX_INT, description="0 to max_tokens")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="0 to 2^63 - 1, or None")
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=256, strict=False, description="up to 256 token ids")
    ignore_eos: bool = Field(default=False, description="True or False")
    min_p: float = Field(default=0.0, ge=0, le=1, description="0 (no limit) to 1")
    repetition_penalty: float = Field(
        default=1.0,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description=f"{MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}; 1 is none",
    )
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY, description="-2 to 2")
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY, description="-2 to 2")
    logit_bias: dict[int, _Bias] | None = Field(
        default=None,
        max_length=MAX_BIASES,
        description=f"a dict from up to {MAX_BIASES} token ids to -100 to 100, or None",
    )
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description=f"0 to {MAX_LOGPROBS}, or None")
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description=f"0 to {MAX_LOGPROBS}, or None"
    )
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description=f"1 to {MAX_CHOICES}")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_of_json(cls, value: Any) -> Any:
        """JSON has no keys but texts."""
        if type(value) is not dict or len(value) > MAX_BIASES:
            return value
        ids = [int(key) if type(key) is str and _TOKEN_ID.fullmatch(key) else key for key in value]
        if len(set(ids)) < len(ids):
            raise ValueError("give each token one bias")
        return dict(zip(ids, value.values(), strict=True))

    @model_validator(mode="after")
    def _min_within_max(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}: lower it")
        return self

    def resolve(self, seed: int, vocab_size: int) -> Sampling:
        """The journal's form; `seed` is taken where the caller gave none.

        Raises:
            Rejected: a stop token or a token with a bias is not one of the model's.
        """
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise Rejected(f"stop_token_ids has {short(token)}: give token ids of the model, 0 to {vocab_size - 1}")
        biases = self.logit_bias or {}
        for token in biases:
            if not 0 <= token < vocab_size:
                raise Rejected(f"logit_bias has {short(token)}: give token ids of the model, 0 to {vocab_size - 1}")
        return Sampling(
            seed=seed if self.seed is None else self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted(biases.items())),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
