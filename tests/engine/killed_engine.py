"""A process whose engine gets killed. Run as a script; each line on stdin is one life, as JSON.

    {"journal": URL, "model": NAME, "seen": FILE, "options": {...}, "requests": [{"id", "prompt", "sampling"}, ...]}

A life is a forked child: it opens the engine, and one client per request submits it or resumes it after the last index that
`seen` has for it, and appends every delta to `seen`, one line per `os.write`. Answers on stdout: `pid N`, `open RECOVERY`,
`done`, and `dead STATUS` when the child is gone. Forked, after the imports, so that a life costs milliseconds.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refold.engine.engine import Delta, Engine
from refold.engine.sampling_params import SamplingParams
from refold.journal.errors import NotFound
from refold.journal.stores import sql  # noqa: F401 - imported before the fork, for every life
from refold.journal.stores.segments import store  # noqa: F401
from refold.migrations import files  # noqa: F401


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def last_seen(path: str) -> dict[str, int]:
    """The last output index that each client has written down."""
    last: dict[str, int] = {}
    for line in Path(path).read_text().splitlines():
        request_id, index, token_ids, _ = json.loads(line)
        last[request_id] = index + len(token_ids) - 1
    return last


async def client(engine: Engine, request: dict[str, Any], after: int, seen: int) -> None:
    def note(delta: Delta) -> None:
        row = [delta.request_id, delta.index, delta.token_ids, delta.finish_reason]
        os.write(seen, f"{json.dumps(row)}\n".encode())

    try:
        async for delta in engine.resume(request["id"], after):
            note(delta)
    except NotFound:
        assert after == -1, f"the journal lost {request['id']}, of which tokens were seen"
        sampling = SamplingParams(**request["sampling"])
        async for delta in engine.generate(request["prompt"], sampling, request_id=request["id"]):
            note(delta)


async def live(life: dict[str, Any]) -> None:
    seen = os.open(life["seen"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    after = last_seen(life["seen"])
    async with Engine(life["model"], life["journal"], **life["options"]) as engine:
        assert engine.recovery is not None
        say(f"open {json.dumps(asdict(engine.recovery))}")
        await asyncio.gather(*(client(engine, each, after.get(each["id"], -1), seen) for each in life["requests"]))
    say("done")


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                asyncio.run(live(json.loads(line)))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status) if status == 0 else None
            os._exit(1)
        say(f"pid {pid}")
        say(f"dead {os.waitpid(pid, 0)[1]}")


if __name__ == "__main__":
    main()
