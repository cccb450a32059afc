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

    # To load a verb makes a hundred thousand objects and no garbage; Python would look for it after every 700 of them.
    gc.set_threshold(50_000)
    try:
        from refold.engine.cli.app import app

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        app.main(prog_name="refold")
    except KeyboardInterrupt:
        sys.stderr.write("refold: interrupted\n")
        sys.exit(130)
