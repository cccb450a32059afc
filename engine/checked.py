"""Options of whatever kind, checked as they are made: the first complaint is one `Rejected`, in one line.

It names the field and the value and says what to write instead.
"""

import reprlib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from refold.journal.errors import Rejected

# A range alone doesn't say what is wrong with a value that lies in it, such as 1e9.
_KINDS = {"int_type": "an integer, ", "float_type": "a number, "}


class Checked(BaseModel):
    """A frozen set of options. Its constructor raises `Rejected`, not pydantic's report."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # Hidden from type checkers, so that they go on checking the fields of each subclass.
    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise rejected(type(self), error) from None


def short(value: object) -> str:
    """A value as it may appear in a message: on one line, never for pages, whatever its `repr` does."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"a number of {value.bit_length()} bits"
    try:
        text = ascii(value[:60]) if isinstance(value, str) else reprlib.repr(value)
        text = text.encode("ascii", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - it is not our object
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain_int(value: object) -> int | None:
    """An integer as the journal takes it: of a subclass, such as an `IntEnum`, the number alone. None for whatever is none, `True` too."""
    return int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else None


def rejected(options: type[Checked], error: ValidationError) -> Rejected:
    """The first complaint, as one line."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if not name:
        return Rejected(str(first["msg"]).removeprefix("Value error, "))
    if first["type"] == "extra_forbidden":
        return Rejected(f"{short(name)} is no option: {options.__name__} has {', '.join(options.model_fields)}")
    if first["type"] == "missing":
        return Rejected(f"{name} is missing: give {options.model_fields[name].description}")
    if first["type"] == "value_error":
        return Rejected(f"{name} is {short(first['input'])}: {str(first['msg']).removeprefix('Value error, ')}")
    kind = _KINDS.get(first["type"], "") if len(first["loc"]) == 1 else ""
    wanted = f"{kind}{options.model_fields[name].description}"
    return Rejected(f"{_path(first['loc'])} is {short(first['input'])}: give {wanted}")


def _path(location: tuple[int | str, ...]) -> str:
    """`tenant_weights['gold']`, `speculation_by_batch[0][1]`; of a key that can't be one, what it is a key of."""
    name, *inner = location
    return str(name) if "[key]" in inner else f"{name}{''.join(f'[{short(part)}]' for part in inner)}"
