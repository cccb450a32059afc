"""A failure is shrunk to a few orders, and becomes a test that fails as long as the fault is there."""

from pathlib import Path

import msgspec
import pytest

from refold.journal.events import Sampling
from refold.scheduler.commands import ScheduleStep, SubmitRequest
from tests.kit.faults import planted, run_pytest
from tests.kit.player import Answer, Reopen
from tests.kit.shrink import Failure, attempt, source
from tests.kit.simulation import Simulation
from tests.kit.simulator import main


def a_long_life_that_fails() -> tuple[int, Failure]:
    for seed in range(400):
        simulation = Simulation(seed)
        try:
            simulation.play()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the fault
            if len(simulation.drive.orders_given) >= 80:
                return seed, Failure.of(error)
    raise AssertionError("no such life")


@pytest.mark.parametrize("fault", ["stale_accumulated", "rewind_keeps_hash", "trim_forgotten"])
def test_a_planted_fault_is_found_and_shrunk_to_a_test(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"test_{fault}.py"
    with planted(fault):
        seed, failure = a_long_life_that_fails()
        assert main(["--first", str(seed), "--seeds", "1", "--shrink", "--pytest", str(file)]) == 1
    said = capsys.readouterr().out
    enough, before = (int(said.split(" orders are enough")[0].split()[i]) for i in (-3, -1))
    assert enough <= 0.2 * before, said
    assert f"{failure.kind} at {failure.place}" in said

    with_fault = run_pytest(file, fault)
    assert with_fault.returncode == 1, with_fault.stdout + with_fault.stderr
    assert failure.kind in with_fault.stdout
    without = run_pytest(file, "")
    assert without.returncode == 0, without.stdout + without.stderr


def test_a_seed_that_does_not_fail_has_nothing_to_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "1", "--seeds", "1", "--shrink"]) == 0
    assert "seed 1 doesn't fail" in capsys.readouterr().out


def test_the_source_of_an_order_is_the_order() -> None:
    orders = [
        SubmitRequest(
            request_id='it\'s "it"\n', prompt_token_ids=[1, 2], sampling=Sampling(seed=3, max_tokens=4), arrival_ns=0
        ),
        Reopen(lost=2, changes={"policy": "priority", "tenant_weights": {"a": 3}, "speculation_by_batch": ((2, 3),)}),
        Answer(),
        ScheduleStep(),
    ]
    names: dict[str, set[str]] = {}
    text = [source(order, names) for order in orders]
    assert text[2:] == ["Answer()", "ScheduleStep()"]
    scope: dict[str, object] = {}
    for module, used in names.items():
        exec(f"from {module} import {', '.join(used)}", scope)
    assert [eval(each, scope) for each in text] == orders


def test_every_order_of_a_life_survives_its_source() -> None:
    simulation = Simulation(5)
    config = simulation.drive.config
    simulation.play()
    names: dict[str, set[str]] = {}
    text = [source(order, names) for order in simulation.drive.orders_given]
    scope: dict[str, object] = {}
    for module, used in names.items():
        exec(f"from {module} import {', '.join(used)}", scope)
    orders = [eval(each, scope) for each in text]
    assert orders == simulation.drive.orders_given
    assert msgspec.structs.replace(config) == config
    assert attempt(config, orders)[0] is None
