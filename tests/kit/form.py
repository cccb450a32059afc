"""Which form of the core is being tested: Python, or machine code made of it (`make compiled`)."""

import pytest

from refold.scheduler import fold

IS_COMPILED = not (fold.__file__ or "").endswith(".py")

WHY = "plants faults in Python, and this core is machine code"

interpreted_only = pytest.mark.skipif(IS_COMPILED, reason=WHY)
