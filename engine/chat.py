"""Chat templates: a conversation as the prompt that the model was trained on.

A template is a program that came with the weights, so it is not trusted: it runs in jinja2's immutable sandbox, knows the
messages and the model's special tokens, and no clock. What it writes is plain text to the tokenizer, which recognises special
tokens anywhere in it, in a user's words too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from refold.journal.errors import Rejected

Message = Mapping[str, Any]


def render_template(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """Render a chat template in a sandbox. Raises Rejected if it fails or refuses the messages."""
    _check_messages(messages)
    try:
        from jinja2 import TemplateError  # noqa: PLC0415 - only where a chat is rendered
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
    except ImportError as error:
        raise Rejected("chat templates need jinja2: pip install 'refold[gpu]'") from error

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(template, globals={"raise_exception": raise_exception}).render(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **special_tokens
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Rejected(
            f"the model's chat template refuses the messages: {error}; check roles and their order"
        ) from error


def _check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise Rejected("a chat needs at least one message, e.g. {'role': 'user', 'content': 'Hello'}")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise Rejected(f"message {index} has no {key!r} text; each message needs a 'role' and a 'content'")
