"""A worker in a process of its own: whatever becomes of it, the engine lives.

`ProcessWorker` is a `Worker` like any other: `execute` sends the order through a socket and waits for the answer. A worker
that is killed, stopped, out of memory, hung, that raises, or that talks nonsense ends in `WorkerLost` with the first cause in
words; the engine then journals the loss, starts another and has its requests computed again.

Two clocks watch a busy worker. It sends a sign of life about once a second; `silence_s` without one means that the process is
stopped, or starved to the point of being useless. Signs of life come from a thread beside the computation, so they say nothing
about a computation that never ends: for that there is `step_timeout_s`. An idle worker is not watched: if it died, the next
order finds out. A process that is only just starting can't say anything yet, and on a busy machine that takes a while: until its
first sign of life it has `start_timeout_s`.

The process is spawned, not forked: it inherits no lock, no thread and no open journal. It ends when its end of the socket says
that the engine is gone, and it ignores Ctrl-C, which is the engine's to answer: from its first instruction on, before it can say so itself.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.frames import PROTOCOL_VERSION, Alive, Channel, Failed, Frame, FrameError, Hello, Ready
from refold.gpu.loading import Loading
from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import EngineConfig

SILENCE_S = 20.0
START_S = 60.0
LOAD_TIMEOUT_S = 900.0
STEP_TIMEOUT_S = 300.0
_REAP_S = 5.0
_STARTS_SLOWLY = (
    "; it had just been started: if the machine is that busy, give it more time by start_timeout_s "
    "(--start-timeout-s of `refold run`)"
)
_LAST_WORDS_CHARS = 2_000
T = TypeVar("T", Ready, StepOutput)


class ProcessWorker:
    """See the module's text.

    Attributes:
        kind: of the worker in the process.
        pid: of the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        threads: int | None = None,
        dtype: str = "float32",
        step_timeout_s: float = STEP_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        start_timeout_s: float = START_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        loading: Loading | None = None,
        command: list[str] | None = None,
    ) -> None:
        """Start the process and wait until its worker is ready.

        Args:
            config: of the engine.
            threads: CPU threads of the worker; None for its own choice.
            dtype: of the weights and the KV cache.
            step_timeout_s: how long a step may take.
            silence_s: how long a busy worker may go without a sign of life.
            start_timeout_s: how long the process may take until its first sign of life.
            load_timeout_s: how long loading the model may take.
            loading: by which one can give up on it until it is ready.
            command: the program to run instead of this Python's; it gets the socket's number as last argument.

        Raises:
            Rejected: the model can't be loaded; another worker would fail alike.
            WorkerLost: the process failed.
        """
        self._step_timeout_s = step_timeout_s
        self._silence_s = silence_s
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(command or [sys.executable, "-m", "refold.gpu.process_main"], theirs)
        self._channel = Channel(ours)
        self._given: deque[WorkOrder] = deque()  # orders that the process has, or has most of
        self.pid = self._process.pid
        loading = loading or Loading()
        loading.begin(self._process)
        try:
            hello = Hello(version=PROTOCOL_VERSION, config=config, threads=threads, dtype=dtype)
            self._send(hello, "it ended before it knew what to load")
            ready = self._wait_for(Ready, "loading the model", load_timeout_s, first_s=max(start_timeout_s, silence_s))
        except BaseException:
            self.close()
            raise
        finally:
            loading.end()
        self.kind, self._environment = ready.kind, ready.environment

    def environment(self) -> dict[str, str]:
        """What the numbers depend on, as the worker in the process says."""
        return dict(self._environment)

    def execute(self, order: WorkOrder) -> StepOutput:
        """Run one step in the process.

        Raises:
            WorkerLost: no answer will come; the process is gone when this is raised.
        """
        step = order.scheduled.step
        try:
            if not self._given or self._given[0] is not order:
                self.hand_over(order)
            self._given.popleft()
            return self._wait_for(StepOutput, f"step {step}", self._step_timeout_s)
        except BaseException:
            self.close()
            raise

    def offer(self, order: WorkOrder) -> bool:
        """Put an order into the socket, if there's room: the process finds it when it's done with those before it."""
        if not self._channel.offer(order):
            return False
        self._given.append(order)
        return True

    def hand_over(self, order: WorkOrder) -> None:
        """Put an order into the socket, or what isn't there of it yet.

        Raises:
            WorkerLost: the process doesn't take it.
        """
        if not any(given is order for given in self._given):
            self._send(order)
            self._given.append(order)
        elif self._given[-1] is order:
            self._flush()

    def close(self) -> None:
        """End the process: it is asked, and killed if it doesn't answer. Idempotent."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S if self._process.poll() is None and not self._is_stopped() else 0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _send(self, frame: Frame, if_not: str = "it took no order") -> None:
        with self._sending(if_not):
            self._channel.send(frame, self._silence_s)

    def _flush(self) -> None:
        with self._sending("it took no order"):
            self._channel.flush(self._silence_s)

    @contextlib.contextmanager
    def _sending(self, if_not: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._lost(f"{if_not} ({error.strerror or error})") from error

    def _wait_for(self, kind: type[T], what: str, timeout_s: float, *, first_s: float = 0.0) -> T:
        """The answer of this kind. Until the first sign of life, silence is allowed for `first_s` if that is longer."""
        deadline, silence_s, is_starting = time.monotonic() + timeout_s, max(first_s, self._silence_s), bool(first_s)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._lost(f"{what} took longer than {timeout_s:g} s", kill=True)
            frame = self._next(
                what, min(left_s, silence_s), is_last=left_s <= silence_s, remedy=_STARTS_SLOWLY if is_starting else ""
            )
            silence_s, is_starting = self._silence_s, False
            if isinstance(frame, kind):
                return frame
            if isinstance(frame, Failed):
                raise self._failed(frame, what)
            if not isinstance(frame, Alive):
                raise self._lost(f"it said {type(frame).__name__} at {what}", kill=True)

    def _next(self, what: str, timeout_s: float, *, is_last: bool, remedy: str) -> Frame | None:
        try:
            frame = self._channel.receive(timeout_s)
        except TimeoutError as error:
            if is_last:
                return Alive()  # the caller's own clock has run out
            raise self._lost(f"no sign of life for {timeout_s:g} s at {what}{remedy}", kill=True) from error
        except FrameError as error:
            raise self._lost(f"nonsense at {what}: {error}", kill=True) from error
        except ConnectionResetError:  # it ended, and left orders unread
            frame = None
        except OSError as error:
            raise self._lost(f"the connection broke at {what} ({error.strerror or error})") from error
        if frame is None:
            raise self._lost(f"it ended at {what}")
        return frame

    def _failed(self, failed: Failed, what: str) -> Rejected | WorkerLost:
        message = failed.message[:_LAST_WORDS_CHARS]
        if failed.rejected:
            return Rejected(message)
        lost = self._lost(f"at {what} it raised {message}")
        lost.add_note(failed.traceback[-_LAST_WORDS_CHARS:])
        return lost

    def _lost(self, why: str, *, kill: bool = False) -> WorkerLost:
        """The error, with how the process ended. `kill`: it lives, and is of no use."""
        if kill:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        return WorkerLost(f"worker process {self.pid} is lost: {why}{_how_it_ended(self._process.poll(), killed=kill)}")

    def _is_stopped(self) -> bool:
        """Whether the process is stopped by a signal: it would never answer. False where the system doesn't tell."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
            return stat.rpartition(b")")[2].split()[0] in {b"T", b"t"}
        except (OSError, IndexError):
            return False


def _spawn(command: list[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the program with one end of the socket, and nothing else of ours."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = os.environ | {"PYTHONPATH": path}
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
    )  # of this thread, and so of the process that it starts
    try:
        return subprocess.Popen(  # noqa: S603 - our own program
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    except OSError as error:
        raise WorkerLost(f"cannot start a worker process ({command[0]}: {error.strerror})") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _how_it_ended(code: int | None, *, killed: bool) -> str:
    if killed or code is None:
        return "; it was killed"
    if code >= 0:
        return f"; exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"; ended by {name}{hint}"
