"""The command line generated from the record: every flag parses, files come second, mistakes end with code 2."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tinysrt.errors import StartupError
from tinysrt.server_args import ServerArgs, flags, value_types
from tinysrt.server_args_cli import add_flags, help_text, option_strings, parse

# All flags of the tables that tinysrt follows, by table.
TABLES = {
    "access": "host port enable-http2 http2-max-concurrent-streams http2-initial-connection-window-size grpc-mode "
    "smg-grpc-mode grpc-port api-key admin-api-key served-model-name fastapi-root-path ssl-keyfile ssl-certfile "
    "skip-server-warmup warmups",
    "tokenizer": "tokenizer-path tokenizer-mode tokenizer-backend tokenizer-worker-num skip-tokenizer-init "
    "enable-tokenizer-batch-encode enable-dynamic-batch-tokenizer chat-template hf-chat-template-name "
    "default-chat-template-kwargs trust-request-chat-template sampling-defaults preferred-sampling-params "
    "reasoning-parser tool-call-parser batch-notify-size stream-interval incremental-streaming-output "
    "stream-response-default-include-usage enable-cache-report allow-auto-truncate grammar-backend",
    "detokenizer": "detokenizer-worker-num disable-tokenizer-batch-decode",
    "model": "model-path model load-format dtype kv-cache-dtype context-length trust-remote-code tp-size tp "
    "tensor-parallel-size pp-size pipeline-parallel-size dp-size data-parallel-size nccl-port dist-init-addr nnodes "
    "node-rank device random-seed attention-backend prefill-attention-backend decode-attention-backend "
    "sampling-backend",
    "memory": "mem-fraction-static max-total-tokens max-running-requests max-queued-requests chunked-prefill-size "
    "max-prefill-tokens prefill-max-requests schedule-policy schedule-conservativeness page-size disable-radix-cache "
    "radix-eviction-policy disable-overlap-schedule enable-mixed-chunk scheduler-recv-interval "
    "prefill-decode-interval enable-priority-scheduling retraction-policy watchdog-timeout soft-watchdog-timeout "
    "sleep-on-idle",
    "graphs": "cuda-graph-max-bs-decode cuda-graph-max-bs cuda-graph-bs-decode cuda-graph-bs "
    "disable-cuda-graph cuda-graph-backend-decode cuda-graph-backend-prefill disable-cuda-graph-padding "
    "enable-torch-compile torch-compile-max-bs graph-capture",
    "speculation": "speculative-algorithm speculative-draft-model-path speculative-draft-model speculative-num-steps "
    "speculative-eagle-topk speculative-num-draft-tokens speculative-accept-threshold-single "
    "speculative-accept-threshold-acc speculative-use-rejection-sampling speculative-attention-mode "
    "speculative-token-map speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth "
    "speculative-ngram-max-trie-depth speculative-ngram-capacity speculative-ngram-match-type",
    "logging": "log-level log-level-http log-requests log-requests-level enable-metrics "
    "enable-metrics-for-all-schedulers decode-log-interval bucket-time-to-first-token bucket-inter-token-latency "
    "bucket-e2e-request-latency crash-dump-folder",
    "own": "max-request-bytes max-batch-size drain-timeout debug-invariants trace-dir num-threads kv-pool-bytes",
}
SPELLINGS = {f"--{word}" for table in TABLES.values() for word in table.split()}


def example(name: str) -> list[str]:
    """Text of a value that the flag takes."""
    flag, wanted = flags()[name], value_types()[name]
    if wanted is bool:
        return []
    if flag.choices:
        return [flag.choices[-1]]
    if wanted is str:
        return ["text"]
    return ['{"a": 1}'] if wanted not in (int, float) and str(wanted).startswith("dict") else ["3"]


def test_the_tables_and_the_record_name_the_same_flags() -> None:
    known = {option for name, flag in flags().items() for option in option_strings(name, flag)}
    extra = {"--pp", "--dp", "--cuda-graph-max-bs-prefill"}  # short forms of SGLang's users, and a table's "…-prefill"
    assert known - extra == SPELLINGS


@pytest.mark.parametrize("option", sorted(SPELLINGS))
def test_every_flag_parses(option: str) -> None:
    name = next(name for name, flag in flags().items() if option in option_strings(name, flag))
    args = parse([option, *example(name)])
    assert getattr(args, name) not in (None, False)


def test_no_flags_give_the_defaults() -> None:
    assert parse([]) == ServerArgs()


def test_unique_prefixes_are_accepted_and_ambiguous_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--tp", "2"]).tensor_parallel_size == 2
    assert parse(["--max-total", "8k"]).max_total_tokens == 8000
    assert parse(["--cuda-graph-max-bs", "8"]).cuda_graph_max_bs_decode == 8, "an alias, not an ambiguous prefix"
    with pytest.raises(SystemExit) as exit_:
        parse(["--max", "1"])
    assert exit_.value.code == 2 and "ambiguous" in capsys.readouterr().err


def test_values() -> None:
    args = parse(
        "--context-length 1.5k --max-prefill-tokens 4Ki --cuda-graph-bs-decode 1 2 4 --chunked-prefill-size -1 "
        "--bucket-inter-token-latency 0.1 1".split()
        + ["--default-chat-template-kwargs", '{"a": [1]}']
    )
    assert (args.context_length, args.max_prefill_tokens, args.cuda_graph_bs_decode) == (1500, 4096, [1, 2, 4])
    assert (args.chunked_prefill_size, args.bucket_inter_token_latency) == (-1, [0.1, 1.0])
    assert args.default_chat_template_kwargs == {"a": [1]}


def test_a_switch_that_is_automatic_can_be_said_both_ways() -> None:
    assert parse([]).disable_overlap_schedule is None
    assert parse(["--disable-overlap-schedule"]).disable_overlap_schedule is True
    assert parse(["--no-disable-overlap-schedule"]).disable_overlap_schedule is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context-length", "8K"], "argument --context-length: '8K' is not a number such as 8000, 8k or 8Ki"),
        (["--port", "http"], "argument --port: invalid int value: 'http'"),
        (["--schedule-policy", "best"], "invalid choice: 'best'"),
        (["--preferred-sampling-params", "{"], "not JSON"),
        (["--preferred-sampling-params", "[1]"], "a JSON object is needed, not [1]"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_usage_error_is_two_lines_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(argv)
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and message in err and len(err.splitlines()) == 2


def test_help_shows_every_flag_under_its_group_with_default_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    for name, flag in flags().items():
        assert option_strings(name, flag)[0] in text
    assert "Memory and scheduling:" in text and "default 30000" in text
    assert help_text(flags()["chunked_prefill_size"]).endswith("(auto: 8192; on a CPU 512)")
    assert help_text(flags()["enable_http2"]).endswith("[arrives with the HTTP/2 transport]")


def test_the_help_of_a_command_with_flags_of_its_own_names_those_and_takes_all() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--stop")
    add_flags(parser, in_help=False)
    assert parser.parse_args(["hello", "--page-size", "4"]).page_size == 4
    text = parser.format_help()
    assert [line for line in text.splitlines() if "--" in line] == [
        "  -h, --help   show this help message and exit",
        "  --stop STOP",
        "  any flag of `tinysrt serve`; see `tinysrt serve --help`",
    ]


# ---- config files ----------------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return str(path)


def test_a_config_file_sets_flags_and_what_is_typed_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "tp-size: 1\nport: 1234\npage_size: 16\ncontext-length: 8k\ndisable-radix-cache: true\n"
        "disable-overlap-schedule: false\nchunked-prefill-size: -1\ndrain-timeout: 3\nchat-template:\n"
        "default-chat-template-kwargs: {enable_thinking: false}\n",
    )
    for argv in (
        ["--config", path, "--port", "99"],
        ["--port", "99", f"--config={path}"],
        ["--conf", path, "--port=99"],
    ):
        args = parse(argv)
        assert args.port == 99, "typed, before or after"
        assert (args.page_size, args.context_length, args.disable_radix_cache) == (16, 8000, True)
        assert args.disable_overlap_schedule is False and args.chunked_prefill_size == -1 and args.drain_timeout == 3.0
        assert args.default_chat_template_kwargs == {"enable_thinking": False}
        assert parse([*argv, "--no-disable-overlap-schedule"]).disable_overlap_schedule is False


def test_an_empty_config_file_is_fine(tmp_path: Path) -> None:
    assert parse(["--config", write(tmp_path, "# nothing\n")]) == ServerArgs()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown argument 'prot'; did you mean 'port'?"),
        ("port: '1'", "port must be int"),
        ("disable-radix-cache: 1", "disable_radix_cache must be bool, not int (1)"),
        ("context-length: 8K", "is not a number such as"),
        ("- port", "must hold a mapping"),
        ("port: [", "is not YAML"),
        ("port: 1\ntp: 1\ntp-size: 1", "tensor_parallel_size is given twice"),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line_that_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(StartupError) as error:
        parse(["--config", path])
    assert message in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(StartupError, match="--config /no/such.yaml: No such file or directory"):
        parse(["--config", "/no/such.yaml"])


def test_server_info_is_json() -> None:
    assert json.loads(json.dumps(ServerArgs().to_info()))["schedule_policy"] == "lpm"
