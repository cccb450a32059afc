"""Schema 1 to 2: what was said moves out of the body into a content of its own.

Version 1 has everything in the body. Version 2 keeps the lengths of these columns there, and the columns in the content,
which has a salt in front. A record of version 1 has no digest of a content, so what it says can't be erased.

Its digests of the folded state are left out: in version 1 a session kept its first place in the order of the policy, in
version 2 it gets one with every turn, which the state and so its digest tells.
"""

from typing import Any

import msgspec

_TAKEN = {
    "RequestSubmitted": "prompt_token_ids",
    "SessionExtended": "token_ids",
    "DraftsProposed": "token_ids",
    "OutputDelivered": "token_ids",
    "StaleOutputConsumed": "token_ids",
    "StateDigest": "digest",
}
_EVENTS = msgspec.json.Decoder(list[dict[str, Any]])


def upcast(body: bytes, content: bytes | None) -> tuple[bytes, bytes | None]:  # noqa: ARG001 - version 1 has no content
    """Body and content as version 2 has them."""
    columns: list[Any] = []
    events = _EVENTS.decode(body)
    for event in events:
        if event.get("type") == "StateDigest":
            event["digest"] = ""
        field = _TAKEN.get(event.get("type", ""))
        if field is not None:
            _take(event, field, columns)
        elif event.get("drafts"):
            columns.append([token for drafts in event["drafts"] for token in drafts["token_ids"]])
            for drafts in event["drafts"]:
                drafts["token_ids"] = len(drafts["token_ids"])
    return msgspec.json.encode(events), msgspec.json.encode(["", *columns]) if columns else b""


def _take(event: dict[str, Any], field: str, columns: list[Any]) -> None:
    column = event.get(field)
    if isinstance(column, list | str):
        event[field] = len(column)
        if column:
            columns.append(column)
