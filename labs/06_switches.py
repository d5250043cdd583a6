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
# # The switches, on your own machine
#
# Each mechanism of the runtime can be turned off. In this lab you turn them off one by one, predict what happens, and
# measure it here, with a real model (SmolLM2-135M) in this process. Two kinds of figures come out:
#
# - *counts*: tokens from the cache, forwards, tokens that a reader got. They are the same on every machine, every time.
#   A mechanism's effect is a count first.
# - *times*: what the counts are worth on this machine. They vary; the ones you see here were taken on a shared machine
#   with two cores, and yours will differ.
#
# After this lab you can
#
# - say for each mechanism which count it changes, and predict the count exactly,
# - measure a difference in pairs and tell it from noise,
# - add a switch of your own to `tinysrt bench switches`.
#
# Before it: [chapter 18](../docs/chapters/18-measuring.md).

# %% tags=["varies"]
from tinysrt.bench.switches import SWITCHES

for switch in SWITCHES:
    print(f"{switch.name:32} {', '.join(switch.figures)}")

# %% [markdown]
# A [Switch](../tinysrt/bench/switches.py#Switch) is data: flags for off, flags for on, a workload, figures. The
# [Bench](../tinysrt/bench/switches.py#Bench) holds the model; [InProcess](../tinysrt/bench/in_process.py#InProcess) is
# a scheduler around it that plays a workload until everybody has ended.

# %%
from tinysrt.bench.in_process import InProcess, Want, with_flags
from tinysrt.bench.switches import Bench
from tinysrt.bench.workloads import Draws
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

folder = ensure_demo_model()
# One thread: two on two cores lose a factor of ten as soon as anything else runs, and beside a notebook something does.
args = ServerArgs(model_path=folder, device="cpu", num_threads=1, context_length=2048, max_total_tokens=6144)
bench = Bench(args, ModelConfig.from_pretrained(folder, context_length=2048, dtype="auto"), pairs=2, scale=0.25)


def play(wants, **flags):
    """Play a workload on a scheduler with these flags; what came out, and how many forwards it took."""
    resolved = with_flags(args, disable_overlap_schedule=True, **flags)
    side = InProcess(bench.runner(resolved), resolved)
    course = side.play(wants)
    side.close()
    return course, side.scheduler.forward_count


def prompt(tokens, seed=0):
    return Draws(bench.config.vocab_size, seed).prompt(tokens)


# %% [markdown]
# ## The radix cache
#
# Four questions of 8 tokens about one text of 120, asked together, 4 tokens of answer each. **Predict:** how many
# prompt tokens come from the cache, with it and without? How many are computed?

# %% tags=["predict"]
text = prompt(120)
questions = [Want(text + prompt(8, seed=i + 1), 4) for i in range(4)]
asked = sum(len(want.ids) for want in questions)
for name, flags in (("on", {}), ("off", dict(disable_radix_cache=True))):
    course, forwards = play(questions, **flags)
    print(f"cache {name:4} {course.cached_tokens:4} of {asked} from the cache, {asked - course.cached_tokens} computed")

# %% [markdown]
# Three of the four find the text: 3 × 120. They would not if all four were prefilled in the same forward, because then
# nobody has computed it yet. The scheduler sees that they share a prefix and lets one go first (chapter 9).
#
# What that is worth here:

# %% tags=["varies"]
course, _ = play(questions)
without, _ = play(questions, disable_radix_cache=True)
print(f"on {course.wall * 1e3:.0f} ms, off {without.wall * 1e3:.0f} ms")

# %% [markdown]
# ## Chunked prefill
#
# Three readers decode; a prompt of 400 tokens arrives when each has three tokens. **Predict:** how many tokens does a
# reader get between the newcomer's arrival and its first token, without chunks, and with chunks of 100? And in which of
# the two is the newcomer served first?

# %% tags=["predict"]
readers = [Want(prompt(16, seed=i), 24) for i in range(3)]
newcomer = Want(prompt(400, seed=9), 1, late=3)


def read_meanwhile(course):
    begin, end = course.sent[-1], course.arrivals[-1][0]
    return [sum(begin < at < end for at in times) for times in course.arrivals[:-1]]


for name, flags in (
    ("whole prompt", dict(chunked_prefill_size=-1)),
    ("chunks of 100", dict(chunked_prefill_size=100)),
    ("chunks of 100, mixed", dict(chunked_prefill_size=100, enable_mixed_chunk=True)),
):
    course, forwards = play([*readers, newcomer], **flags)
    print(f"{name:22} tokens that each reader got meanwhile: {read_meanwhile(course)}")

# %% [markdown]
# Without mixing the readers get nothing in either case: prefill goes first, chunk after chunk. Is chunking useless
# then? It bounds a *forward*, and with it how long the loop hears of nothing: an abort, a new short request. But only
# mixed chunks let the readers ride along, one token a chunk. Look at the longest gap of a reader, in time:

# %% tags=["varies"]
for name, flags in (
    ("whole prompt", dict(chunked_prefill_size=-1)),
    ("chunks of 100", dict(chunked_prefill_size=100)),
    ("chunks of 100, mixed", dict(chunked_prefill_size=100, enable_mixed_chunk=True)),
):
    course, _ = play([*readers, newcomer], **flags)
    gap, ttft = course.longest_gap(3), course.ttft(3)
    print(f"{name:22} longest gap {gap * 1e3:5.0f} ms, TTFT of the newcomer {ttft * 1e3:5.0f} ms")

# %% [markdown]
# ## Packing, batching
#
# Twelve prompts of 10 tokens, one token of answer each. **Predict:** how many forwards, if a prefill may hold any
# number of prompts, and if it may hold one? Then the same prompts with 8 tokens of answer, when only one request may
# run at a time, against all at once.

# %% tags=["predict"]
short = [Want(prompt(10, seed=i), 1) for i in range(12)]
for name, flags in (("packed", {}), ("one by one", dict(prefill_max_requests=1))):
    print(f"{name:16} {play(short, **flags)[1]:3} forwards")
answers = [Want(want.ids, 8) for want in short]
for name, flags in (("all at once", {}), ("one at a time", dict(max_running_requests=1))):
    print(f"{name:16} {play(answers, **flags)[1]:3} forwards")

# %% [markdown]
# 1 and 12; then 8 (one prefill, seven decode steps for everybody) and 12 × 8. A forward of this model costs nearly the
# same for one token as for twelve (chapter 17), so these counts *are* the speed-up, almost:

# %% tags=["varies"]
one, all_at_once = play(answers, max_running_requests=1)[0], play(answers)[0]
print(f"one at a time {one.wall * 1e3:.0f} ms, all at once {all_at_once.wall * 1e3:.0f} ms")

# %% [markdown]
# ## Noise
#
# Before you believe a time: how far is a run from its own repetition? Five times the same decode, and then what
# `bench switches` does: off, on, off again, and the ratio of neighbors.

# %% tags=["varies"]
times = [play([Want(prompt(32, seed=i), 12)])[0].wall * 1e3 for i in range(5)]
print(
    "the same, five times:", *(f"{ms:.0f}" for ms in times), "ms; largest / smallest:", f"{max(times) / min(times):.2f}"
)

# %% tags=["varies"]
from rich.console import Console

from tinysrt.bench.switches import run_switches, table_of

chosen = [switch for switch in SWITCHES if switch.name in ("radix cache", "prompts packed", "overlap")]
rows = run_switches(bench, chosen)
Console(width=110, force_jupyter=False).print(table_of(rows, bench.pairs))

# %% [markdown]
# A gain counts where its range lies outside the noise. The whole table, with larger workloads and more pairs:
#
# ```bash
# tinysrt bench switches --quick
# tinysrt bench switches --json mine.json --plot mine.png
# ```

# %% [markdown]
# ## Exercises
#
# **1.** A row of the table is made from triples (off, on, off again) of seconds. Write `gain(triples)`: the median of
# off / on, where off is the mean of its two neighbors.


# %%
def gain(triples):
    return None  # your turn


def check_gain(gain):
    triples = [(2.0, 1.0, 4.0), (10.0, 2.0, 10.0), (1.0, 1.0, 1.0)]
    found = gain(triples)
    if found is None:
        return "not answered yet"
    return "right" if found == 3.0 else f"not yet: of {triples} it is 3.0, and you say {found}"


print(check_gain(gain))

# %% [markdown]
# **2.** The radix experiment again, the same four questions, with pages of 16 tokens. How many prompt tokens come from
# the cache? (Only whole pages are shared.) And with pages of 32?

# %%
with_pages_of_16 = with_pages_of_32 = None  # your turn


def check_pages(of_16, of_32):
    if of_16 is None or of_32 is None:
        return "not answered yet"
    right = [play(questions, page_size=size)[0].cached_tokens for size in (16, 32)]
    return "right" if [of_16, of_32] == right else "not yet: how many whole pages has a text of 120 tokens?"


print(check_pages(with_pages_of_16, with_pages_of_32))

# %% [markdown]
# **3.** A switch of your own: does the order of the queue matter? Fill in the flags for a switch whose *off* side takes
# requests as they come and whose *on* side takes the longest shared prefix first
# ([policies](../docs/chapters/06-policies-and-prefill-adder.md)).

# %%
from tinysrt.bench.switches import Switch, shared_prefix, wall


def my_switch():
    return None  # your turn: Switch("queue order", dict(...), dict(...), shared_prefix, {"wall": wall})


def check_switch(my_switch):
    switch = my_switch()
    if switch is None:
        return "not answered yet"
    policies = [with_flags(args, **flags).schedule_policy for flags in (switch.off, switch.on)]
    return (
        "right" if policies == ["fcfs", "lpm"] else f"not yet: off has the policy {policies[0]}, on has {policies[1]}"
    )


print(check_switch(my_switch))

# %% [markdown]
# ## Solutions

# %% tags=["solution"]
from statistics import median


def my_gain(triples):
    return median((before + after) / 2 / on for before, on, after in triples)


print(check_gain(my_gain))

# %% tags=["solution"]
# 120 tokens are 7 whole pages of 16 and 3 of 32; three of the four requests share them.
print(check_pages(3 * 7 * 16, 3 * 3 * 32))


# %% tags=["solution"]
def my_solution():
    return Switch(
        "queue order", dict(schedule_policy="fcfs"), dict(schedule_policy="lpm"), shared_prefix, {"wall": wall}
    )


print(check_switch(my_solution))
