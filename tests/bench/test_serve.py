"""`bench serve` against scripted servers: what it asks, what it counts, what it refuses to count."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import fake_server
from tests.bench.fake_server import VOCAB, FakeServer
from tests.e2e.server import Server
from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import byte_level
from tinysrt.bench import managed, serve
from tinysrt.bench.dialects import DIALECTS, Answer, Client, RunVoid
from tinysrt.bench.managed import ManagedServer, free_port, is_healthy
from tinysrt.bench.serve import Plan, Run, Side, ratios, summarize
from tinysrt.bench.workloads import FIGURES, WORKLOADS, Draws, gaps_during
from tinysrt.errors import StartupError

SCRIPT = Path(fake_server.__file__)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def draws(seed: int = 0, repetition: int = 0, scale: float = 0.05) -> Draws:
    return Draws(VOCAB, seed, repetition, scale)


# ---- what is asked ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_runs_in_every_dialect(fake: FakeServer, dialect: str, name: str) -> None:
    figures = serve.run(WORKLOADS[name](Client(fake.url, DIALECTS[dialect]), draws()))
    assert figures and set(figures) <= set(FIGURES)
    assert all(value is None or value >= 0 for value in figures.values())
    assert {path for path, _ in fake.asked} == {DIALECTS[dialect].path}


def test_the_workloads_have_the_sizes_of_the_specification(fake: FakeServer) -> None:
    def lengths(name: str) -> list[tuple[int, int]]:
        fake.asked.clear()
        serve.run(WORKLOADS[name](Client(fake.url, DIALECTS["sglang"]), draws(scale=1.0)))
        return [(len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]) for _, body in fake.asked]

    assert lengths("W1") == [(128, 128)] * 3
    w2 = lengths("W2")
    assert len(w2) == 64 and {32 <= a <= 512 and 32 <= b <= 128 for a, b in w2} == {True}
    assert min(a for a, _ in w2) < 100 and max(a for a, _ in w2) > 430
    assert lengths("W3") == [(768 + 64, 32)] * 48
    prefixes = [tuple(body["input_ids"][:768]) for _, body in fake.asked]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [8] * 6
    assert sorted(lengths("W3B")) == sorted([(256 + 64 * turn + 32 * (turn - 1), 32) for turn in (1, 2, 3, 4)] * 8)
    assert len({tuple(body["input_ids"][:256]) for _, body in fake.asked}) == 1
    assert all(body["input_ids"][320:352] == [9] * 32 for _, body in fake.asked if len(body["input_ids"]) > 320)
    assert sorted(lengths("W5")) == [(32, 256)] * 8 + [(4096, 2)]


def test_prompts_leave_out_the_first_three_ids_and_differ_between_seeds_and_repetitions() -> None:
    first, again, other, repeated = draws(1), draws(1), draws(2), draws(1, repetition=1)
    prompts = [d.prompt(20_000) for d in (first, again, other, repeated)]
    assert prompts[0] == prompts[1] and prompts[0] not in prompts[2:] and prompts[2] != prompts[3]
    assert min(min(prompt) for prompt in prompts) == 3 and max(max(prompt) for prompt in prompts) == VOCAB - 1
    assert first.lengths(1, 1000, 9) == repeated.lengths(1, 1000, 9) != other.lengths(1, 1000, 9)


def test_no_two_workloads_of_a_run_begin_with_the_same_ids(fake: FakeServer) -> None:
    """A server with a prefix cache would otherwise find the head of one in what another has left."""
    heads = []
    for name in ("W1", "W2"):
        assert serve.main(["--url", fake.url, "--scale", "0.05", "--pairs", "1", "--workloads", name]) == 0
        heads.append({tuple(body["input_ids"][:3]) for _, body in fake.asked[-3:]})  # both ask three at this scale
    assert len(heads[0] | heads[1]) == 6


# ---- what is counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_holds_what_the_server_says(fake: FakeServer, dialect: str, stream: bool) -> None:
    answer = serve.run(Client(fake.url, DIALECTS[dialect]).ask(list(range(3, 13)), 6, stream=stream))
    assert (answer.completion_tokens, answer.prompt_tokens) == (6, 10)
    assert answer.cached_tokens == {"sglang": 5, "openai": 1, "llamacpp": 2}[dialect]
    assert len(answer.arrivals) == (6 if stream else 1) and answer.arrivals == sorted(answer.arrivals)
    if not stream:
        assert answer.output_ids == [9] * 6


@pytest.mark.parametrize(
    ("fault", "stream", "said"),
    [
        ("few", False, "got 5 tokens instead of 6"),
        ("few", True, "got 5 tokens instead of 6"),
        ("refuse", False, "answers 503: .*the queue is full"),
        ("refuse", True, "answers 503: .*the queue is full"),
        ("fail", True, "out of memory"),
        ("garbage", False, "none of this dialect"),
        ("page", False, "none of this dialect"),
        ("grow", False, "a prompt of 10 tokens became one of 11"),
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_whatever_goes_wrong_voids_the_run(fake: FakeServer, dialect: str, fault: str, stream: bool, said: str) -> None:
    fake.fault = fault
    with pytest.raises(RunVoid, match=said):
        serve.run(Client(fake.url, DIALECTS[dialect]).ask(list(range(3, 13)), 6, stream=stream))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_connection_that_breaks_voids_the_run(fake: FakeServer, dialect: str) -> None:
    fake.fault = "break"
    with pytest.raises(RunVoid):
        serve.run(Client(fake.url, DIALECTS[dialect]).ask(list(range(3, 13)), 6, stream=True))


def test_a_server_that_is_not_there_or_silent_voids_the_run() -> None:
    with pytest.raises(RunVoid, match="refused|Connect"):
        serve.run(Client(f"http://127.0.0.1:{free_port()}", DIALECTS["sglang"]).ask([3], 1))
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunVoid, match="nothing came for 0.2 s"):
            serve.run(Client(url, DIALECTS["sglang"], timeout=0.2).ask([3], 1))


def test_only_gaps_that_touch_the_interval_count() -> None:
    answer = Answer(sent=0.0, arrivals=[1.0, 2.0, 5.0, 6.0, 9.0])
    assert answer.gaps == [1.0, 3.0, 1.0, 3.0]
    assert gaps_during(answer.arrivals, 2.5, 5.5) == [3.0, 1.0]
    assert gaps_during(answer.arrivals, 9.5, 10.0) == []


# ---- two servers in turn ---------------------------------------------------------------------------------


def command(*fault: str) -> str:
    return shlex.join([sys.executable, str(SCRIPT), "{port}", *fault])


def test_the_first_server_alternates_with_the_second_and_meets_itself_in_the_noise_pairs() -> None:
    sides = [Side("a", "", "sglang", None, None), Side("b", "", "sglang", None, None)]
    plan = Plan(["W1"], 3, 1, 0, 1.0, None, 1.0, Path())
    assert [(pair, repetition, side.name) for pair, repetition, side in plan.order(sides)] == [
        (0, 0, "a"), (0, 1, "a"), (0, 0, "b"), (1, 0, "a"), (1, 0, "b"), (2, 0, "a"), (2, 0, "b"),
    ]  # fmt: skip


def test_ratios_are_of_pairs_and_their_median_is_quoted() -> None:
    runs = [
        Run(side, pair, repetition, "W2", 0.0, {"output_tok_s": value})
        for side, repetition, values in (("a", 0, (10.0, 20.0, 50.0)), ("b", 0, (5.0, 20.0, 10.0)), ("a", 1, (11.0,)))
        for pair, value in enumerate(values)
    ]
    sides = [Side(name, "", "sglang", None, None) for name in "ab"]
    found = summarize(runs, sides)["W2"]["output_tok_s"]
    assert found["ratio"] == {"median": 2.0, "min": 1.0, "max": 5.0}
    assert found["noise"] == {"median": 1.1, "min": 1.1, "max": 1.1}
    assert (found["a"]["median"], found["b"]["median"]) == (20.0, 10.0)
    runs[1].void, runs[1].figures = "a request got 3 tokens instead of 4", {}
    assert summarize(runs, sides)["W2"]["output_tok_s"]["ratio"]["max"] == 5.0  # of two pairs: 2 and 5
    assert ratios({("a", 0, 0): 1.0, ("b", 0, 0): 0.0}, ("a", 0), ("b", 0)) == []


def test_two_started_servers_take_turns_and_the_record_says_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed, "IDLE_WINDOW", 0.05)
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = [
        "--start", command(), "--compare-start", command(), "--compare-dialect", "openai", "--pairs", "2",
        "--workloads", "W1", "W3B", "--scale", "0.02", "--logs", str(tmp_path), "--json", str(file),
        "--plot", str(picture), "--name", "ours", "--compare-name", "theirs",
    ]  # fmt: skip
    assert serve.main(arguments) == 0
    record = json.loads(file.read_text())
    assert record["bench"] == "serve" and record["command"].startswith("tinysrt bench serve --start")
    assert {"cpu", "cores", "commit", "torch", "load"} <= set(record["machine"])
    order = [(run["side"], run["pair"], run["repetition"]) for run in record["runs"] if run["workload"] == "W1"]
    assert order == [("ours", 0, 0), ("ours", 0, 1), ("theirs", 0, 0), ("ours", 1, 0), ("theirs", 1, 0)]
    assert [len(side["outside"]) for side in record["sides"]] == [3, 2]
    assert all(look["start_s"] > 0 and look["rss_mib"] > 0 for side in record["sides"] for look in side["outside"])
    cached = record["summary"]["W3B"]["cached_tokens"]
    assert cached["ours"]["median"] > cached["theirs"]["median"] and cached["ratio"]["median"] > 1
    assert cached["noise"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert "ours / theirs" in capsys.readouterr().out
    assert "<svg" in picture.read_text()
    ports = {line.split()[-1] for name in ("ours", "theirs") for line in (tmp_path / f"{name}.log").open()}
    assert len(ports) == 5 and not any(is_healthy(f"http://127.0.0.1:{port}") for port in ports)


def test_logs_of_a_run_without_faults_are_not_left_in_the_temporary_folder(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert serve.main(["--url", fake.url, "--workloads", "W1", "--pairs", "1", "--scale", "0.02"]) == 0
    assert list(tmp_path.glob("tinysrt-bench-*")) == []


def test_a_server_that_cheats_is_refused_at_the_warm_up_and_a_void_run_enters_no_median(fake: FakeServer) -> None:
    fake.fault = "few"
    with pytest.raises(StartupError, match="A does not answer as it should: a request got"):
        serve.main(["--url", fake.url, "--scale", "0.25"])  # already the warm-up
    runs = [
        Run("A", 0, 0, "W1", 0.0, {"ttft_ms": 1.0}),
        Run("A", 0, 0, "W2", 0.0, void="a request got 1 tokens instead of 2"),
    ]
    summary = summarize(runs, [Side("A", fake.url, "sglang", None, None)])
    assert summary == {"W1": {"ttft_ms": {"A": {"median": 1.0, "min": 1.0, "max": 1.0}}}, "W2": {}}


def test_a_server_that_does_not_come_up_again_voids_its_round_and_a_termination_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(managed, "IDLE_WINDOW", 0.05)
    starts: list[str] = []
    start = ManagedServer.__enter__

    def fickle(self: ManagedServer) -> ManagedServer:
        starts.append(self.url)
        if len(starts) == 2:
            raise StartupError("address in use")
        if len(starts) == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C: `timeout` sends it
            time.sleep(5)
        return start(self)

    monkeypatch.setattr(ManagedServer, "__enter__", fickle)
    arguments = ["--start", command(), "--pairs", "9", "--workloads", "W1", "--scale", "0.02", "--logs", str(tmp_path)]
    assert serve.main([*arguments, "--json"]) == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["pair"], run["void"]) for run in runs] == [(0, None), (1, "address in use"), (2, None)]


def test_a_void_run_makes_the_exit_code_1(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spoil(*_: object) -> None:
        fake.fault = "few"

    monkeypatch.setattr(serve, "warm_up", spoil)
    assert serve.main(["--url", fake.url, "--scale", "0.05", "--pairs", "1", "--workloads", "W2", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"][0]["void"] and json.loads(out)["summary"] == {"W2": {}}
    assert "1 of 1 runs are void" in err and "instead of" in err


# ---- servers that are started ----------------------------------------------------------------------------


def test_a_server_that_dies_at_once_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no memory left for weights"):
        with ManagedServer(command("die"), "http://127.0.0.1:{port}", tmp_path / "log"):
            pass
    with pytest.raises(StartupError, match="no-such-program"):
        with ManagedServer("no-such-program", "http://127.0.0.1:1", tmp_path / "log"):
            pass


def test_a_server_is_gone_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        with ManagedServer(command(), "http://127.0.0.1:{port}", tmp_path / "log") as server:
            assert is_healthy(server.url)
            raise KeyError
    assert not is_healthy(server.url)


def test_the_vocabulary_comes_from_the_models_folder_or_from_a_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    side = Side("A", "", "openai", None, None, about={"model_path": str(tmp_path)})
    assert serve.vocabulary(side) == 77
    with pytest.raises(StartupError, match="give --vocab-size"):
        serve.vocabulary(Side("A", "", "openai", None, "gpt"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "0"], "--pairs must be at least 1"),
        (["--compare", "http://x", "--compare-name", "A"], "both servers are called A"),
        (["--compare-start", "vllm serve"], "--compare-start needs {port}"),
        (["--compare-dialect", "openai"], "no other server"),
        (["--json", "/no/such/folder/file"], "no such folder"),
        (["--logs", "/dev/null/logs"], "--logs /dev/null/logs: Not a directory"),
        (["--start", "serve 'it {port}"], "No closing quotation"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(arguments: list[str], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        serve.main(arguments)


@pytest.mark.e2e
def test_a_real_server_gives_both_doors_exactly_what_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = byte_level().hf
    save_tiny_model(
        "llama", folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=8192
    )
    tokenizer.save_pretrained(folder)
    with Server(tmp_path, "--model-path", str(folder), "--num-threads", "1") as server:
        server.wait_ready()
        common = ["--url", server.url, "--scale", "0.1", "--pairs", "1", "--workloads"]
        file = tmp_path / "out.json"
        assert serve.main([*common, *WORKLOADS, "--json", str(file)]) == 0
        summary = json.loads(file.read_text())["summary"]
        assert list(summary) == list(WORKLOADS)
        assert summary["W3"]["cached_tokens"]["A"]["median"] > 0 and summary["W3B"]["cached_tokens"]["A"]["median"] > 0
        others = [name for name in WORKLOADS if name != "W3B"]  # our OpenAI door gives no token ids to feed back
        assert serve.main([*common, *others, "--dialect", "openai"]) == 0
