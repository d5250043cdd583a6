"""From bytes on the wire to a checked object: the same strict reading at every door.

    read_body(request, limit)  ──▶ bytes    413 as soon as one byte too many has arrived, announced or not
    parse_object(raw)          ──▶ dict     one JSON object, or a 400 that says what is wrong
    convert(body, Struct)      ──▶ Struct   right types, nulls mean "default", the field at fault is named

Invariant: whatever bytes a client sends, the outcome is an object whose strings are valid Unicode and whose
numbers fit in 64 bits, or a `RequestError`. Nothing behind this file meets a lone surrogate, a NaN or a bignum.
`read_body` is the only place that reads a request's body, so its limit holds for all of them.

SGLang lets FastAPI and pydantic do this, and then turns their 422s and 500s back into 400s.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request

from tinysrt.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

_LONG_INTEGER = re.compile(rb"[0-9]{19}")  # 2^63 has 19 digits: shorter ones need no second look
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_FIELD_AT_FAULT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")  # where msgspec ends its message: " - at `$.stop[0]`"
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`")


async def read_body(request: Request, limit: int) -> bytes:
    """The raw body, at most `limit` bytes. A chunked body has no announced length, so bytes are counted too."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    pieces, total = [], 0
    async for piece in request.stream():
        total += len(piece)
        if total > limit:
            raise _too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


async def read_object(request: Request, limit: int, *, allow_empty: bool = False) -> dict[str, Any]:
    """The body as one JSON object. `allow_empty`: no body at all means `{}` (control routes such as /flush_cache)."""
    raw = await read_body(request, limit)
    if not raw and allow_empty:
        return {}
    # Insisting on the type also keeps web pages out: a browser sends a cross-site JSON body only after asking.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError("The body must be JSON: send the header 'Content-Type: application/json'.")
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise RequestError("The request body is empty; a JSON object is expected.")
    try:
        body = orjson.loads(raw)  # refuses bad UTF-8, lone surrogates, NaN, infinities and 1024 levels of nesting
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The request body is not valid JSON: {exc}.") from None
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    if _LONG_INTEGER.search(raw):
        # orjson rounds integers beyond 64 bits to floats without a word; a seed or an id must not change its value.
        try:
            json.loads(raw, parse_int=_checked_int)
        except RecursionError:
            raise RequestError("The request body is nested too deeply.") from None
    return body


def convert(body: dict[str, Any], kind: type[T]) -> T:
    """`body` as a `kind`. Null for a field means its default; types are not bent ("5" is no number, true no 1)."""
    present = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(present, kind, str_keys=True)  # JSON keys are strings; a dict[int, …] wants ints
    except msgspec.ValidationError as exc:
        message = str(exc)
    place = _FIELD_AT_FAULT.search(message)
    field = place.group(1) if place else ""
    missing = _MISSING_FIELD.search(message)
    if missing:
        field = f"{field}.{missing.group(1)}".lstrip(".")
        raise RequestError(f"'{field}' is required.", param=field)
    what = message[: place.start()] if place else message
    raise RequestError(f"'{field}': {what[:1].lower()}{what[1:]}.", param=field or None)


def _checked_int(digits: str) -> int:
    # Compare lengths first: int() of a very long string is slow, and refused by Python beyond 4,300 digits.
    if len(digits) > 20 or not _INT64_MIN <= int(digits) <= _UINT64_MAX:
        raise RequestError("The request body holds an integer beyond 64 bits.")
    return int(digits)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The request body is larger than {limit} bytes (--max-request-bytes).", status=413)
