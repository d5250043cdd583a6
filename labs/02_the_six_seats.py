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
# # The six seats, step by step
#
# Every request that the scheduler knows sits in one of six seats. In this lab you drive the real scheduler by hand,
# one step at a time, and watch requests change seats. The scheduler, the policies, the memory pools and the radix
# tree are the ones that serve; only the model is replaced by one that computes nothing
# ([FakeModelRunner](../tinysrt/bench/fake_model.py#FakeModelRunner)), so a step takes a millisecond and nothing is
# hidden in it.
#
# After this lab you can
#
# - say for any request which seat it holds, and why,
# - explain *prefill first*, and what it does to those who decode,
# - predict how a long prompt passes through the chunked seat,
# - force a retract, and say who is sent back.
#
# Before it: [chapter 5](../docs/chapters/05-scheduler-loop.md), or the glossary's [six lines about
# seats](../docs/glossary.md#the-seats). The code says it like this:

# %%
import inspect

from tinysrt.managers.seats import Seats

print(inspect.getsource(Seats))

# %% [markdown]
# ## A scheduler on the table
#
# [FakeEngine](../tinysrt/bench/fake_model.py#FakeEngine) puts the parts together. `add` queues a request, `step` is
# one turn of the loop. With `disable_overlap_schedule=True` a turn is schedule, launch, process; overlap comes at the
# end.

# %%
from tinysrt.bench.fake_model import FakeEngine


def engine(**flags):
    return FakeEngine(**{"disable_overlap_schedule": True, "max_total_num_tokens": 200, **flags})


def names(reqs):
    return " ".join(req.rid for req in reqs) or "·"


def show(e, steps=1):
    """Take `steps` turns; after each, print who sits where."""
    if steps:
        print(f"{'':8}{'waiting':10}{'new':10}{'cur':10}{'running':10}{'last':10}{'chunked':10}free")
    for _ in range(steps):
        e.step()
        seats = e.scheduler.seats
        mode = seats.cur_batch.forward_mode.name if seats.cur_batch else "idle"
        batches = [seats.new_batch, seats.cur_batch, seats.running_batch, seats.last_batch]
        cells = [names(seats.waiting_queue), *(names(b.reqs) if b else "·" for b in batches)]
        cells.append(seats.chunked_req.rid if seats.chunked_req else "·")
        print(
            f"{mode:8}" + "".join(f"{cell:10}" for cell in cells) + str(e.scheduler.memory.allocator.available_size())
        )


# %% [markdown]
# ## One request, four steps
#
# A prompt of six tokens that wants three more. **Predict:** in which seats is `a` after the first step, and what is
# in `running_batch` then? How many steps until it is gone?

# %% tags=["predict"]
e = engine()
e.add("a", [1, 2, 3, 4, 5, 6], max_new_tokens=3)
show(e, 5)
print("output", e.output_ids("a"))

# %% [markdown]
# The first step is a prefill: `a` is in `new_batch`, which is also `cur_batch`, and when the turn is over,
# `last_batch`. It is *not* in `running_batch` yet: it moves there at the start of the next turn. One token came out
# of the prefill, so two decode steps are enough for three tokens.
#
# Look at the last column too. The pool has 200 slots. The prefill took six, each decode step one; at the end the
# request is gone, and still not all slots are free: what it computed stays in the radix tree for whoever has the same
# prefix. [merge_last_batch](../tinysrt/managers/scheduler.py#Scheduler.merge_last_batch) is the move from
# `last_batch` to `running_batch`.

# %% [markdown]
# ## Prefill first
#
# Two requests decode; then a third arrives. **Predict:** do `a` and `b` get a token in the step in which `c` is
# prefilled?

# %% tags=["predict"]
e = engine()
e.add("a", [1, 2, 3, 4], max_new_tokens=6)
e.add("b", [5, 6, 7], max_new_tokens=6)
show(e, 3)
before = len(e.output_ids("a")), len(e.output_ids("b"))
e.add("c", [8, 9, 10, 11, 12], max_new_tokens=2)
show(e, 1)
print("tokens of a and b before and after:", before, (len(e.output_ids("a")), len(e.output_ids("b"))))
show(e, 2)

# %% [markdown]
# They do not: `cur_batch` is `new_batch` whenever there is one. That is good for the newcomer's first token and bad
# for everybody's next one, which is why long prompts are cut into chunks, and why `--enable-mixed-chunk` exists.

# %% [markdown]
# ## The chunked seat
#
# With `chunked_prefill_size=8` no prefill step computes more than eight tokens. **Predict:** a prompt of 20 tokens:
# how many steps until its first token, and where is it in between? The little one `b` arrives at the same time; when
# is it prefilled?

# %% tags=["predict"]
e = engine(chunked_prefill_size=8)
e.add("a", list(range(100, 120)), max_new_tokens=2)
e.add("b", [5, 6, 7], max_new_tokens=2)
show(e, 6)

# %% [markdown]
# Chunks of 8, 8 and 4. Between chunks `a` sits in `chunked_req`: it has left the queue, for it holds a row and KV,
# but it cannot decode. The last chunk leaves room for four more tokens in the step, so `b` rides in the same batch.

# %% [markdown]
# ## When memory is short
#
# A pool of 40 slots, and two requests that may grow to 28 tokens each. Both cannot. But nobody knows how much a
# request will really use, and a scheduler that reserved the maximum for everyone would run half empty; so for
# requests that already decode it expects only a part of their maximum (`new_token_ratio`). It bets.
# `schedule_conservativeness=0.1` makes it a gambler.
#
# **Predict:** who is sent back when the bet is lost, and what happens to the tokens it has produced?

# %% tags=["predict"]
e = engine(max_total_num_tokens=40, schedule_conservativeness=0.1)
e.add("a", list(range(1, 9)), max_new_tokens=20)
show(e, 1)
e.add("b", list(range(11, 18)), max_new_tokens=20)
show(e, 1)
while e.scheduler.state()["num_retracted_reqs"] == 0:
    produced = {rid: len(e.output_ids(rid)) for rid in "ab"}
    e.step()
print("sent back:", names(e.scheduler.seats.waiting_queue), "| produced until then:", produced)
show(e, 2)
steps = e.run()
print(f"{steps} more steps, and both are complete:", {rid: len(e.output_ids(rid)) for rid in "ab"})

# %% [markdown]
# Both had produced the same number of tokens, so the one with the longer prompt is sent back: it gives the most
# memory for the least lost work ([retract](../tinysrt/managers/scheduler.py#Scheduler.retract)). Its KV is gone, its
# output tokens are kept; when it is admitted again, prompt and output are prefilled together. The client notices
# nothing but a pause. And the scheduler has learned: after a retract it expects more of everyone.

# %% [markdown]
# ## Overlap
#
# The same three verbs in another order: while step N runs, the scheduler processes the result of step N−1.
# **Predict:** with overlap, how many turns until the output of a three-token request is complete, compared with the
# first experiment?

# %% tags=["predict"]
e = FakeEngine(max_total_num_tokens=200, disable_overlap_schedule=False)
e.add("a", [1, 2, 3, 4, 5, 6], max_new_tokens=3)
for turn in range(1, 6):
    show(e)
    print(f"turn {turn}: {e.scheduler.forward_count} forwards launched, output so far {e.output_ids('a')}")
e.close()

# %% [markdown]
# The output is the same, and it is seen one turn later: the price of not waiting. The request ends by length, which
# is known in advance, so no forward is wasted. A request that ends by a stop token does run one step too many;
# chapter 12 is about that step.

# %% [markdown]
# ## Exercises
#
# Each has a check that says what is wrong. Solutions are at the end, folded.
#
# **1.** Write `seats_of(scheduler, rid)`: the names of the seats in which a request sits between two turns, in the
# order of the fields of `Seats`. Being in several at once is normal; which combinations occur?


# %%
def seats_of(scheduler, rid):
    return None  # your turn


def check_seats_of(seats_of):
    e = engine(chunked_prefill_size=4)
    e.add("long", [1, 2, 3, 4, 5, 6], max_new_tokens=3)
    e.add("late", [7, 8, 9], max_new_tokens=2)
    prefill, decode = ["new_batch", "cur_batch", "last_batch"], ["running_batch", "cur_batch", "last_batch"]
    expected = [
        ([*prefill, "chunked_req"], ["waiting_queue"]),
        (prefill, [*prefill, "chunked_req"]),
        (["running_batch"], prefill),
        (decode, decode),
    ]
    for turn, (long, late) in enumerate(expected, 1):
        e.step()
        for rid, right in (("long", long), ("late", late)):
            answer = seats_of(e.scheduler, rid)
            if answer is None:
                return "not answered yet"
            if answer != right:
                return f"not yet: after turn {turn}, {rid!r} sits in {right}, and you say {answer}"
    return "right"


print(check_seats_of(seats_of))

# %% [markdown]
# **2.** For which chunk sizes does a prompt of 30 tokens get its first token in the fourth step? Give the smallest
# and the largest.

# %%
smallest = largest = None  # your turn


def check_chunk_sizes(smallest, largest):
    if smallest is None:
        return "not answered yet"

    def steps(chunk):
        e = engine(chunked_prefill_size=chunk)
        e.add("a", list(range(30)), max_new_tokens=1)
        return e.run()

    around = [steps(chunk) for chunk in (smallest - 1, smallest, largest, largest + 1)]
    right = around[0] > 4 and around[1:3] == [4, 4] and around[3] < 4
    return "right" if right else f"not yet: {smallest} takes {around[1]} steps, {largest} takes {around[2]}"


print(check_chunk_sizes(smallest, largest))

# %% [markdown]
# **3.** In *When memory is short*, what is the smallest pool in which nobody is retracted? Work it out before you
# try: what do `a` and `b` hold in the step in which they hold the most together? (A request's last token needs no
# slot: nobody comes after it.)

# %%
pool = None  # your turn


def check_pool(pool):
    if pool is None:
        return "not answered yet"

    def retracted(size):
        e = engine(max_total_num_tokens=size, schedule_conservativeness=0.1)
        e.add("a", list(range(1, 9)), max_new_tokens=20)
        e.step()
        e.add("b", list(range(11, 18)), max_new_tokens=20)
        e.run()
        return e.scheduler.state()["num_retracted_reqs"]

    if retracted(pool):
        return f"not yet: with {pool} slots somebody is retracted"
    return "right" if retracted(pool - 1) else f"not yet: {pool - 1} would do as well"


print(check_pool(pool))

# %% [markdown]
# ## Solutions


# %% tags=["solution"]
def my_seats_of(scheduler, rid):
    found = []
    for name, seat in vars(scheduler.seats).items():
        reqs = [seat] if name == "chunked_req" and seat else getattr(seat, "reqs", seat) or []
        if any(req.rid == rid for req in reqs):
            found.append(name)
    return found


print(check_seats_of(my_seats_of))

# %% tags=["solution"]
# ceil(30 / chunk) == 4
print(check_chunk_sizes(8, 9))

# %% tags=["solution"]
# `a` and `b` decode in lockstep; in the last step each holds its prompt and 19 tokens.
print(check_pool((8 + 19) + (7 + 19)))
