"""Faults that users met with other servers, at the native door of a real server with a random, tiny model."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.native import WITH_MARGINS, Native, assert_same_but_for_ties, at_once
from tests.e2e.server import Server
from tests.text.tiny_tokenizers import byte_level

pytestmark = pytest.mark.e2e

EOS = 2
MAX_RUNNING = 8
ENDLESS = 8000  # tokens; half a minute


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("native")
    flags = ("--model-path", str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32")
    flags += ("--no-disable-overlap-schedule",)  # the harder loop; the other files' servers run the normal one
    with Server(folder, *flags, "--skip-server-warmup", "--max-running-requests", str(MAX_RUNNING)) as server:
        yield server.wait_ready()


@pytest.fixture
def native(server: Server) -> Iterator[Native]:
    """Whatever a test has done to it, the server is well, idle and clean afterwards."""
    native = Native(server)
    yield native
    assert len(native("fox", max_new_tokens=3)["output_ids"]) == 3
    native.wait_until_idle()


# ---- text out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["😀 👍 😀 👍 😀", "é ñ ü é ñ ü", "你好世界。" * 4])
def test_fc01_a_stream_is_one_decode_of_its_ids(native: Native, prompt: str) -> None:
    answer = native.both(prompt, max_new_tokens=40)
    assert answer["text"] == native.text_of(answer["output_ids"]) and len(answer["output_ids"]) == 40


def test_fc02_a_prompt_that_ends_in_half_a_character_does_not_leak(native: Native) -> None:
    prompt = native.ids_of("Good morning 😀")[:-1]
    answer = native.both(prompt, max_new_tokens=8)
    assert not any(word in answer["text"] for word in ("Good", "morning", "😀")) and len(answer["output_ids"]) == 8


def test_fc03_a_run_of_lone_bytes_neither_stalls_nor_waits_for_the_end(native: Native) -> None:
    tokenizer = byte_level()
    lone = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xa0")
    events = native.stream("fox", logit_bias={str(lone): 100}, max_new_tokens=256)
    assert events[-1]["text"] == "\ufffd" * 256 and events[-1]["meta_info"]["completion_tokens"] == 256
    for event in events:
        pending = len(event["output_ids"]) - len(event["text"])
        assert pending <= 8, "text waits for tokens that cannot complete it"


def test_fc04_a_rid_used_again_begins_anew(native: Native) -> None:
    same = {"rid": "same-rid"}
    native("你好世界。", same, max_new_tokens=7)
    again = native("the lazy dog", same)
    native.stream("你好世界。", same, max_new_tokens=7)
    streamed = native.stream("the lazy dog", same)[-1]
    assert native("the lazy dog")["text"] == again["text"] == streamed["text"]


# ---- stopping ---------------------------------------------------------------------------------------


def test_fc06_a_stop_id_is_counted_and_its_text_is_left_out(native: Native) -> None:
    ids = native("fox")["output_ids"]
    at = next(i for i in range(4, 16) if ids[i] not in ids[:i])
    answer = native.both("fox", stop_token_ids=[ids[at]], ignore_eos=False)
    assert answer["output_ids"] == ids[: at + 1] and answer["meta_info"]["completion_tokens"] == at + 1
    assert answer["text"] == native.text_of(ids[:at])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[at]}


def test_fc07_of_several_stop_strings_the_first_in_the_text_wins(native: Native) -> None:
    """The strings of the field case need a model that knows the alphabet: test_field_cases_demo.py."""
    text = native("fox", max_new_tokens=60)["text"]
    words = list(dict.fromkeys(re.findall("[a-zA-Z]{2}", text)))
    early, late = (word for word in words[:2])
    for stop in ([late, early], [early, late], ["zzz", late]):
        winner = min((word for word in stop if word in text), key=text.index)
        answer = native.both("fox", max_new_tokens=60, stop=stop)
        assert answer["text"] == text[: text.index(winner)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": winner}


# ---- log probabilities ------------------------------------------------------------------------------


def scores_fit(answer: Any) -> None:
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["completion_tokens"] == len(answer["output_ids"]) == meta["output_token_logprobs_length"]


@pytest.mark.parametrize("stream", [False, True])
def test_fc12_as_many_scores_as_tokens_however_the_run_ends(native: Native, stream: bool) -> None:
    plain = native("fox", max_new_tokens=60)
    word = re.findall("[a-zA-Z]{2}", plain["text"])[0]
    ends: list[tuple[str, dict[str, Any]]] = [
        ("stop", {"logit_bias": {str(EOS): 100}, "ignore_eos": False}),
        ("stop", {"stop": word, "max_new_tokens": 60}),
        ("stop", {"stop_token_ids": [plain["output_ids"][6]], "ignore_eos": False}),
        ("length", {"max_new_tokens": 7}),
        ("length", {"max_new_tokens": 0}),
        ("length", {"max_new_tokens": 60, "temperature": 1.5, "top_k": 5}),
        ("stop", {"stop_regex": re.escape(word), "max_new_tokens": 60}),
        ("abort", {"max_new_tokens": ENDLESS}),
    ]
    names = [f"end-{i}" for i in range(len(ends))]

    ended = threading.Semaphore(0)

    def run(rid: str, params: dict[str, Any]) -> Any:
        fields = {"rid": rid, "return_logprob": True}
        events = native.stream("fox", fields, **params) if stream else [native("fox", fields, **params)]
        ended.release()
        for event in events:
            scores_fit(event)
        return events[-1]

    def abort_the_endless_one() -> None:
        for _ in names[:-1]:
            ended.acquire(timeout=60)
        steps = native.state()["forward_count"]
        while native.state()["forward_count"] < steps + 5:
            time.sleep(0.01)
        native.http.post("/abort_request", json={"rid": names[-1]})

    calls = [lambda rid=rid, params=end[1]: run(rid, params) for rid, end in zip(names, ends, strict=True)]
    answers = at_once([*calls, abort_the_endless_one])[:-1]
    for answer, (end, _) in zip(answers, ends, strict=True):
        scores_fit(answer)
        assert answer["meta_info"]["finish_reason"]["type"] == end
    assert len(answers[0]["output_ids"]) == 1 and len(answers[3]["output_ids"]) == 7
    assert answers[0]["text"] == "" and answers[0]["meta_info"]["finish_reason"]["matched"] == EOS
    assert 0 < len(answers[-1]["output_ids"]) < ENDLESS


def test_scores_of_a_cached_prompt_are_those_of_a_cold_one(native: Native) -> None:
    """Trap 3: a prefix hit must not swallow positions whose scores are wanted."""
    prompt = list(range(10, 50))
    fields = {"return_logprob": True, "logprob_start_len": 0}
    cold = native(prompt, fields, max_new_tokens=1)["meta_info"]
    warm = native(prompt, fields, max_new_tokens=1)["meta_info"]
    part = native(prompt, fields | {"logprob_start_len": 25}, max_new_tokens=1)["meta_info"]
    assert (cold["cached_tokens"], warm["cached_tokens"], part["cached_tokens"]) == (0, 0, 25)
    assert [token for _, token, _ in warm["input_token_logprobs"]] == prompt
    assert warm["input_token_logprobs"][0][0] is None and part["input_token_logprobs"][0][:2] == [None, prompt[25]]
    for other, start in ((warm, 0), (part, 25)):
        expected = [score for score, _, _ in cold["input_token_logprobs"][start + 1 :]]
        assert [score for score, _, _ in other["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-3)


# ---- what is refused --------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi"}]
LONG = "a " * 9000
VOCAB = byte_level().vocab_size
GENERATE, TEXT, TALK = "/generate", "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    "path, body",
    [
        # FC-13: nothing to attend to
        (GENERATE, {"text": ""}), (GENERATE, {"input_ids": []}), (GENERATE, {"text": ["", "Hello"]}),
        (GENERATE, {"text": []}), (GENERATE, {"input_ids": [[]]}), (GENERATE, {"input_ids": [[1], []]}),
        (TEXT, {"prompt": ""}), (TEXT, {"prompt": [""]}), (TEXT, {"prompt": []}), (TEXT, {"prompt": [[]]}),
        (TALK, {"messages": []}),
        # FC-14: ids that would index beyond the logits
        *[
            (path, base | ({"sampling_params": {"logit_bias": bias}} if path == GENERATE else {"logit_bias": bias}))
            for path, base in ((GENERATE, {"text": "a"}), (TEXT, {"prompt": "a"}), (TALK, {"messages": CHAT}))
            for bias in ({str(VOCAB): 1}, {"-1": 5}, {"abc": 1}, {"0": 1e9}, {"0": "x"}, {"0": 101})
        ],
        # FC-16: wrong types
        (TALK, {"messages": {"role": "user"}}), (TALK, {}), (TALK, {"messages": CHAT, "max_tokens": "many"}),
        (TALK, {"messages": CHAT, "temperature": []}), (TALK, {"messages": CHAT, "n": 0}),
        (TALK, {"messages": CHAT, "stream": "perhaps"}), (TEXT, {"prompt": 5}), (TEXT, {"prompt": "a", "n": 0}),
        (TEXT, {"prompt": "a", "temperature": []}), (TEXT, {"prompt": "a", "max_tokens": "many"}),
        (GENERATE, {"text": 5}), (GENERATE, {"text": "a", "stream": "perhaps"}), (GENERATE, {}),
        (GENERATE, {"text": "a", "sampling_params": {"temperature": []}}),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": "many"}}),
        (GENERATE, {"text": "a", "sampling_params": {"n": 0}}),
        # FC-28: one bad item refuses the whole
        (GENERATE, {"text": ["a", "b", LONG, "c"]}), (TEXT, {"prompt": ["a", "b", LONG, "c"]}),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}), (GENERATE, {"text": LONG}),
        # an id outside the vocabulary stops other servers
        (GENERATE, {"input_ids": [VOCAB]}), (GENERATE, {"input_ids": [-1]}), (GENERATE, {"input_ids": [2**40]}),
        (TEXT, {"prompt": [1, VOCAB]}), (GENERATE, {"text": "a", "sampling_params": {"stop_token_ids": [VOCAB]}}),
        (GENERATE, {"text": "a", "token_ids_logprob": [VOCAB], "return_logprob": True}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_run_is_a_400_and_nothing_is_queued(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    refused(server, httpx.post(server.url + path, json={"stream": stream} | body, timeout=60), path)


def refused(server: Server, reply: httpx.Response, path: str, status: int = 400) -> dict[str, Any]:
    """The error in the API's own shape; the server has nothing to do and works."""
    assert reply.status_code == status and reply.headers["content-type"] == "application/json", reply.text[:500]
    error = reply.json()["error"]
    assert error["message"] and not any(word in reply.text for word in ("Traceback", ".py", "detail"))
    assert set(error) == ({"message"} if path == GENERATE else {"message", "type", "param", "code"})
    flush = httpx.post(server.url + "/flush_cache", timeout=60)
    assert flush.status_code == 200, "something is running"
    return dict(error)


@pytest.mark.parametrize("path", [GENERATE, TEXT, TALK])
@pytest.mark.parametrize(
    "raw",
    [b'{"model": "m",, }', b"", b"[]", b'"hi"', b"null", b'{"text": "\x97"}', b"[" * 30_000, b'{"text": "\\ud800"}'],
)
def test_fc15_broken_bodies_are_the_clients_error(server: Server, path: str, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    refused(server, httpx.post(server.url + path, content=raw, headers=headers), path)


@pytest.mark.parametrize("path", [GENERATE, TEXT, TALK])
def test_fc15_another_content_type_is_refused(server: Server, path: str) -> None:
    reply = httpx.post(server.url + path, content=b'{"text": "a"}', headers={"Content-Type": "text/plain"})
    refused(server, reply, path)


@pytest.mark.parametrize("path, base", [(TALK, {"messages": CHAT}), (TEXT, {"prompt": "a"})])
def test_fc17_an_unknown_model_is_a_404_that_names_the_served_one(server: Server, path: str, base: Any) -> None:
    reply = httpx.post(server.url + path, json=base | {"model": "no-such-model"})
    error = refused(server, reply, path, 404)
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    for name in ({"model": "tiny"}, {"model": "default"}, {"model": ""}, {}):
        reply = httpx.post(server.url + path, json=base | {"max_tokens": 1} | name, timeout=60)
        assert reply.json()["model"] == "tiny"
    assert httpx.get(server.url + "/v1/models/no-such-model").status_code == 404


def test_a_rid_in_flight_is_refused_and_the_first_goes_on(native: Native, server: Server) -> None:
    events = native.events("fox", {"rid": "twice"}, max_new_tokens=300)
    next(events)
    reply = native.http.post("/generate", json={"text": "a", "rid": "twice"})
    assert reply.status_code == 400 and "twice" in reply.json()["error"]["message"]
    assert len(list(events)[-1]["output_ids"]) == 300


def test_fc28_each_item_of_a_batch_obeys_its_own_parameters(native: Native) -> None:
    limits = (3, 7, 1)
    params = [{"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in limits]
    body = {"text": ["a b", "c d", "e f"], "sampling_params": params}
    answers = native.http.post("/generate", json=body).json()
    assert [len(answer["output_ids"]) for answer in answers] == [3, 7, 1]
    alone = [native(text, max_new_tokens=n)["text"] for text, n in zip(body["text"], limits, strict=True)]
    assert [answer["text"] for answer in answers] == alone


# ---- sampling ---------------------------------------------------------------------------------------


def test_fc20_edge_values_are_greedy_or_off_or_refused(native: Native) -> None:
    greedy = native("fox", WITH_MARGINS)
    for edge in (
        {"temperature": 1e-8}, {"temperature": 1e-6}, {"temperature": 1e-5},
        {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-6}, {"temperature": 1, "min_p": 1},
    ):  # fmt: skip
        assert_same_but_for_ties(greedy, native("fox", **edge))
    off = {"temperature": 1, "sampling_seed": 1}
    plain = native("fox", **off)["output_ids"]
    for same in ({"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"top_k": VOCAB + 5}):
        assert native("fox", **off, **same)["output_ids"] == plain != greedy["output_ids"]
    assert len(set(native("fox", temperature=2, max_new_tokens=32)["output_ids"])) > 8
    for bad in ({"top_k": 0}, {"top_p": 0}, {"temperature": -1}, {"top_p": 1.5}, {"temperature": "NaN"}, {"min_p": 2}):
        reply = native.http.post("/generate", json={"text": "fox", "sampling_params": bad})
        assert reply.status_code == 400 and next(iter(bad)) in reply.json()["error"]["message"]
    raw = b'{"text": "fox", "sampling_params": {"temperature": 1e400}}'
    assert native.http.post("/generate", content=raw, headers={"Content-Type": "application/json"}).status_code == 400


def test_fc21_a_greedy_request_stays_greedy_in_a_mixed_batch(native: Native) -> None:
    alone = native("fox", WITH_MARGINS, max_new_tokens=24)
    for turn in range(3):

        def neighbor(i: int, turn: int = turn) -> Any:
            time.sleep(0.02 * (i % 3) * turn)  # some join later, and some end earlier
            filters: dict[str, Any] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}][i % 4]
            return native("fox", temperature=1.5, max_new_tokens=(24, 9, 40)[i % 3], **filters)

        greedy, *others = at_once(
            [lambda: native("fox", max_new_tokens=24), *(lambda i=i: neighbor(i) for i in range(7))]
        )
        assert_same_but_for_ties(alone, greedy)
        assert len({other["text"] for other in others}) == 7


def test_fc22_a_seed_belongs_to_its_request(native: Native) -> None:
    def draw(seed: int | None) -> str:
        return str(native("fox", temperature=1, sampling_seed=seed)["text"])

    alone = {draw(42) for _ in range(3)}
    together = at_once([lambda seed=seed: draw(seed) for seed in (42, None, 43, 42, None, None)])
    assert {together[0], together[3]} == alone and len(alone) == 1
    assert len(set(together)) == 5, "43 and three without a seed differ from 42 and from each other"
    for seed in (0, 2**31, -1):
        assert draw(seed) == draw(seed)


def test_fc23_penalties_act_and_on_their_own_request_only(native: Native) -> None:
    def repeats(answer: Any) -> int:
        return Counter(answer["output_ids"]).most_common(1)[0][1]

    penalties: list[dict[str, Any]] = [
        {"frequency_penalty": 2}, {"repetition_penalty": 1.5}, {"presence_penalty": 2},
    ]  # fmt: skip
    # A random model repeats itself after some prompts and not after others.
    prompt = max(
        ["A B C D E F G", "fox", "the lazy dog", "é ñ ü", "1 2 3", "isn't it?"], key=lambda p: repeats(native(p))
    )
    plain = native(prompt, WITH_MARGINS, max_new_tokens=32)
    penalized = [native(prompt, WITH_MARGINS, max_new_tokens=32, **penalty) for penalty in penalties]
    for answer in penalized:
        assert answer["output_ids"] != plain["output_ids"] and repeats(answer) < repeats(plain)
    for turn in range(5):
        lengths = [(32, 8, 16, 24)[(turn + i) % 4] for i in range(4)]
        calls = [
            lambda length=length, penalty=penalty: native(prompt, max_new_tokens=length, **penalty)
            for length, penalty in zip(lengths, [{}, *penalties], strict=True)
        ]
        for answer, alone, length in zip(at_once(calls), [plain, *penalized], lengths, strict=True):
            assert_same_but_for_ties(cut(alone, length), answer)


def cut(answer: Any, length: int) -> Any:
    """What `answer` had been with a lower limit, text apart."""
    meta = answer["meta_info"] | {"output_top_logprobs": answer["meta_info"]["output_top_logprobs"][:length]}
    ids = answer["output_ids"][:length]
    return {"output_ids": ids, "meta_info": meta, "text": byte_level().decode(ids)}


def test_fc24_a_bias_stays_in_its_own_row(native: Native) -> None:
    alone = native("fox", WITH_MARGINS, max_new_tokens=32)
    biases: list[tuple[int | None, int]] = [(None, 8), (100, 24), (200, 16), (None, 32)]
    calls = [
        lambda token=token, length=length: native(
            "fox", max_new_tokens=length, logit_bias=None if token is None else {str(token): 100}
        )
        for token, length in biases
    ]
    for answer, (token, length) in zip(at_once(calls), biases, strict=True):
        if token is None:
            assert_same_but_for_ties(cut(alone, length), answer)
        else:
            assert answer["output_ids"] == [token] * length


# ---- clients that leave, abort, flush ---------------------------------------------------------------


def test_fc26_clients_that_go_away_leave_nothing_behind(native: Native, server: Server) -> None:
    def leave_after(chunks: int) -> None:
        events = native.events("fox", max_new_tokens=ENDLESS)
        for _ in range(chunks):
            next(events)
        events.close()

    def leave_at_once() -> None:
        body = native.body("fox", {"stream": True}, {"max_new_tokens": ENDLESS})
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=60):
            pass  # the headers come with the first token; nothing of the body is read

    def give_up(path: str, body: dict[str, Any]) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + path, json=body, timeout=httpx.Timeout(60, read=0.05))

    impatient = [
        lambda: give_up("/generate", native.body(["fox", "dog"], {}, {"max_new_tokens": ENDLESS})),
        lambda: give_up("/v1/completions", {"prompt": "fox", "max_tokens": ENDLESS, "ignore_eos": True}),
    ]
    for _ in range(4):
        at_once([leave_at_once] * 3 + [lambda: leave_after(1)] * 4 + [lambda: leave_after(5)] * 3 + impatient)
    native.wait_until_idle()
    steps = native.state()["forward_count"]
    time.sleep(0.3)
    assert native.state()["forward_count"] == steps, "it still computes for nobody"


def test_fc27_an_abort_hits_exactly_the_name_that_was_given(native: Native) -> None:
    streams: dict[str, list[Any]] = {}
    threads = {}

    def listen(rid: str) -> None:
        for event in native.events("fox", {"rid": rid}, max_new_tokens=ENDLESS):
            streams[rid].append(event)

    def abort(**body: Any) -> int:
        return native.http.post("/abort_request", json=body).status_code

    names = ["a", "ab", "abc", *(f"other-{i}" for i in range(MAX_RUNNING - 3)), "waiting"]
    for rid in names:
        streams[rid] = []
        threads[rid] = threading.Thread(target=listen, args=(rid,))
        threads[rid].start()
        while rid != "waiting" and not streams[rid]:
            time.sleep(0.01)
    while native.state()["num_waiting_reqs"] != 1:
        time.sleep(0.01)

    assert abort(rid="") == abort(rid="zzz") == abort() == 200, "nobody is meant"
    assert abort(rid="waiting") == 200
    threads["waiting"].join(20)
    assert streams["waiting"][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert streams["waiting"][-1]["output_ids"] == []
    assert abort(rid="a") == 200
    threads["a"].join(20)
    assert streams["a"][-1]["meta_info"]["finish_reason"]["type"] == "abort" and streams["a"][-1]["output_ids"]
    seen = {rid: len(streams[rid]) for rid in names}
    time.sleep(0.3)
    assert all(len(streams[rid]) > seen[rid] for rid in names[1:-1]), "all others go on"
    assert abort(abort_all=True) == 200
    for thread in threads.values():
        thread.join(20)
        assert not thread.is_alive()
    assert all(events[-1]["meta_info"]["finish_reason"]["type"] == "abort" for events in streams.values())


def test_fc31_a_flush_while_busy_is_refused_and_harmless(native: Native, server: Server) -> None:
    def flush(method: str = "POST") -> int:
        return httpx.request(method, server.url + "/flush_cache", timeout=30).status_code

    alone = native("the lazy dog", WITH_MARGINS, max_new_tokens=300)
    events = native.events("the lazy dog", max_new_tokens=300)
    next(events)
    assert at_once([flush, flush, lambda: flush("GET")]) == [400] * 3
    rest = list(events)
    assert_same_but_for_ties(alone, rest[-1])
    assert flush() == 200, "at once after the last chunk"
    assert native("the lazy dog")["meta_info"]["cached_tokens"] == 0
    assert native("the lazy dog")["meta_info"]["cached_tokens"] > 0
    assert flush("GET") == 200
    assert native("the lazy dog")["meta_info"]["cached_tokens"] == 0


def test_health_is_told_while_a_long_prompt_is_computed(native: Native, server: Server) -> None:
    """Trap 54: 8,000 tokens are 16 chunks; the probe does not wait behind them. (We may look late: some tries.)"""

    def answers_in_time(token: int) -> bool:
        long = threading.Thread(target=lambda: native([token] * 8000, max_new_tokens=1))
        long.start()
        while native.state()["num_running_reqs"] == 0:
            time.sleep(0.001)
        assert server.status("/health") == 200
        still_computing = native.state()["num_running_reqs"] == 1
        long.join()
        return still_computing

    assert any(answers_in_time(token) for token in range(10, 18))


def test_every_frame_is_json_on_one_line(native: Native, server: Server) -> None:
    body = native.body("fox", {"stream": True}, {"max_new_tokens": 200, "temperature": 1.5})
    raw = httpx.post(server.url + "/generate", json=body, timeout=60).text
    lines = [line for line in raw.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        json.loads(line.removeprefix("data: "))
