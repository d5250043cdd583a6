"""A server that speaks the three dialects and computes nothing: `python fake_server.py PORT [FAULT]`, or in a thread.

Faults: "few" returns a token less than asked; "refuse" answers 503 and a reason; "fail" sends an error in the stream;
"break" closes the connection in the middle; "garbage" answers with JSON of no dialect, "page" with no object at all;
"grow" says that the prompt was a token longer.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 500


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, fault: str = "", name: str = "fake"):
        super().__init__(("127.0.0.1", port), Handler)
        self.fault = fault
        self.name = name
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers = {
            "/health": {},
            "/model_info": {"model_path": self.server.name, "vocab_size": VOCAB},
            "/v1/models": {"data": [{"id": self.server.name}]},
        }
        if self.path in answers:
            self._json(200, answers[self.path])
        else:
            self._json(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        ids = body.get("input_ids") or body["prompt"]
        params = body.get("sampling_params", body)
        asked = params.get("max_new_tokens") or params.get("max_tokens") or params["n_predict"]
        assert params["ignore_eos"] is True and params["temperature"] == 0
        fault = self.server.fault if len(ids) > 4 else ""
        if fault == "refuse":
            self._json(503, {"error": {"message": "the queue is full"}})
        elif fault == "garbage":
            self._json(200, {"hello": "there"})
        elif fault == "page":
            self._json(200, ["no", "object"])
        else:
            events = list(self._events(len(ids) + (fault == "grow"), asked - (fault == "few")))
            if body["stream"]:
                self._stream(events, fault)
            else:
                self._json(200, self._whole(events))

    def _events(self, prompt: int, tokens: int) -> Any:
        """What a stream of this dialect consists of."""
        for n in range(1, tokens + 1):
            last = n == tokens
            if self.path == "/generate":
                meta = {"prompt_tokens": prompt, "completion_tokens": n, "cached_tokens": prompt // 2}
                yield {"text": "x" * n, "output_ids": [9] * n, "meta_info": meta}
            elif self.path == "/v1/completions":
                # Usage in every other event: some servers say it always, some only at the end.
                usage = {"prompt_tokens": prompt, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 1}}
                yield {"choices": [{"text": "x", "token_ids": [9] * n}], "usage": usage if last or n % 2 else None}
            else:
                yield {"content": "x", "tokens": [9], "stop": False}
        if self.path == "/v1/completions":
            yield {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}
        elif self.path == "/completion":
            end = {"tokens_predicted": tokens, "tokens_evaluated": prompt, "timings": {"cache_n": 2}}
            yield {"content": "", "tokens": [], "stop": True, **end}

    def _whole(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        if self.path == "/completion":
            tokens = [token for event in events for token in event["tokens"]]
            return events[-1] | {"tokens": tokens}
        return events[-2] if self.path == "/v1/completions" else events[-1]

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: list[dict[str, Any]], fault: str) -> None:
        """llama.cpp's way ends with the connection, the others' is chunked."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        chunked = self.path != "/completion"
        self.send_header("Transfer-Encoding", "chunked") if chunked else self.send_header("Connection", "close")
        self.end_headers()

        def send(data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            self.wfile.flush()

        for number, event in enumerate(events):
            if number == 1 and fault == "break":
                self.close_connection = True
                return
            if number == 1 and fault == "fail":
                event = {"error": {"message": "out of memory"}}
            data = f"data: {json.dumps(event)}\n\n".encode()
            send(data[:7])  # an event may arrive in pieces
            send(data[7:])
        if chunked:
            send(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("serving on", sys.argv[1], flush=True)
    if sys.argv[2:] == ["die"]:
        sys.exit("no memory left for weights")
    FakeServer(int(sys.argv[1]), *sys.argv[2:]).serve_forever()
