"""`python -m refold`, and the command `refold`: hardly a line of ours runs before Ctrl-C is answered in one line."""


def run() -> None:
    """Run the command line and exit."""
    try:
        from refold.engine.cli import main

        main()
    except KeyboardInterrupt:
        import os

        os.write(2, b"refold: interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    run()
