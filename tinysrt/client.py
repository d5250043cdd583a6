"""A client of a running server, standard library only: what `generate --url` and `chat` talk through.

`stream` reads server-sent events as they come. Closing its generator closes the connection, which the server takes as
"abort": that is how Ctrl-C in a chat stops the answer.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tinysrt.errors import StartupError

TIMEOUT = 600.0  # seconds without a byte


def stream(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """POST `body`; yield each event's JSON until [DONE]. An error, at once or in the stream, is a StartupError; so is
    a stream that ends without its last word."""
    request = urllib.request.Request(
        url.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError(f"an event that is no object: {data[:80]!r}")
                if "error" in event:
                    raise StartupError(f"{url}: {error_message(event)}")
                yield event
            raise StartupError(f"{url}: the connection ended before the answer did")
    except urllib.error.HTTPError as error:
        raise StartupError(f"{url} answers {error.code}: {_message_of(error)}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise StartupError(f"{url}: {getattr(error, 'reason', error)}") from None


def is_up(url: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/ready", timeout=5.0) as response:
            return response.status == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def error_message(body: dict[str, Any]) -> str:
    """The sentence in an error body, native or OpenAI."""
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _message_of(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return error_message(json.loads(text))
    except (ValueError, AttributeError):
        return " ".join(text.split()) or error.reason
