"""Capsules from a stranger, by the thousand: whatever is in one, it's a journal or it's refused in one line.

    python -m tests.kit.capsule_fuzz [--seconds 3600] [--seed 1] [--findings FOLDER]

What comes out of a damaged capsule (`tests.kit.capsule_damage`) is folded, judged and decided again, and now and then it goes through
the command line as a user would open it, and through one of the verbs behind it.

A finding is: an exception that isn't one of ours, a message of more than a line, more than `MAX_S` seconds of the CPU or `MAX_BYTES` of memory, a
file opened for writing outside of the folder, or anything that starts a program, opens a connection, compiles code or unpickles: the
interpreter's audit events tell. Each is written to `FOLDER`, with the capsule that did it.
"""

import argparse
import hashlib
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refold.engine.history.capsule import read_capsule
from refold.engine.history.sealing import sealed_records
from refold.engine.history.verify import verify_journal
from refold.journal.errors import RefoldError
from tests.cli.command import refold
from tests.history.readers import ListReader
from tests.kit.capsule_damage import damaged, originals

MAX_S = 20
MAX_BYTES = 6 << 30
MAX_MESSAGE_CHARACTERS = 1000
THROUGH_THE_COMMAND_LINE = 0.02
EXIT_STATUSES = {0, 1, 2, 3, 4}
"""What a capsule may make of a verb: never 5 (owned), never 70 (a bug)."""

VERBS: tuple[Sequence[str], ...] = (
    ("verify", "--redecide"),
    ("log",),
    ("stat",),
    ("stalls",),
    ("show", "--at", "end"),
    ("request", "req-1"),
    ("why", "req-1"),
    ("blame", "req-1"),
    ("trace", "-o", "trace.json"),
    ("report", "-o", "report.html"),
    ("audit", "violations"),
    ("sql", "SELECT COUNT(*) FROM tokens"),
    ("fork", "--set", "num_blocks=64"),
)

# -- watching ---------------------------------------------------------------------------------------------------------


class Watch:
    """What the interpreter does while a capsule is open; `broken` has what it must not."""

    FORBIDDEN = (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "subprocess.",
        "socket.connect",
        "socket.bind",
        "pickle.",
        "ctypes.",
    )
    MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.broken: list[str] = []
        sys.addaudithook(self._hear)

    @contextmanager
    def on(self, folder: Path) -> Iterator[None]:
        """Listen; what is written belongs into this folder."""
        self.broken, self.folder = [], str(folder)
        try:
            yield
        finally:
            self.folder = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & 0o3
            if writes and isinstance(path, str) and not self._is_inside(path):
                self.broken.append(f"opened {path!r} for writing")
        elif event.startswith(self.FORBIDDEN) or (
            event.startswith(self.MOVES) and not all(self._is_inside(a) for a in arguments if isinstance(a, str))
        ):
            self.broken.append(f"{event}{arguments!r}"[:200])

    def _is_inside(self, path: str) -> bool:
        return path == "/dev/null" or str(Path(path).absolute()).startswith(str(self.folder))


class Slow(BaseException):
    """It took too long."""


def _alarm(*_: object) -> None:
    raise Slow(f"more than {MAX_S} s of the CPU")


def opened(folder: Path, data: bytes) -> str:
    """Open a capsule as a program does; what became of it. Raises only what is a finding."""
    path = folder / "bug.capsule"
    path.write_bytes(data)
    try:
        _, read = read_capsule(path)
        records = list(sealed_records(read))
    except RefoldError as error:
        _check_message(error)
        return "refused"
    try:
        verify_journal(ListReader(records), redecide=True)  # type: ignore[arg-type]
    except RefoldError as error:
        _check_message(error)
        return "opened, unlawful"
    return "opened, lawful"


def _check_message(error: RefoldError) -> None:
    message = str(error)
    if "\n" in message or len(message) > MAX_MESSAGE_CHARACTERS:
        raise AssertionError(f"a message of {len(message)} characters: {message[:300]!r}")


def opened_by_a_user(rng: random.Random, folder: Path, data: bytes) -> str:
    """`refold capsule --open`, and a verb on what came out; what became of it. Raises what is a finding."""
    path, journal, verb = folder / "bug.capsule", folder / "theirs.db", list(rng.choice(VERBS))
    path.write_bytes(data)
    words = [str(folder / word) if word in ("trace.json", "report.html") else word for word in verb]
    if words[0] == "sql":
        words.insert(1, str(journal))
    else:
        words.append(str(journal))
    try:
        for command in (["capsule", "--open", str(path), str(journal)], words):
            done = refold(*command)
            if done.exit_code not in EXIT_STATUSES or "Traceback" in done.stderr or "a bug of refold" in done.stderr:
                raise AssertionError(f"{command[0]} ended with {done.exit_code}: {done.stderr[:500]}")
            if done.exit_code and command[0] == "capsule":
                if journal.exists():
                    raise AssertionError("a capsule that was refused left a journal")
                return "refused by the command line"
    finally:
        for left in folder.iterdir():
            left.unlink()
    return f"opened by the command line, then {verb[0]}"


# -- the campaign -----------------------------------------------------------------------------------------------------


def campaign(
    rng: random.Random,
    seconds: float,
    folder: Path,
    watch: Watch,
    found: Callable[[str, bytes], None],
    by_users: float = THROUGH_THE_COMMAND_LINE,
) -> Counter[str]:
    """Fuzz for some seconds; how often which end was seen. `found` gets each finding and its capsule."""
    texts, ends = originals(), Counter[str]()
    for verb in VERBS if by_users else ():  # modules are imported before anyone listens
        refold(verb[0], "--help")
    until_s = time.monotonic() + seconds
    signal.signal(signal.SIGPROF, _alarm)
    while time.monotonic() < until_s:
        data = damaged(rng, texts)
        try:
            end = _attempt(rng, watch, folder, data, by_users)
        except BaseException as error:  # noqa: BLE001 - whatever it is, that it came out is the finding
            signal.setitimer(signal.ITIMER_PROF, 0)
            if isinstance(error, KeyboardInterrupt):
                break
            end = f"FOUND {type(error).__name__}"
            found("".join(traceback.format_exception(error)), data)
        ends[end] += 1
    return ends


def _attempt(rng: random.Random, watch: Watch, folder: Path, data: bytes, by_users: float) -> str:
    with watch.on(folder):
        signal.setitimer(signal.ITIMER_PROF, MAX_S)
        end = opened_by_a_user(rng, folder, data) if rng.random() < by_users else opened(folder, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if watch.broken:
        raise AssertionError(f"did what no capsule may: {watch.broken[:3]}")
    return end


def main() -> int:
    """The campaign by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--by-users", type=float, default=THROUGH_THE_COMMAND_LINE, help="share that the verbs open")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    kinds = Counter[str]()

    def found(text: str, data: bytes) -> None:
        kind = [line for line in text.splitlines() if re.match(r"[\w.]+: ", line)][-1][:160]
        kinds[kind] += 1
        if kinds[kind] <= 3:
            options.findings.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(data).hexdigest()[:12]
            (options.findings / f"{name}.capsule").write_bytes(data)
            (options.findings / f"{name}.txt").write_text(text, encoding="utf-8")
            print(f"found: {kind} ({name})", flush=True)

    with tempfile.TemporaryDirectory(prefix="refold-fuzz-") as folder:
        began_s = time.monotonic()
        ends = campaign(random.Random(options.seed), options.seconds, Path(folder), Watch(), found, options.by_users)
    spent_s, total = time.monotonic() - began_s, sum(ends.values())
    print(
        f"{total:,} capsules in {spent_s:,.0f} s, {sum(kinds.values())} findings of {len(kinds)} kinds (seed {options.seed})"
    )
    for end, count in sorted(ends.items(), key=lambda item: -item[1]):
        print(f"  {count:>9,}  {end}")
    print(f"  memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
