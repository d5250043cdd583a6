"""One record: what may be said, what is refused by name, and what "auto" becomes."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from tinysrt import server_args as module
from tinysrt.errors import StartupError
from tinysrt.server_args import GROUPS, SGLANG_NAMES, ServerArgs, flags, keyword_names, parse_human_int, value_types


def resolved(**keywords: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(**({"model_path": "some/model", "device": "cpu"} | keywords)).resolve()


# ---- the record ------------------------------------------------------------------------------------


def test_every_field_is_a_flag_with_a_group_a_type_and_a_help_text() -> None:
    for field in dataclasses.fields(ServerArgs):
        flag = flags()[field.name]
        assert flag.group in GROUPS and flag.help and flag.default == field.default
        assert value_types()[field.name] is not None
        assert flag.auto is None or flag.default is None, f"{field.name}: only None means auto"


def test_the_record_is_frozen_and_crosses_a_process_boundary() -> None:
    args = resolved(default_chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(args)) == args


def test_defaults_are_those_of_the_articles() -> None:
    args = ServerArgs()
    assert (args.port, args.host, args.schedule_policy, args.page_size) == (30000, "127.0.0.1", "lpm", 1)
    assert (args.batch_notify_size, args.stream_interval, args.sampling_defaults) == (16, 1, "model")


# ---- keywords --------------------------------------------------------------------------------------


def test_sglangs_short_names_are_taken_and_given() -> None:
    args = ServerArgs.from_kwargs(model="m", tp_size=1, pp=1, data_parallel_size=1)
    assert args == ServerArgs(model_path="m")
    info = args.to_info()
    for short, name in SGLANG_NAMES.items():
        assert info[short] == info[name] == 1
        assert keyword_names()[short] == name


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"modle_path": "m"}, "unknown argument 'modle_path'; did you mean 'model_path'?"),
        ({"tp": 1, "tp_size": 1}, "tensor_parallel_size is given twice, the second time as 'tp_size'"),
        ({"port": "30000"}, "port must be int, not str ('30000')"),
        ({"port": True}, "port must be int, not bool (True)"),
        ({"port": None}, "port must be int, not NoneType (None)"),
        ({"disable_radix_cache": 1}, "disable_radix_cache must be bool, not int (1)"),
        ({"preferred_sampling_params": "{}"}, "preferred_sampling_params must be dict, not str ('{}')"),
        ({"context_length": "8K"}, "context_length='8K' is not a number such as 8000, 8k or 8Ki"),
    ],
)
def test_a_wrong_keyword_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as error:
        ServerArgs.from_kwargs(**keywords)
    assert str(error.value) == message


def test_keywords_take_what_python_callers_have() -> None:
    args = ServerArgs.from_kwargs(model_path=Path("/models/m"), context_length="8k", watchdog_timeout=10, device=None)
    assert (args.model_path, args.context_length, args.watchdog_timeout) == ("/models/m", 8000, 10.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("17", 17),
        ("8k", 8000),
        ("1.5k", 1500),
        ("4.1k", 4100),
        ("2M", 2_000_000),
        ("4Ki", 4096),
        ("1Mi", 2**20),
        ("0.5Ki", 512),
    ],
)
def test_human_integers(text: str, value: int) -> None:
    assert parse_human_int(text) == value


@pytest.mark.parametrize("text", ["8K", "8m", "k", "", "1.5", "8 kb", "1.0001k", "inf", "1e3", "nank"])
def test_what_is_no_human_integer(text: str) -> None:
    with pytest.raises(ValueError):
        parse_human_int(text)


# ---- refusals --------------------------------------------------------------------------------------


def other_value(name: str) -> Any:
    """A value of the right type that differs from the default and asks for something."""
    flag, wanted = flags()[name], value_types()[name]
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default and choice not in flag.now)
    if wanted is bool:
        return True
    if wanted is int or wanted is float:
        return wanted(flag.default or 1) + 1
    return "something" if wanted is str else [1]


LATER = [name for name, flag in flags().items() if flag.later is not None]
ALREADY_SO = {name for name, flag in flags().items() if True in flag.now}


@pytest.mark.parametrize("name", [name for name in LATER if name not in ALREADY_SO])
def test_a_flag_that_is_not_here_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(StartupError, match=f"^--{name.replace('_', '-')}.* is not supported: "):
        resolved(**{name: other_value(name)})


def test_the_refusal_says_what_it_waits_for_and_what_to_do() -> None:
    with pytest.raises(StartupError) as error:
        resolved(tokenizer_worker_num=2)
    assert str(error.value) == (
        "--tokenizer-worker-num 2 is not supported: it arrives with several workers; leave it at 1"
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tp": 3, "nnodes": 2, "dist_init_addr": "a:1"}, "--nnodes 2 does not divide the 3 ranks of --tp 3"),
        ({"tp": 2, "nnodes": 2}, "--nnodes needs --dist-init-addr"),
        ({"node_rank": 1}, "--node-rank 1 is not below --nnodes 1"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "here"}, "--dist-init-addr 'here' is not host:port"),
        ({"tp": 2, "dp": 2, "nnodes": 2, "dist_init_addr": "a:1"}, "--dp puts replicas on one machine"),
        ({"tp": 2, "nccl_port": 1, "dist_init_addr": "a:1"}, "both say where the ranks meet"),
        ({"tp": 2, "enable_torch_compile": True}, "--graph-capture compile works within one process"),
        ({"pp": 2, "graph_capture": "eager"}, "--graph-capture eager works within one process"),
        ({"pp": 2, "disable_overlap_schedule": False}, "with --pp there is no overlap"),
    ],
)
def test_ranks_that_cannot_be_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        resolved(**keywords)


def test_overlap_is_for_cuda_unless_typed_and_not_for_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved().disable_overlap_schedule
    assert not resolved(disable_overlap_schedule=False).disable_overlap_schedule
    assert resolved(pp=2).disable_overlap_schedule
    monkeypatch.setattr(module, "_resolve_device", lambda device: "cuda")
    assert not resolved(device="cuda").disable_overlap_schedule
    assert resolved(device="cuda", disable_overlap_schedule=True).disable_overlap_schedule


def test_ranks_of_a_machine_share_its_memory() -> None:
    assert resolved(tp=2, pp=2, dp=2).ranks_on_this_machine() == 8
    assert resolved(tp=4, nnodes=2, dist_init_addr="a:1").ranks_on_this_machine() == 2


@pytest.mark.parametrize(
    "keywords",
    [
        {"tensor_parallel_size": 1},
        {"grammar_backend": "none"},
        {"attention_backend": "torch_native"},
        {"sampling_backend": "pytorch"},
        {"disable_cuda_graph": True},
        {"cuda_graph_backend_decode": "disabled"},
        {"radix_eviction_policy": "lru"},
        {"speculative_algorithm": None},
        {"sleep_on_idle": True},
    ],
)
def test_a_value_that_asks_for_nothing_new_is_fine(keywords: dict[str, Any]) -> None:
    name, value = next(iter(keywords.items()))
    assert getattr(resolved(**keywords), name) in (value, "pytorch", "torch_native", None)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"chunked_prefill_size": 100, "page_size": 16}, "100 is not a multiple of --page-size 16"),
        ({"served_model_name": "base:adapter"}, "must not contain ':'"),
        ({"ssl_keyfile": "key.pem"}, "need each other"),
        ({"ssl_keyfile": "/no/key.pem", "ssl_certfile": "/no/cert.pem"}, "no such file: /no/key.pem"),
        ({"mem_fraction_static": 1.5}, "between 0 and 1, not 1.5"),
        ({"mem_fraction_static": float("nan")}, "between 0 and 1"),
        ({"watchdog_timeout": float("nan")}, "must be above 0"),
        ({"schedule_conservativeness": 0.0}, "must be above 0, not 0.0"),
        ({"port": 70000}, "must be at most 65535"),
        ({"page_size": 0}, "--page-size must be at least 1, not 0"),
        ({"max_total_tokens": 0}, "--max-total-tokens must be at least 1, not 0"),
        ({"drain_timeout": -1.0}, "--drain-timeout must be at least 0, not -1.0"),
        ({"schedule_policy": "priority"}, "'priority' is not one of lpm, fcfs, dfs-weight, lof, random"),
        ({"attention_backend": "flashinfer"}, "'flashinfer' is not one of torch_native"),
        ({"dtype": "int8"}, "'int8' is not one of auto"),
        ({"device": "tpu"}, "'tpu' is not one of cpu, cuda"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_what_cannot_be_is_refused_with_one_line(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as error:
        resolved(**keywords)
    assert message in str(error.value) and "\n" not in str(error.value)


# ---- resolving -------------------------------------------------------------------------------------


def test_on_a_cpu_sizes_are_what_a_laptop_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 64 * 2**30)
    args = resolved()
    assert (args.chunked_prefill_size, args.max_running_requests, args.kv_pool_bytes) == (512, 64, 2 * 2**30)
    monkeypatch.setattr(module, "available_memory", lambda: 4 * 2**30)
    assert resolved().kv_pool_bytes == 2**30, "a quarter, where that is less"


def test_what_is_typed_is_kept_on_a_cpu() -> None:
    args = resolved(chunked_prefill_size=8192, max_running_requests=3, mem_fraction_static=0.5)
    assert (args.chunked_prefill_size, args.max_running_requests, args.mem_fraction_static) == (8192, 3, 0.5)
    assert args.kv_pool_bytes is None, "the fraction decides"
    assert resolved(kv_pool_bytes="64Mi").kv_pool_bytes == 64 * 2**20


def test_on_a_gpu_sizes_are_the_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_resolve_device", lambda device: "cuda")
    args = resolved(device=None)
    assert (args.chunked_prefill_size, args.mem_fraction_static) == (8192, 0.88)
    assert args.max_running_requests is None and args.kv_pool_bytes is None, "the runner computes them from its memory"


def test_resolving_twice_changes_nothing() -> None:
    for args in (resolved(), resolved(disable_radix_cache=True, chunked_prefill_size=-5, page_size=16)):
        assert args.resolve() == args


def test_nothing_that_names_an_auto_stays_auto_but_limits_that_may_be_absent() -> None:
    args = resolved()
    unset = {name for name, flag in flags().items() if flag.auto and getattr(args, name) is None}
    assert unset == {
        "chat_template",  # the TokenizerManager finds these five in the model's files
        "hf_chat_template_name",
        "context_length",
        "max_total_tokens",
        "num_threads",
        "max_queued_requests",  # no limit
        "prefill_max_requests",
    }


def test_cache_aware_policies_need_the_cache() -> None:
    for policy in ("lpm", "dfs-weight"):
        assert resolved(schedule_policy=policy).schedule_policy == policy
        assert resolved(schedule_policy=policy, disable_radix_cache=True).schedule_policy == "fcfs"
    assert resolved(schedule_policy="lof", disable_radix_cache=True).schedule_policy == "lof"


def test_chunk_sizes() -> None:
    assert resolved(chunked_prefill_size=0).chunked_prefill_size == -1
    assert resolved(chunked_prefill_size=-7, page_size=16).chunked_prefill_size == -1
    assert resolved(chunked_prefill_size=32, page_size=16).chunked_prefill_size == 32
    assert resolved(page_size=96).chunked_prefill_size == 576, "the automatic size is whole pages"


def test_names_follow_the_model_path() -> None:
    args = resolved(model_path="/models/with:colon")
    assert args.served_model_name == args.tokenizer_path == "/models/with:colon"
    assert resolved(served_model_name="mine").served_model_name == "mine"


def test_an_index_behind_the_device_is_dropped() -> None:
    assert resolved(device="cpu:0").device == "cpu"


def test_seeds() -> None:
    assert resolved(random_seed=7).random_seed == 7
    drawn = resolved().random_seed
    assert drawn is not None and 0 <= drawn < 2**30


def test_the_log_line_tells_what_differs_from_the_defaults() -> None:
    line = resolved(page_size=16, random_seed=7).describe()
    assert "page_size=16" in line and "random_seed=7" in line and "\n" not in line
    assert "stream_interval" not in line
    assert ServerArgs().describe() == "all defaults"


def test_secrets_are_never_shown() -> None:
    args = ServerArgs(api_key="s3cret", admin_api_key="s3cret")
    assert "s3cret" not in str(args.to_info()) + args.describe()


def test_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 300\ninactive_file 400"}
    monkeypatch.setattr(module, "_read", lambda path: files[path.removeprefix("/sys/fs/cgroup/")])
    monkeypatch.setattr(module, "_CGROUPS", module._CGROUPS[:1])
    assert module.available_memory() == 700, "limit - used + what is only cached"
    files["memory.max"] = "max\n"
    assert module.available_memory() > 1000
