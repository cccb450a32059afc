"""Logging belongs to the program; the library borrows it. Every case runs in a process of its own: structlog is global."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    code = "import structlog\nfrom refold.engine.logs import configure_logging, get_logger\n" + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code], text=True, check=True, capture_output=True, **options)  # type: ignore[call-overload, no-any-return]


def test_lines_are_json_on_stderr_when_nobody_watches() -> None:
    done = run('configure_logging(level="info"); structlog.get_logger("refold").info("opened", position=3)')
    assert done.stdout == ""
    line = json.loads(done.stderr)
    assert (line["event"], line["position"], line["level"]) == ("opened", 3, "info")
    assert line["timestamp"].endswith("Z")


def test_text_can_be_asked_for() -> None:
    done = run('configure_logging(json=False); get_logger().warning("slow disk", position=3)')
    assert "slow disk" in done.stderr
    assert "position=3" in done.stderr
    assert "\x1b[" not in done.stderr, "no colours where stderr is no terminal"


def test_request_step_and_position_ride_on_the_logger_and_on_the_context() -> None:
    done = run(
        """
        configure_logging(level="debug")
        with structlog.contextvars.bound_contextvars(step=7, position=42):
            get_logger(request="a1").debug("inside")
        get_logger().debug("outside")
        """
    )
    inside, outside = map(json.loads, done.stderr.splitlines())
    assert (inside["request"], inside["step"], inside["position"]) == ("a1", 7, 42)
    assert not {"request", "step", "position"} & outside.keys()


def test_a_library_speaks_from_warning_up_and_changes_no_global_state() -> None:
    done = run(
        """
        log = get_logger()
        log.info("chatter")
        log.warning("worth knowing")
        print(structlog.is_configured())
        """
    )
    assert done.stdout == "False\n"
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["worth knowing"]


def test_a_host_that_configured_structlog_keeps_its_own() -> None:
    done = run(
        """
        lines = []
        def keep(logger, name, fields):
            lines.append(fields["event"])
            raise structlog.DropEvent
        structlog.configure(processors=[keep])
        configure_logging(level="error")
        get_logger().info("to the host")
        structlog.get_logger("refold").info("this one too")
        print(lines)
        """
    )
    assert done.stdout == "['to the host', 'this one too']\n"
    assert done.stderr == ""


def test_a_logger_made_at_import_follows_a_host_that_configures_later() -> None:
    done = run(
        """
        log = get_logger(request="a1")
        lines = []
        def keep(logger, name, fields):
            lines.append((fields["event"], fields["request"]))
            raise structlog.DropEvent
        structlog.configure(processors=[keep])
        log.debug("to the host")
        print(lines)
        """
    )
    assert (done.stdout, done.stderr) == ("[('to the host', 'a1')]\n", "")


def test_a_traceback_shows_no_local_variables() -> None:
    for as_json in (True, False):
        done = run(
            f"""
            configure_logging(json={as_json})
            prompt = "my " + "secret"
            try:
                prompt.no_such_thing
            except AttributeError:
                get_logger().exception("failed")
            """
        )
        assert "no_such_thing" in done.stderr
        assert "my secret" not in done.stderr


@pytest.mark.parametrize("end", ["sys.stderr.close()", "sys.stderr = None", "sys.stderr = open('/dev/full', 'w')"])
def test_an_unwritable_stderr_costs_the_line_and_nothing_else(end: str) -> None:
    done = run(
        f"""
        import os, sys
        log = get_logger(); {end}
        log.error("lost")
        print("still here", flush=True)
        os._exit(0)
        """
    )
    assert done.stdout == "still here\n"


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run('configure_logging(level="loud")')
    assert "no log level 'loud': choose one of debug, info, warning, error, critical" in caught.value.stderr


QUIET = """
import sys
from refold import Engine, SamplingParams
from refold.engine.logs import configure_logging, get_logger
configure_logging(json=True, level={level!r})
with Engine("simulated", {journal!r}) as engine:
    engine.run(["hello"], SamplingParams(max_tokens=3))
get_logger(request="a1").info("opened", position=3)
print(sorted({{"structlog", "rich"}} & set(sys.modules)))
"""


def test_an_engine_that_has_nothing_to_say_imports_nothing_to_say_it_with(tmp_path: Path) -> None:
    code = QUIET.format(level="warning", journal=str(tmp_path / "journal.db"))
    done = subprocess.run([sys.executable, "-c", code], text=True, check=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_first_line_is_written_as_was_asked_for_before_anything_was_imported(tmp_path: Path) -> None:
    code = QUIET.format(level="info", journal=str(tmp_path / "journal.db"))
    done = subprocess.run([sys.executable, "-c", code], text=True, check=True, capture_output=True)
    line = json.loads(done.stderr.splitlines()[-1])
    assert (line["event"], line["request"], line["level"]) == ("opened", "a1", "info")
    assert "structlog" in done.stdout
