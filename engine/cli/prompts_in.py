"""Prompts from the command line, a file or stdin, before any engine is opened.

A file (or stdin) has one prompt per line. A line that starts with `{`, blanks apart, is a JSON object:

    {"prompt": "Why is the sky blue?", "sampling": {"max_tokens": 20, "temperature": 0.7}}
    {"messages": [{"role": "user", "content": "Hello"}], "request_id": "hello-1", "priority": 1}
    {"prompt": [1, 2, 3]}
"""

import contextlib
import json
import re
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from refold.engine.cli.failures import Complaint
from refold.engine.history.plain import count
from refold.engine.sampling_params import SamplingParams
from refold.engine.submissions import choice_id
from refold.journal.errors import Rejected

STDIN = "-"
MAX_LINE_BYTES = 64 << 20


_CORRECT = "nothing was started for it; correct {} and give that line again"


class Asked(msgspec.Struct):
    """One prompt as it was asked for.

    `place` says where it stands, for messages; `own` are the sampling parameters that its line says itself, None where it is no line
    of a file; `number` counts the prompts of a run, refused ones included, from 1. `journaled` are
    the names of its completions that the journal has already. `is_repeated`: an earlier prompt of the run has its id and asks for
    the same, so that both are one request. `is_rendered`: it was a text, and is the only message of a conversation now.
    """

    place: str
    prompt: str | list[int] | list[dict[str, Any]]
    sampling: SamplingParams
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    own: frozenset[str] | None = None
    number: int = 0
    journaled: frozenset[str] = frozenset()
    is_repeated: bool = False
    is_rendered: bool = False

    def as_chat(self) -> None:
        """Make a text the only message of a conversation. One that is empty stays so: it is to be rejected."""
        if isinstance(self.prompt, str) and self.prompt:
            self.prompt, self.is_rendered = [{"role": "user", "content": self.prompt}], True

    def in_own_words(self, complaint: str) -> str:
        """A complaint about what the engine got, as one about what was given."""
        return complaint.replace("content of message 0", "the prompt") if self.is_rendered else complaint

    def remedy(self, complaint: str) -> str:
        """What to do about a complaint that names what is wrong; empty if that is an option's matter and no line's."""
        what = complaint.partition(" ")[0]
        if self.own is None or (what in SamplingParams.model_fields and what not in self.own):
            return ""
        return _CORRECT.format(self.place)

    def ids(self) -> list[str]:
        """The names of its completions, once it has one itself."""
        return [] if self.request_id is None else self.ids_under(self.request_id)

    def ids_under(self, request_id: str) -> list[str]:
        """The names that its completions would have, if it had this one itself."""
        if self.sampling.n == 1:
            return [request_id]
        return [choice_id(request_id, number) for number in range(self.sampling.n)]


_FORMS = 'a line that starts with { is JSON: {"prompt": "...", "sampling": {"max_tokens": 20}} or {"messages": [...]}'


class Refused(NamedTuple):
    """A line that is no prompt: where it stands, what is wrong with it, and what to do."""

    place: str
    line: str
    hint: str


class Prompts:
    """The prompts of one run in the order given, and the lines that are none."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.refused: list[Refused] = []

    def __len__(self) -> int:
        return len(self.asked) + len(self.refused)

    def add(self, asked: Asked) -> None:
        """The next prompt."""
        asked.number = len(self) + 1
        self.asked.append(asked)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""


def read_prompts(arguments: Sequence[str], file: str | None, sampling: dict[str, Any]) -> Prompts:
    """All prompts, in the order given: arguments first, then the file. A line that is none stands in nobody's way.

    Args:
        arguments: texts; `-` stands for the lines of stdin.
        file: a path, or `-` for stdin.
        sampling: what the options say, for every prompt that doesn't say otherwise.

    Raises:
        Complaint: a file can't be read, or nothing but blank lines came.
        Rejected: the options are no sampling parameters.
    """
    common = SamplingParams(**sampling)
    prompts = Prompts()
    for number, text in enumerate(arguments, start=1):
        if text == STDIN:
            _add_lines(prompts, sys.stdin.buffer.read(), "stdin", sampling, common)
        else:
            prompts.add(Asked(f"prompt {number}", text, common))
    if file == STDIN:
        _add_lines(prompts, sys.stdin.buffer.read(), "stdin", sampling, common)
    elif file is not None:
        _add_lines(prompts, _contents(file), file, sampling, common)
    if not prompts and (arguments or file is not None):
        source = "stdin" if STDIN in (*arguments, file) else file
        raise Complaint(f"{source} has no prompt in it", "give one prompt per line; blank lines don't count")
    return prompts


def _contents(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Complaint(f"cannot read {file}: {reason}", "--file takes a file of prompts, one per line") from error


def _add_lines(prompts: Prompts, data: bytes, source: str, sampling: dict[str, Any], common: SamplingParams) -> None:
    for number, ended in enumerate(data.removeprefix(BOM_UTF8).split(b"\n"), start=1):
        place = f"{source} line {number}"
        try:
            line = _decoded(ended.removesuffix(b"\r"))
            _refuse_mark(line)
            if line.lstrip().startswith("{"):
                prompts.add(_from_json(line, place, sampling))
            elif line.strip():
                prompts.add(Asked(place, line, common, own=frozenset()))
        except Complaint as error:
            prompts.refused.append(Refused(place, str(error), error.hint))


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        what = f"it is not UTF-8: byte 0x{line[error.start]:02x} after {count(error.start, 'byte')}"
        raise Complaint(what, "convert it, for example with `iconv -t utf-8`") from error


def _refuse_mark(line: str) -> None:
    """A byte order mark before a line that isn't the first would make a text of a line of JSON, in silence."""
    if line.lstrip().startswith("\ufeff"):
        what = "it begins with a byte order mark (U+FEFF, bytes EF BB BF), as the first line of an appended file does"
        raise Complaint(what, "remove it: `sed 's/^\\xef\\xbb\\xbf//'` takes it off every line of a file")


def _from_json(line: str, place: str, sampling: dict[str, Any]) -> Asked:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except RecursionError as error:
        raise Complaint("its JSON is nested too deeply to be read", _FORMS) from error
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        if half := _half_pair(line):
            what = f"\\u{ord(half):04x} without its other half is no character"
            raise Complaint(what, "remove it, or write both halves of the pair, or the character itself") from error
        raise Complaint(str(error), _FORMS) from error
    if twice := _given_twice(line):
        raise Complaint(f"{twice!r} is given twice in one object", "leave one of them out")
    if given.prompt is None and given.messages is None:
        raise Complaint("it has neither a prompt nor messages", _FORMS)
    if given.prompt is not None and given.messages is not None:
        raise Complaint("it has a prompt and messages", "leave one of them out")
    if given.messages is not None and not given.messages:
        raise Complaint("messages is empty", 'give at least one: {"messages": [{"role": "user", "content": "..."}]}')
    try:
        params = SamplingParams(**{**sampling, **given.sampling})
    except (Rejected, TypeError) as error:
        raise Complaint(str(error), _CORRECT.format(place)) from error
    prompt = given.messages if given.prompt is None else given.prompt
    assert prompt is not None
    own = frozenset(given.sampling)
    return Asked(place, prompt, params, given.request_id, given.priority, given.cache_salt, own)


def _given_twice(line: str) -> str:
    """A key that an object of a line of JSON has twice, of which parsers silently take the last; empty if there is none."""
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        twice.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(line, object_pairs_hook=look)
    return twice[0] if twice else ""


def _half_pair(line: str) -> str:
    """The first lone surrogate in a line of JSON, whose parsers report it as anything but that; empty if there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        match = re.search("[\ud800-\udfff]", json.dumps(json.loads(line), ensure_ascii=False))
        return match[0] if match else ""
    return ""
