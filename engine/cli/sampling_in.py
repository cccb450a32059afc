"""How tokens are chosen, as options of a command line."""

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--max-tokens",
        type=int,
        help="Tokens per prompt, at most; 128 unless given, or what the model has room for.",
    ),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, default=0, help="Only the K likeliest tokens; 0 for all."),
    click.option("--top-p", type=float, default=1.0, help="Only the likeliest tokens that make up this probability."),
    click.option(
        "--min-p", type=float, default=0.0, help="Only tokens at least this share as likely as the likeliest."
    ),
    click.option("--repetition-penalty", type=float, default=1.0, help="More than 1: prompt and output repeat less."),
    click.option("--presence-penalty", type=float, default=0.0, help="Off the logit of what the output has; -2 to 2."),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same, for each time that it has it."),
    click.option("--seed", type=int, help="Of every prompt; without one the engine draws one each."),
    click.option("-n", "--n", "n", type=int, default=1, help="Completions per prompt, each with a seed of its own."),
    click.option("--logprobs", type=int, help="With --json: log-probabilities, of K likeliest tokens too; 0 for none."),
    click.option("--prompt-logprobs", type=int, help="The same, of the prompt."),
)
_NAMES = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that make up `SamplingParams`. What has no option can be said in a prompt's line of JSON."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def taken_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Take these options out of all that there are, without `max_tokens` if nobody gave it: then it is no promise."""
    taken = {name: options.pop(name) for name in _NAMES}
    return {name: value for name, value in taken.items() if name != "max_tokens" or value is not None}
