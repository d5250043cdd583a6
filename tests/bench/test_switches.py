"""`bench switches` on a tiny model: what is played, how a gain is made, what is skipped. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model_executor.harness import save_tiny_model
from tinysrt.bench import switches
from tinysrt.bench.in_process import InProcess, Played, Want, with_flags
from tinysrt.bench.switches import SWITCHES, Bench, Switch, decode_step, last_ttft, longest_gap, run_switches, wall
from tinysrt.errors import StartupError
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.server_args import ServerArgs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", folder, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    args = ServerArgs(model_path=str(folder), device="cpu", num_threads=1, context_length=4096, max_total_tokens=4096)
    config = ModelConfig.from_pretrained(str(folder), context_length=4096, dtype="auto")
    return Bench(args, config, pairs=2, scale=0.02)


def played(*arrivals: list[float], sent: list[float] | None = None) -> Played:
    return Played(10.0, sent or [10.0] * len(arrivals), list(arrivals), 0)


def test_figures_of_a_known_course_of_events() -> None:
    course = played([11.0, 12.0, 13.0, 17.0], [11.0, 12.0, 15.0, 19.0], [16.0], sent=[10.0, 10.0, 13.5])
    assert wall(course) == 9.0 and last_ttft(course) == 2.5
    assert longest_gap(course) == 4.0  # 13 → 17 and 15 → 19 touch the newcomer's 13.5 … 16, 12 → 13 does not
    assert decode_step(played([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5])) == (4.0 - 2.5) / 2


def test_a_late_request_comes_when_all_others_have_produced_what_was_said(bench: Bench) -> None:
    args = with_flags(bench.args, disable_overlap_schedule=True)
    side = InProcess(bench.runner(args), args)
    course = side.play([Want([5, 6, 7], 9), Want([8, 9], 12), Want([4] * 20, 2, late=3)])
    side.close()
    assert [len(times) for times in course.arrivals] == [9, 12, 2]
    assert course.sent[2] >= max(course.arrivals[0][2], course.arrivals[1][2])
    assert course.arrivals[2][0] <= course.arrivals[0][8]  # and not only after them


@pytest.mark.parametrize("overlap", [False, True])
def test_a_play_finds_nothing_of_the_one_before_and_shares_within_itself(bench: Bench, overlap: bool) -> None:
    args = with_flags(bench.args, disable_overlap_schedule=not overlap)
    side = InProcess(bench.runner(args), args)
    prefix = list(range(3, 40))
    wants = [Want([*prefix, 100 + i], 2) for i in range(3)]
    courses = [side.play(wants) for _ in range(2)]
    side.close()
    assert courses[0].cached_tokens == courses[1].cached_tokens == 2 * len(prefix)  # the first computes it


def test_one_request_at_a_time_takes_as_many_forwards_as_tokens(bench: Bench) -> None:
    args = with_flags(bench.args, max_running_requests=1, disable_overlap_schedule=True)
    runner = bench.runner(with_flags(bench.args))
    assert runner.max_running_requests > 1
    side = InProcess(runner, args)
    side.play([Want([5, 6, i], 4) for i in range(3, 6)])
    side.close()
    assert side.scheduler.forward_count == 3 * 4


@pytest.mark.parametrize("switch", [switch for switch in SWITCHES if switch.on is not switches.COMPILED],
                         ids=lambda switch: switch.name)  # fmt: skip
def test_every_switch_is_measured_or_says_why_not(bench: Bench, switch: Switch) -> None:
    rows = run_switches(bench, [switch])
    if "skipped" in rows[0]:
        assert "numba" in rows[0]["skipped"] or "CUDA" in rows[0]["skipped"]
        return
    assert [row["figure"] for row in rows] == list(switch.figures)
    for row in rows:
        assert row["gain"]["min"] <= row["gain"]["median"] <= row["gain"]["max"] and row["noise"]["median"] > 0
        assert row["off_ms"] > 0 and row["on_ms"] > 0


def test_sides_share_a_model_unless_the_runner_itself_is_switched(bench: Bench) -> None:
    flags = with_flags(bench.args, chunked_prefill_size=64), with_flags(bench.args, disable_radix_cache=True)
    assert bench.runner(flags[0]) is bench.runner(flags[1])
    assert bench.runner(with_flags(bench.args, page_size=16)) is not bench.runner(flags[0])


def test_a_side_that_allows_one_request_does_not_size_the_runner_of_both(bench: Bench) -> None:
    fresh = Bench(bench.args, bench.config, pairs=1)
    runner = fresh.runner(with_flags(bench.args, max_running_requests=1))
    assert runner.max_running_requests > 1
    assert fresh.runner(with_flags(bench.args)) is runner


def test_a_gain_is_the_median_over_pairs_of_off_against_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([99.0, 99.0, 99.0, 2.0, 1.0, 4.0, 6.0, 1.0, 6.0])  # off, on, off of the warm-up and of two pairs
    monkeypatch.setattr(InProcess, "play", lambda self, wants: played([10.0 + next(walls)]))
    (row,) = bench.measure(Switch("s", {}, {}, lambda draws: [], {"wall": wall}))
    assert row == {
        "switch": "s", "figure": "wall", "off_ms": 4000.0, "on_ms": 1000.0,
        "gain": {"median": 4.5, "min": 3.0, "max": 6.0}, "noise": {"median": 1.5, "min": 1.0, "max": 2.0},
    }  # fmt: skip


def test_what_this_machine_cannot_have_is_skipped_by_name_and_the_rest_is_measured(bench: Bench) -> None:
    impossible = Switch("no such thing", {}, dict(attention_backend="quantum"), lambda draws: [], {"wall": wall})
    said: list[str] = []
    assert run_switches(bench, [impossible], say=said.append)[0]["skipped"].startswith("--attention-backend 'quantum'")
    assert said[0] == "1 of 1: no such thing …" and len(said) == 2, "told when it begins and when it has ended"


def test_the_command_writes_its_record_and_a_plot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--model-path", str(folder), "--num-threads", "1", "--scale", "0.02", "--pairs", "1"]
    chosen = ["--only", "radix", "packed", "--json", str(file), "--plot", str(picture)]
    assert switches.main([*arguments, *chosen]) == 0
    record = json.loads(file.read_text())
    assert [row["switch"] for row in record["rows"]] == ["radix cache", "prompts packed"]
    assert "<svg" in picture.read_text() and "prompts packed" in capsys.readouterr().out
    with pytest.raises(StartupError, match="no switch has such a name"):
        switches.main(["--only", "warp drive"])


def test_quick_leaves_out_the_dear_ones_and_compile_asks_for_the_dearest(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*flags: str) -> list[str]:
        assert switches.main(["--list", *flags]) == 0
        return capsys.readouterr().out.splitlines()

    quick, full, compiled = names("--quick"), names(), names("--compile")
    assert len(quick) < len(full) < len(compiled)
    assert {"radix", "chunks,", "overlap"} <= {line.split()[0] for line in quick}
