# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One request, end to end
#
# You run one prompt through the whole runtime, three processes and a real model, with the recorder on. Then you read
# what each process wrote down: how text becomes ids, waits, is admitted, is computed token by token, and becomes text
# again.
#
# After this lab you can
#
# - name the stations of a request in their order, and the process of each,
# - say where its time goes, and compute time to first token from a trace,
# - tell from a trace whether a prefix came from the cache, and whether steps overlap.
#
# Before it: [chapter 2](../docs/chapters/02-journey.md). It needs the demo model (92 MB, fetched once by `tinysrt
# demo-model`) and takes a minute.

# %% [markdown]
# ## A recorded run
#
# `tinysrt.Engine` is the server without HTTP. With `trace_dir` every process writes its events into a file of its own
# there. The same prompt is asked twice: once as a whole, once as a stream. Overlap is off at first, so that things
# happen one after the other.

# %% tags=["varies"]
import tempfile

import tinysrt

globals().pop("__file__", None)  # as a script: the processes that it spawns must not run it again
PROMPT = "The capital of France is"
scratch = tempfile.TemporaryDirectory(prefix="tinysrt-lab-")  # goes with the kernel


def traced(*, overlap, requests):
    """Run the prompt once for each of `requests`, whole or as a stream; the answers, and the folder of the trace."""
    folder = tempfile.mkdtemp(dir=scratch.name)
    # One thread for the model: two would fight for the cores with whatever else runs here, and times would say little.
    flags = dict(trace_dir=folder, disable_overlap_schedule=not overlap, num_threads=1)
    answers = []
    with tinysrt.Engine(**flags, max_total_tokens=2048, log_level="error") as engine:
        # The very first request also pays for what is made on first use.
        engine.generate("Hello", {"max_new_tokens": 1}, rid="first")
        for rid, stream in requests:
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answer = engine.generate(PROMPT, sampling, rid=rid, stream=stream)
            answers.append(list(answer) if stream else answer)
    return answers, folder


(whole, chunks), folder = traced(overlap=False, requests=[("whole", False), ("stream", True)])
print(whole["text"])
print([chunk["text"] for chunk in chunks])

# %% [markdown]
# ## The files, and one run
#
# Every process has written a file; [load](../tinysrt/observe/merge.py#load) joins them in the order of time. That
# works because all three read the same clock, `time.monotonic_ns`. A line is a time, a process, an event, and what
# there is to say about it; the [table of events](../tinysrt/observe/trace.py#EVENTS) says what each means.

# %%
from pathlib import Path

from tinysrt.observe.merge import load

events = load(folder)
print(sorted(path.name.split("-")[0] for path in Path(folder).iterdir()))
for process in ("tokenizer", "scheduler", "detokenizer"):
    print(f"{process:12}", *dict.fromkeys(event["e"] for event in events if event["p"] == process))

# %% [markdown]
# ## One life
#
# **Predict:** eight tokens came out. How many forward passes did that take, and how many of them computed more than
# one token?

# %% tags=["predict"]
launched = [event for event in events if event["e"] == "forward_launched" and "whole" in event["rids"]]
for event in launched:
    print("step", event["step"], event["mode"], "computes", event["tokens"], "token(s)")

# %% [markdown]
# One prefill of all prompt tokens, which also gives the first output token, and seven decode steps. Here is the whole
# life of the request, from [the same rendering](../tinysrt/observe/render.py#render_request) that `tinysrt trace
# --text` prints. Times are milliseconds.

# %% tags=["varies"]
from rich.console import Console

from tinysrt.observe.render import render_request

console = Console(width=110, color_system=None, force_jupyter=False)
console.print(render_request(events, "whole"))

# %% [markdown]
# Read it from the top:
#
# - `request_received`, `tokenized`, `sent`: the main process. The prompt is five ids now; from here on nobody looks
#   at text until the way back.
# - `queued`, `matched`, `admitted`: the scheduler. The prefix cache is empty, so all five tokens must be computed:
#   `extend=[0, 5]`.
# - `forward_launched`, `sampled`, `appended`, `forward_done`, eight times. Each `appended` is one token of the
#   answer.
# - `merged`, after the first: the prefill is over, the request joins those who decode.
# - `finished`, then `detokenized` and `text_sent`: the way back. The client did not stream, so the detokenizer heard
#   of the request only once.

# %% [markdown]
# ## Where the time went


# %% tags=["varies"]
def when(events, rid, name):
    """Milliseconds on the trace's clock of the first event of this name in the life of `rid`."""
    return next(event["t"] / 1e6 for event in events if event["e"] == name and event.get("rid") == rid)


stations = ["request_received", "tokenized", "queued", "admitted", "appended", "finished", "text_sent"]
for start, end in zip(stations, stations[1:], strict=False):
    print(f"{start:>17} → {end:10}{when(events, 'whole', end) - when(events, 'whole', start):9.2f} ms")

# %% [markdown]
# Nearly everything is the model: `admitted → appended` is the prefill, `appended → finished` the seven decode steps.
# What the three processes add around it is what this runtime is about: it must stay small while hundreds of requests
# are served at a time.

# %% [markdown]
# ## The second time
#
# The second request had the same prompt. **Predict:** how many of its five tokens came from the prefix cache? And how
# often did the door get news, when the client streamed?

# %% tags=["predict"]
for event in events:
    if event["e"] in ("matched", "admitted") and event["rid"] != "first":
        print(event["rid"], event["e"], {key: event[key] for key in ("cached", "prompt_len", "extend") if key in event})
for rid in ("whole", "stream"):
    print(rid, "text_sent", sum(event["e"] == "text_sent" and event["rid"] == rid for event in events), "time(s)")

# %% [markdown]
# Four, not five. The KV of all five is in the tree, but the logits after the last token are not, and they are what
# the next token is drawn from; so at least one token is always computed. (A match is cut at one less than the prompt:
# see [match_limit](../tinysrt/managers/schedule_batch.py#Req.match_limit).)
#
# ## Overlap
#
# Once more, with overlap on. **Predict:** how many forwards have been launched when the first token is appended?

# %% tags=["varies"]
(answer,), folder = traced(overlap=True, requests=[("overlapped", False)])
overlapped = load(folder)
print("same text:", answer["text"] == whole["text"])


# %% tags=["predict"]
def launched_before_first_token(events, rid):
    names = [event["e"] for event in events if event.get("rid") == rid or rid in event.get("rids", ())]
    return names[: names.index("appended")].count("forward_launched")


print("normal ", launched_before_first_token(events, "whole"))
print("overlap", launched_before_first_token(overlapped, "overlapped"))

# %% [markdown]
# With overlap the second forward is on its way before the scheduler knows the first token: its input is taken from
# the *relay*, on the device. Chapter 12 shows how, and what must be true for that to be safe.
#
# To look at a run with a mouse, export it and open the file at ui.perfetto.dev, or in `chrome://tracing`:

# %%
from tinysrt.observe.perfetto import export_perfetto

export_perfetto(events, Path(folder) / "run.json")
print((Path(folder) / "run.json").stat().st_size > 1000)

# %% [markdown]
# ## Exercises
#
# **1.** Time to first token is what a client waits before it sees anything. Write `ttft(events, rid)`: milliseconds
# from the request's arrival to the first text handed to the door.


# %%
def ttft(events, rid):
    return None  # your turn


def check_ttft(ttft):
    def event(ms, name, rid):
        return {"t": ms * 1_000_000, "p": "tokenizer", "e": name, "rid": rid}

    made_up = [
        event(5, "request_received", "x"),
        event(7, "request_received", "y"),
        event(30, "text_sent", "x"),
        event(42, "text_sent", "y"),
        event(50, "text_sent", "y"),
    ]
    answer = ttft(made_up, "y")
    if answer is None:
        return "not answered yet"
    return "right" if answer == 35 else f"not yet: arrival at 7 ms, first text at 42 ms, and you say {answer}"


print(check_ttft(ttft))

# %% [markdown]
# **2.** A trace also says how busy the model is. Write `idle_ms(events)`: milliseconds between the first launch and
# the last result in which no forward was running (launched and not done). Forwards may overlap.


# %%
def idle_ms(events):
    return None  # your turn


def check_idle(idle_ms):
    def event(ms, name, step):
        return {"t": ms * 1_000_000, "p": "scheduler", "e": name, "step": step}

    one_by_one = [event(0, "forward_launched", 1), event(4, "forward_done", 1)]
    one_by_one += [event(7, "forward_launched", 2), event(9, "forward_done", 2)]
    crossing = [event(0, "forward_launched", 1), event(3, "forward_launched", 2)]
    crossing += [event(4, "forward_done", 1), event(8, "forward_done", 2)]
    answers = idle_ms(one_by_one), idle_ms(crossing)
    if None in answers:
        return "not answered yet"
    return "right" if answers == (3, 0) else f"not yet: (3, 0) it is, and you say {answers}"


print(check_idle(idle_ms))

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def my_ttft(events, rid):
    return when(events, rid, "text_sent") - when(events, rid, "request_received")


print(check_ttft(my_ttft))


# %% tags=["solution"]
def my_idle_ms(events):
    idle, running, since = 0, 0, None
    for event in events:
        if event["e"] == "forward_launched":
            if running == 0 and since is not None:
                idle += event["t"] - since
            running += 1
        elif event["e"] == "forward_done":
            running, since = running - 1, event["t"]
    return idle / 1e6


print(check_idle(my_idle_ms))

# %% tags=["varies"]
print(f"whole: {my_ttft(events, 'whole'):.1f} ms, stream: {my_ttft(events, 'stream'):.1f} ms to the first text")
print(f"no forward running: {my_idle_ms(events):.1f} ms, with overlap {my_idle_ms(overlapped):.1f} ms")
