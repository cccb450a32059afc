"""Upcasters: records of an older schema, turned into those of the next one until they are today's.

One module for each change of the schema, named after the versions on both sides, each with its golden journal in
`tests/golden`. An upcaster works on JSON values and knows nothing of today's vocabulary, so that a later change of it leaves
the earlier upcasters as they are. What is stored stays as it was written: only what is read is turned.
"""

from collections.abc import Callable

import msgspec

from refold.journal.upcasters import schema_1_to_2, schema_2_to_3

Upcaster = Callable[[bytes, bytes | None], tuple[bytes, bytes | None]]

UPCASTERS: dict[int, Upcaster] = {1: schema_1_to_2.upcast, 2: schema_2_to_3.upcast}
"""By the version that they read."""


def upcast(version: int, body: bytes, content: bytes | None) -> tuple[bytes, bytes | None]:
    """Body and content of a record of `version`, as today's schema has them.

    Raises:
        msgspec.DecodeError: the record isn't of that version.
    """
    while version in UPCASTERS:
        try:
            body, content = UPCASTERS[version](body, content)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise msgspec.DecodeError(f"not of schema version {version}: {error!r}") from error
        version += 1
    return body, content
