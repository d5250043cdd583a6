"""Any bytes at all, on every family of routes: a 4xx in that API's shape, and the server goes on (FC-15, FC-16)."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tinysrt.entrypoints.body import parse_object
from tinysrt.errors import RequestError

PATHS = ["/v1/chat/completions", "/v1/completions", "/generate", "/abort_request", "/tokenize"]
GOOD = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


def check_error(path: str, reply: Any, status: int = 400) -> str:
    assert reply.status_code == status and reply.headers["content-type"] == "application/json", reply.text
    error = reply.json()["error"]
    assert set(error) == ({"message", "type", "param", "code"} if path.startswith("/v1/") else {"message"})
    assert "Traceback" not in reply.text and ".py" not in reply.text
    return error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m",, }', b"", b"[]", b'"hi"', b"null", b"5", b'{"text": "\x97"}', b"[" * 30_000,
        b'{"text": "\\ud800"}', b'{"seed": 18446744073709551616}', b'{"seed": -9223372036854775809}',
        b'{"temperature": NaN}', b'{"temperature": 1e400}', b'{"text": "a" ', b"\xef\xbb\xbf{}", b"\x00",
        b'{"a":' * 1500 + b"1" + b"}" * 1500, b'{"a": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_broken_bodies_are_the_clients_error(server: Any, path: str, body: bytes) -> None:
    reply = server.http.post(path, content=body, headers=JSON)
    check_error(path, reply, 413 if len(body) > 10_000 else 400)
    assert server.http.post("/v1/chat/completions", json=GOOD).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml"])
def test_another_content_type_is_refused(server: Any, path: str, kind: str) -> None:
    reply = server.http.post(path, content=json.dumps(GOOD), headers={"Content-Type": kind})
    assert "Content-Type" in check_error(path, reply)


def test_a_charset_behind_the_content_type_is_fine(server: Any) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/chat/completions", content=json.dumps(GOOD), headers=headers).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_body_beyond_the_limit_is_413_announced_or_not(server: Any, path: str) -> None:
    big = json.dumps({"text": "x" * 20_000}).encode()
    assert "--max-request-bytes" in check_error(path, server.http.post(path, content=big, headers=JSON), 413)
    pieces = (big[i : i + 1000] for i in range(0, len(big), 1000))  # sent chunked, so without a length
    check_error(path, server.http.post(path, content=pieces, headers=JSON), 413)
    assert server.http.post("/v1/chat/completions", json=GOOD).status_code == 200


def test_a_client_that_stops_in_the_middle_of_its_body_harms_nobody(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        client.sendall(head + b'{"prompt":')
    assert server.http.post("/v1/chat/completions", json=GOOD).status_code == 200


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/api/nothing"])
def test_an_unknown_route_is_a_404_in_its_apis_shape(server: Any, path: str) -> None:
    assert path in check_error(path, server.http.get(path), 404)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_a_wrong_method_is_a_405_that_says_what_is_taken(server: Any, path: str) -> None:
    reply = server.http.get(path)
    check_error(path, reply, 405)
    assert "POST" in reply.headers["allow"]


def test_no_web_page_may_call_the_server(server: Any) -> None:
    reply = server.http.options("/generate", headers={"Origin": "http://evil", "Access-Control-Request-Method": "POST"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_head_and_get_of_the_root_answer(server: Any) -> None:
    assert server.http.get("/").status_code == server.http.head("/").status_code == 200


def test_integers_keep_their_value_or_are_refused() -> None:
    for value in (2**63, 2**64 - 1, -(2**63)):
        assert parse_object(b'{"seed": %d}' % value) == {"seed": value}
    for value in (2**64, -(2**63) - 1, 10**25):
        with pytest.raises(RequestError, match="64 bits"):
            parse_object(b'{"seed": [%d]}' % value)
    assert parse_object(b'{"a": "18446744073709551616", "b": 0.12345678901234567890}')["a"] == "18446744073709551616"
