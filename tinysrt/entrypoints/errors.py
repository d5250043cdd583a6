"""How each door says no, and how a frame of an event stream is written.

One `RequestError` (`tinysrt/errors.py`) becomes the body that the door's API promises:

    native            {"error": {"message"}}
    native, streamed  {"error": {"message", "type", "code", "retryable"}}, then [DONE]
    OpenAI            {"error": {"message", "type", "param", "code"}}; streamed the same, then [DONE]

`error_response` chooses by path, so that a 404 or a crash on a route answers in that route's own shape too.

Invariant: a frame is one line. JSON may hold U+0085, U+2028 and U+2029 raw, but many line readers (the OpenAI
SDK once did) split on them; `sse` writes them as escapes, which decode to the same text
(tests/entrypoints/test_http_streams.py).

SGLang's OpenAI errors are flat (`{"object": "error", "message", …}`), which the OpenAI SDK cannot take apart.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.responses import Response

from tinysrt.errors import RequestError

SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold frames back

# UTF-8 is self-synchronizing: these byte sequences occur only as these characters.
_LINE_SEPARATORS = (("\u0085".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))


def dump_line(obj: Any) -> bytes:
    """`obj` as JSON on one line, for every reader's idea of a line."""
    line = orjson.dumps(obj, option=orjson.OPT_NON_STR_KEYS)
    for raw, escaped in _LINE_SEPARATORS:
        if raw in line:
            line = line.replace(raw, escaped)
    return line


def sse(obj: Any) -> bytes:
    return b"data: " + dump_line(obj) + b"\n\n"


def json_response(obj: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(obj, option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json")


# ---- one error, several shapes ----------------------------------------------------------------------


def native_error(exc: RequestError) -> Response:
    return _respond({"error": {"message": exc.message}}, exc)


def native_stream_error(exc: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": exc.message,
            "type": error_type(exc.status),
            "code": exc.status,
            "retryable": exc.status in (429, 503),
        }
    }


def openai_error_body(exc: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": exc.message,
            "type": error_type(exc.status),
            "param": exc.param,
            "code": exc.code,
        }
    }


def openai_error(exc: RequestError) -> Response:
    return _respond(openai_error_body(exc), exc)


def error_response(path: str, exc: RequestError) -> Response:
    """The error in the shape of the API that `path` belongs to."""
    return openai_error(exc) if path.startswith("/v1/") else native_error(exc)


def error_type(status: int) -> str:
    """OpenAI's names; an unknown model is an `invalid_request_error` there, and so it is here."""
    if status >= 500:
        return "service_unavailable_error" if status == 503 else "internal_server_error"
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error")


def _respond(body: dict[str, Any], exc: RequestError) -> Response:
    response = json_response(body, exc.status)
    if exc.status in (413, 500):
        # 413: the rest of the body is not going to be read. 500: Uvicorn closes after an exception; say so.
        response.headers["Connection"] = "close"
    if exc.status == 503:
        response.headers["Retry-After"] = "1"
    return response
