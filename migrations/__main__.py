"""`python -m refold.migrations upgrade URL | current URL | check | write`."""

import sys

from refold.journal.errors import RefoldError
from refold.migrations import check, current, upgrade, write_down


def main(arguments: list[str]) -> int:
    """Exit status: 0 fine, 1 the tables and the migrations differ, 2 usage, 3 the journal can't be used."""
    try:
        match arguments:
            case ["upgrade", url]:
                sys.stdout.write("upgraded\n" if upgrade(url) else "already current\n")
            case ["current", url]:
                sys.stdout.write(f"{current(url) or 'no tables yet'}\n")
            case ["check"]:
                found = check()
                sys.stdout.write("\n".join(found) + "\n" if found else "tables and migrations agree\n")
                return 1 if found else 0
            case ["write"]:
                write_down()
            case _:
                sys.stderr.write("usage: python -m refold.migrations upgrade URL | current URL | check | write\n")
                return 2
    except RefoldError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
