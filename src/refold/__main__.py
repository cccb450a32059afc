"""`python -m refold`: the same as the command `refold`."""

from refold.engine.cli import main

main()
