"""What a record's body holds in the place of drafts. It stands apart from the code that uses it, as structs do (setup.py)."""

import msgspec


class TakenDrafts(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """`Drafts` without its tokens: how many there were. They are in the record's content (`refold.journal.content`)."""

    entry: int
    token_ids: int
