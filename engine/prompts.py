"""Prompts from outside: text, token ids or a conversation, checked and turned into token ids."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from refold.engine.checked import plain_int, short
from refold.engine.models import Text
from refold.engine.sampling_params import SamplingParams
from refold.journal.errors import Rejected

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Extension = str | Sequence[int]

_MAX_CHARS_PER_TOKEN = 256
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def prompt_token_ids(prompt: Prompt, text: Text | Rejected, vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt's tokens.

    Args:
        prompt: text, token ids, or messages with `role` and `content`.
        text: the model's tokenizer, or why there is none.
        vocab_size: token ids are 0 to this, exclusive.
        max_model_len: tokens that the model takes, with at least one of them generated.

    Raises:
        Rejected: it is none of these, is empty, too long, or has what no tokenizer takes.
    """
    if isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], Mapping)):
        return _checked(list(prompt), vocab_size, max_model_len)
    if isinstance(text, Rejected):
        raise text.with_traceback(None)
    if isinstance(prompt, list | tuple):
        plain = text.render_chat(_messages(prompt, max_model_len))
    elif isinstance(prompt, str):
        plain = prompt
    else:
        raise Rejected(f"the prompt is a {type(prompt).__name__}: give text, a list of token ids or a list of messages")
    if not plain:
        raise Rejected("the prompt is empty: give at least one character")
    check_text("the prompt", plain, max_model_len * _MAX_CHARS_PER_TOKEN)
    return _checked(text.encode(plain), vocab_size, max_model_len)


def extension_token_ids(extension: Extension, text: Text | Rejected, vocab_size: int, max_model_len: int) -> list[int]:
    """The tokens of a session's next input; none for nothing. Text is encoded without special tokens: it continues.

    Raises:
        Rejected: it is neither text nor token ids, too long, or has what no tokenizer takes.
    """
    if isinstance(extension, list | tuple) and not (extension and isinstance(extension[0], Mapping)):
        return _checked(list(extension), vocab_size, max_model_len) if extension else []
    if not isinstance(extension, str):
        what = "a list of messages" if isinstance(extension, list | tuple) else f"a {type(extension).__name__}"
        raise Rejected(
            f"the extension is {what}: give text or token ids; a chat template renders whole conversations only"
        )
    if not extension:
        return []
    if isinstance(text, Rejected):
        raise text.with_traceback(None)
    check_text("the extension", extension, max_model_len * _MAX_CHARS_PER_TOKEN)
    token_ids = text.encode(extension, add_special_tokens=False)
    return _checked(token_ids, vocab_size, max_model_len) if token_ids else []


def check_text(what: str, text: object, max_chars: int) -> str:
    """Return `text` if it is one that can be tokenised and journaled.

    Raises:
        Rejected: it is no string, too long, or has a lone surrogate or U+0000.
    """
    if not isinstance(text, str):
        raise Rejected(f"{what} is a {type(text).__name__}: give a string")
    if len(text) > max_chars:
        raise Rejected(f"{what} has {len(text)} characters: give at most {max_chars}")
    if (found := _NO_TEXT.search(text)) is not None:
        raise Rejected(f"{what} has U+{ord(found[0]):04X} at index {found.start()}, which is no text: remove it")
    return str.__str__(text)  # of a subclass, the text alone: the journal's encoder takes no other


def check_priority(priority: object) -> int:
    """Return `priority` if it is a 64-bit integer; raises Rejected otherwise."""
    number = plain_int(priority)
    if number is None or not -(2**63) <= number < 2**63:
        raise Rejected(f"priority is {short(priority)}: give a 64-bit integer; small runs first")
    return number


def check_sampling(sampling: object) -> SamplingParams:
    """Return `sampling`, or the defaults for None; raises Rejected if it is something else."""
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise Rejected(f"sampling is a {type(sampling).__name__}: give SamplingParams(...) or None")
    return sampling


def check_room(sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> None:
    """What was asked for fits behind the prompt. `max_tokens` that nobody gave is no promise, and ends with the model's length.

    Raises:
        Rejected: it doesn't.
    """
    room = max_model_len - num_prompt_tokens
    if "max_tokens" in sampling.model_fields_set and sampling.max_tokens > room:
        raise Rejected(
            f"max_tokens is {sampling.max_tokens}, and the model takes {max_model_len} tokens, {num_prompt_tokens} of them prompt: "
            f"give at most {room}"
        )


def _checked(token_ids: list[int], vocab_size: int, max_model_len: int) -> list[int]:
    if not token_ids:
        raise Rejected("the prompt is empty: give at least one token")
    if len(token_ids) >= max_model_len:
        raise Rejected(
            f"the prompt has {len(token_ids)} tokens, the model takes {max_model_len} with at least one of them "
            f"generated: shorten the prompt to {max_model_len - 1}"
        )
    for index, given in enumerate(token_ids):
        token = given if type(given) is int else plain_int(given)
        if token is None or not 0 <= token < vocab_size:
            raise Rejected(f"prompt token {short(given)} at index {index}: give token ids from 0 to {vocab_size - 1}")
        token_ids[index] = token
    return token_ids


def _messages(messages: Sequence[Any], max_model_len: int) -> list[dict[str, Any]]:
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise Rejected(f"message {index} is a {type(message).__name__}: give a dict with role and content")
        for key in ("role", "content"):
            check_text(f"{key} of message {index}", message.get(key), max_model_len * _MAX_CHARS_PER_TOKEN)
        checked.append(dict(message))
    return checked
