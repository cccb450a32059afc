"""A worker in its own process: the contract of every worker, and every way to die."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from refold.gpu.batch import StepOutput, Worker, WorkOrder
from refold.gpu.loading import Loading
from refold.gpu.process import ProcessWorker
from refold.gpu.simulated import SimulatedWorker
from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import EngineConfig, Sampling
from tests.kit.worker_contract import WorkerContract, config_for
from tests.kit.worker_driver import WorkerDriver


class TestWorkerInAProcess(WorkerContract):
    @pytest.fixture
    def config(self) -> EngineConfig:
        return config_for()

    @pytest.fixture
    def worker(self, config: EngineConfig) -> Iterator[Worker]:
        worker = ProcessWorker(config)
        yield worker
        worker.close()


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessWorker]]:
    made: list[ProcessWorker] = []

    def start(config: EngineConfig | None = None, **options: object) -> ProcessWorker:
        made.append(ProcessWorker(config or config_for(), **options))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for worker in made:
        worker.close()


def order_for(worker: Worker) -> WorkOrder:
    drive = WorkerDriver(worker, config_for(), seed=1)
    return drive.order([(drive.add([1, 2, 3, 4], Sampling(seed=3, max_tokens=4)), 4)])


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def later(seconds: float, action: Callable[[], object]) -> None:
    threading.Timer(seconds, action).start()


def test_it_answers_as_one_in_this_process_does(make: Callable[..., ProcessWorker]) -> None:
    worker, config = make(), config_for()
    assert worker.kind == "simulated"
    assert worker.environment() == SimulatedWorker(config).environment()
    assert worker.execute(order_for(worker)) == SimulatedWorker(config).execute(order_for(worker))
    assert worker.pid != os.getpid()


def test_closing_ends_the_process_at_once_and_twice_is_once(make: Callable[..., ProcessWorker]) -> None:
    worker = make()
    start = time.monotonic()
    worker.close()
    worker.close()
    assert is_gone(worker.pid)
    assert time.monotonic() - start < 3


def test_killed_while_idle_it_is_lost_at_the_next_order(make: Callable[..., ProcessWorker]) -> None:
    worker = make()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        WorkerLost, match=rf"worker process {worker.pid} is lost: .*ended by SIGKILL \(out of memory\?\)"
    ):
        worker.execute(order_for(worker))
    assert is_gone(worker.pid)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_killed_in_a_step_it_is_lost_with_the_signal(make: Callable[..., ProcessWorker], kind: signal.Signals) -> None:
    worker = make(config_for("simulated?step_ms=5000"))
    later(0.3, lambda: os.kill(worker.pid, kind))
    with pytest.raises(WorkerLost, match=f"it ended at step 0; ended by {kind.name}"):
        worker.execute(order_for(worker))


def test_stopped_it_gives_no_sign_of_life(make: Callable[..., ProcessWorker]) -> None:
    worker = make(silence_s=2.0)
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="no sign of life for 2 s at step 0; it was killed"):
        worker.execute(order_for(worker))
    assert time.monotonic() - start < 8
    assert is_gone(worker.pid)


def test_stopped_while_idle_it_can_still_be_closed_quickly(make: Callable[..., ProcessWorker]) -> None:
    worker = make()
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.1)
    start = time.monotonic()
    worker.close()
    assert is_gone(worker.pid)
    assert time.monotonic() - start < 3


def test_a_slow_step_is_no_loss_and_an_endless_one_is(make: Callable[..., ProcessWorker]) -> None:
    slow = make(config_for("simulated?step_ms=2500"), silence_s=1.9)
    assert isinstance(slow.execute(order_for(slow)), StepOutput), "it gave signs of life"
    endless = make(config_for("simulated?step_ms=60000"), step_timeout_s=1.5)
    with pytest.raises(WorkerLost, match=r"step 0 took longer than 1\.5 s; it was killed"):
        endless.execute(order_for(endless))
    assert is_gone(endless.pid)


def test_an_exception_in_a_step_is_told_with_its_traceback(make: Callable[..., ProcessWorker]) -> None:
    worker = make()
    order = order_for(worker)
    wrong = replace(order, scheduled=replace(order.scheduled, first_positions=[4]))
    with pytest.raises(WorkerLost, match=r"at step 0 it raised .*; exit status 1") as caught:
        worker.execute(wrong)
    assert any("Traceback" in note for note in caught.value.__notes__)
    assert is_gone(worker.pid)


def test_a_model_that_cannot_be_loaded_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="nowhere"):
        ProcessWorker(config_for(str(tmp_path / "nowhere.gguf")))


ANSWER_TO_NOTHING = """
import time
from refold.gpu.batch import StepOutput
from refold.gpu.frames import pack
s.sendall(pack(StepOutput(step=0, generation=1, counts=[], token_ids=[], positions=[])))
time.sleep(9)
"""
SPEAKERS = {
    "nothing": ("pass", r"it ended at loading the model; exit status 0"),
    "noise": ("s.sendall(b'HTTP/1.1 400 Bad Request\\r\\n\\r\\n')", "nonsense at loading the model: a frame of"),
    "half a frame": ("s.sendall(b'\\0\\0\\0\\x09\\1abc')", "nonsense at loading the model: the stream ends"),
    "an unknown kind": ("s.sendall(b'\\0\\0\\0\\0\\x63')", "nonsense at loading the model: a frame of kind 99"),
    "a body of another shape": ("s.sendall(b'\\0\\0\\0\\1\\1\\xc0')", "a Ready that can't be read"),
    "an answer to nothing": (ANSWER_TO_NOTHING, "it said StepOutput at loading the model; it was killed"),
    "only its own exit": ("sys.exit(3)", "exit status 3"),
}


@pytest.mark.parametrize(("speech", "message"), SPEAKERS.values(), ids=SPEAKERS)
def test_a_program_that_talks_nonsense_is_lost(speech: str, message: str) -> None:
    program = f"import socket, sys\ns = socket.socket(fileno=int(sys.argv[-1]))\ns.recv(65536)\n{speech}\n"
    with pytest.raises(WorkerLost, match=message):
        ProcessWorker(config_for(), command=[sys.executable, "-c", program])


READS_TWO_ORDERS_FIRST = """
import socket, sys, time
from refold.gpu.batch import StepOutput
from refold.gpu.frames import Channel, Ready
channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
channel.receive()
channel.send(Ready(kind="patient", environment={}))
for order in [channel.receive(), channel.receive()]:
    channel.send(StepOutput(step=order.scheduled.step, generation=1, counts=[], token_ids=[], positions=[]))
"""


def test_an_order_that_was_offered_is_there_before_the_one_ahead_of_it_is_answered() -> None:
    worker = ProcessWorker(config_for(), silence_s=5.0, command=[sys.executable, "-c", READS_TWO_ORDERS_FIRST])
    first = order_for(worker)
    second = replace(first, scheduled=replace(first.scheduled, step=1))
    worker.hand_over(first)
    assert worker.offer(second)
    assert [worker.execute(first).step, worker.execute(second).step] == [0, 1]
    worker.close()


def test_killed_with_orders_ahead_it_is_lost_at_the_step_that_it_was_at(make: Callable[..., ProcessWorker]) -> None:
    worker = make(config_for("simulated?step_ms=500"))
    first = order_for(worker)
    worker.hand_over(first)
    assert worker.offer(replace(first, scheduled=replace(first.scheduled, step=1)))
    later(0.2, lambda: os.kill(worker.pid, signal.SIGKILL))
    with pytest.raises(WorkerLost, match=r"it ended at step 0; ended by SIGKILL"):
        worker.execute(first)


@pytest.mark.parametrize(("num_orders", "prompt_tokens"), [(600, 1_000), (60, 20_000)], ids=["small", "fits in part"])
def test_what_the_socket_has_no_room_for_is_given_when_it_is_due(
    make: Callable[..., ProcessWorker], num_orders: int, prompt_tokens: int
) -> None:
    config = replace(config_for(), max_model_len=1 << 16, num_blocks=1 << 19, max_num_batched_tokens=1 << 16)
    worker, alone = make(config), SimulatedWorker(config)
    drive = WorkerDriver(worker, config, seed=1)
    prompts = [[1 + (i + n) % 90 for i in range(prompt_tokens)] for n in range(num_orders)]
    orders = [drive.order([(drive.add(prompt, Sampling(seed=3, max_tokens=4)), prompt_tokens)]) for prompt in prompts]
    os.kill(worker.pid, signal.SIGSTOP)
    worker.hand_over(orders[0])
    taken = [worker.offer(order) for order in orders[1:]]
    assert False in taken, "a socket that holds everything tests nothing"
    num_taken = taken.index(False)
    os.kill(worker.pid, signal.SIGCONT)
    for order in orders[: 1 + num_taken + 3]:
        assert worker.execute(order) == alone.execute(order)


def test_a_program_that_starts_slowly_is_no_silent_one() -> None:
    slowly = "import sys, time, os; time.sleep(1.5); os.execv(sys.executable, [sys.executable, '-m', 'refold.gpu.process_main', *sys.argv[1:]])"
    worker = ProcessWorker(config_for(), silence_s=1.0, command=[sys.executable, "-c", slowly])
    worker.close()


def test_a_program_that_does_not_start_in_time_is_told_how_to_get_more() -> None:
    never = [sys.executable, "-c", "import time; time.sleep(60)"]
    said = r"no sign of life for 1\.5 s at loading the model; it had just been started: if the machine is that busy, "
    with pytest.raises(WorkerLost, match=said + "give it more time by start_timeout_s"):
        ProcessWorker(config_for(), silence_s=1.0, start_timeout_s=1.5, command=never)


def test_a_program_that_ends_before_it_took_its_hello_is_not_said_to_have_refused_an_order() -> None:
    long = replace(config_for(), model="x" * (8 << 20))  # more than any socket holds: it must be read to be sent
    with pytest.raises(WorkerLost, match=r"it ended before it knew what to load \(.*\); exit status 3"):
        ProcessWorker(long, command=[sys.executable, "-c", "raise SystemExit(3)"])


NEVER_READY = """
import socket, sys, time
from refold.gpu.frames import Alive, pack
s = socket.socket(fileno=int(sys.argv[-1]))
while True:
    s.sendall(pack(Alive()))
    time.sleep(0.2)
"""


@pytest.mark.parametrize("program", [NEVER_READY, "import time; time.sleep(60)"], ids=["loading", "starting"])
def test_a_model_that_nobody_wants_any_more_is_not_loaded_to_its_end(program: str) -> None:
    loading = Loading()
    later(1.0, loading.give_up)
    start = time.monotonic()
    for _ in range(2):  # the second one is unwanted from the start
        with pytest.raises(WorkerLost, match="ended by SIGKILL"):
            ProcessWorker(config_for(), loading=loading, command=[sys.executable, "-c", program])
    assert time.monotonic() - start < 8


def test_giving_up_on_what_loads_leaves_alone_what_has_been_loaded(make: Callable[..., ProcessWorker]) -> None:
    loading = Loading()
    worker = make(loading=loading)
    loading.give_up()
    assert isinstance(worker.execute(order_for(worker)), StepOutput)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_whole_group_is_not_the_workers_however_early_it_comes(name: str) -> None:
    program = f"import os, signal, time; os.kill(os.getpid(), signal.{name}); time.sleep(0.2)"
    with pytest.raises(WorkerLost, match="exit status 0"):
        ProcessWorker(config_for(), command=[sys.executable, "-c", program])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_does_not_end_a_worker(kind: int, make: Callable[..., ProcessWorker]) -> None:
    worker = make()
    os.kill(worker.pid, kind)
    assert isinstance(worker.execute(order_for(worker)), StepOutput)


def test_a_program_that_is_not_there_is_lost() -> None:
    with pytest.raises(WorkerLost, match="cannot start a worker process"):
        ProcessWorker(config_for(), command=["/nowhere/python"])


PARENT = """
import time
from refold.gpu.process import ProcessWorker
from refold.journal.events import EngineConfig
names = ("max_model_len", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
config = EngineConfig(model="simulated", model_fingerprint="", vocab_size=9, eos_token_ids=(), **dict.fromkeys(names, 8))
print(ProcessWorker(config).pid, flush=True)
time.sleep(60)
"""


def test_it_ends_when_its_engine_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert not is_gone(pid)
        engine.kill()
    deadline = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.05)
