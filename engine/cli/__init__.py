"""The `refold` command.

Data goes to stdout, everything else to stderr. Exit status: 0 fine; 1 the answer is "violated" or "not found"; 2 usage or
rejected input; 3 the journal can't be read, is damaged or isn't ours; 4 it is of a newer refold; 5 it is locked or owned by
another engine; 70 a bug of ours; 74 output that can't be written; 130 interrupted; 141 nobody reads the output any more;
143 terminated.

Each verb is loaded when it is called, so that reading a journal never waits for what only writing needs.
"""


def main() -> None:
    """Run the command line and exit."""
    import gc
    import sys

    _end_at_once_if_interrupted()
    # To load a verb makes a hundred thousand objects and no garbage; Python would look for it after every 700 of them.
    gc.set_threshold(50_000)
    from refold.engine.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app.main(prog_name="refold")


def _end_at_once_if_interrupted() -> None:
    """Until a verb begins, nothing is lost by that. A Ctrl-C that an import falls into may come out as anything, or not at all."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def let_interrupt() -> None:
    """A verb begins: from now on Ctrl-C is a `KeyboardInterrupt`, as usual."""
    import signal

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: object) -> None:
    import os

    os.write(2, b"refold: interrupted\n")
    os._exit(130)
