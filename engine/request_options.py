"""What may go with any request, beside its prompt and its sampling."""

from typing import TypedDict

from refold.engine.checked import short


class RequestOptions(TypedDict, total=False):
    """What may go with any request; see `Engine.generate`."""

    request_id: str | None
    priority: int
    cache_salt: str
    tenant: str


def given_to(method: str, options: RequestOptions) -> RequestOptions:
    """`options`, if there are such: a typed dict is no check at run time.

    Raises:
        TypeError: there are none such, as for any call with a wrong keyword; names the method that was called, and those there are.
    """
    for name in options:
        if name not in RequestOptions.__annotations__:
            known = ", ".join(("prompt", "sampling", *RequestOptions.__annotations__))
            raise TypeError(f"Engine.{method}() got an unexpected keyword argument {short(name)}: it takes {known}")
    return options
