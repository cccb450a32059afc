"""Prompts from the command line, a file or stdin, before any engine is opened.

A file (or stdin) has one prompt per line. A line that starts with `{` is a JSON object:

    {"prompt": "Why is the sky blue?", "sampling": {"max_tokens": 20, "temperature": 0.7}}
    {"messages": [{"role": "user", "content": "Hello"}], "request_id": "hello-1", "priority": 1}
    {"prompt": [1, 2, 3]}
"""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from refold.engine.cli.failures import Complaint
from refold.engine.config import SamplingParams
from refold.engine.submissions import choice_id
from refold.journal.errors import Rejected

STDIN = "-"
MAX_LINE_BYTES = 64 << 20


class Asked(msgspec.Struct):
    """One prompt as it was asked for. `place` says where it stands, for messages."""

    place: str
    prompt: str | list[int] | list[dict[str, Any]]
    sampling: SamplingParams
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""

    def ids(self) -> list[str]:
        """The names of its completions, once it has one itself."""
        if self.request_id is None:
            return []
        if self.sampling.n == 1:
            return [self.request_id]
        return [choice_id(self.request_id, number) for number in range(self.sampling.n)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""


def read_prompts(arguments: Sequence[str], file: str | None, sampling: dict[str, Any]) -> list[Asked]:
    """All prompts, in the order given: arguments first, then the file.

    Args:
        arguments: texts; `-` stands for the lines of stdin.
        file: a path, or `-` for stdin.
        sampling: what the options say, for every prompt that doesn't say otherwise.

    Raises:
        Complaint: a file can't be read, or isn't UTF-8, or a line isn't what it should be, or nothing but blank lines came.
        Rejected: the options are no sampling parameters.
    """
    common = SamplingParams(**sampling)
    asked: list[Asked] = []
    for number, text in enumerate(arguments, start=1):
        if text == STDIN:
            asked += _from_bytes(sys.stdin.buffer.read(), "stdin", sampling, common)
        else:
            asked.append(Asked(f"prompt {number}", text, common))
    if file == STDIN:
        asked += _from_bytes(sys.stdin.buffer.read(), "stdin", sampling, common)
    elif file is not None:
        asked += _from_bytes(_contents(file), file, sampling, common)
    if not asked and (arguments or file is not None):
        source = "stdin" if STDIN in (*arguments, file) else file
        raise Complaint(f"{source} has no prompt in it", "give one prompt per line; blank lines don't count")
    return asked


def _contents(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Complaint(f"cannot read {file}: {reason}", "--file takes a file of prompts, one per line") from error


def _from_bytes(data: bytes, source: str, sampling: dict[str, Any], common: SamplingParams) -> list[Asked]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        what = f"{source} is not UTF-8: byte 0x{data[error.start]:02x} in line {number}"
        raise Complaint(what, "convert it, for example with `iconv -t utf-8`") from error
    asked = []
    for number, ended in enumerate(text.split("\n"), start=1):
        place, line = f"{source} line {number}", ended.removesuffix("\r")
        if line.startswith("{"):
            asked.append(_from_json(line, place, sampling))
        elif line.strip():
            asked.append(Asked(place, line, common))
    return asked


def _from_json(line: str, place: str, sampling: dict[str, Any]) -> Asked:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        if half := _half_pair(line):
            what = f"{place}: \\u{ord(half):04x} without its other half is no character"
            raise Complaint(what, "remove it, or write both halves of the pair, or the character itself") from error
        hint = 'a line that starts with { is JSON: {"prompt": "...", "sampling": {"max_tokens": 20}} or {"messages": [...]}'
        raise Complaint(f"{place}: {error}", hint) from error
    if (given.prompt is None) == (given.messages is None):
        raise Complaint(f"{place}: it has both or neither of prompt and messages", "give one of them")
    if given.messages is not None and not given.messages:
        raise Complaint(
            f"{place}: messages is empty", 'give at least one: {"messages": [{"role": "user", "content": "..."}]}'
        )
    try:
        params = SamplingParams(**{**sampling, **given.sampling})
    except (Rejected, TypeError) as error:
        raise Complaint(f"{place}: {error}", "nothing was started; correct the line and try again") from error
    prompt = given.messages if given.prompt is None else given.prompt
    assert prompt is not None
    return Asked(place, prompt, params, given.request_id, given.priority, given.cache_salt)


def _half_pair(line: str) -> str:
    """The first lone surrogate in a line of JSON, whose parsers report it as anything but that; empty if there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        match = re.search("[\ud800-\udfff]", json.dumps(json.loads(line), ensure_ascii=False))
        return match[0] if match else ""
    return ""
