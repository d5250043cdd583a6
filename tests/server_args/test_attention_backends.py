"""--attention-backend and its two halves: defaults, and what is refused by name."""

from __future__ import annotations

import importlib.util

import pytest

from tinysrt.errors import StartupError
from tinysrt.server_args import ServerArgs


def resolved(**flags: object) -> ServerArgs:
    return ServerArgs.from_kwargs(model_path="some/model", device="cpu", **flags).resolve()


def test_a_cpu_gets_numba_and_both_halves_follow():
    args = resolved()
    assert args.attention_backend == args.prefill_attention_backend == args.decode_attention_backend == "numba"


def test_a_half_may_have_a_backend_of_its_own():
    args = resolved(decode_attention_backend="torch_native")
    assert (args.prefill_attention_backend, args.decode_attention_backend) == ("numba", "torch_native")


def test_without_numba_a_cpu_gets_plain_pytorch_and_asking_for_it_names_the_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolved().attention_backend == "torch_native"
    with pytest.raises(StartupError, match="--attention-backend numba needs the numba package: pip install numba"):
        resolved(attention_backend="numba")


def test_half_precision_has_no_numba_kernels():
    assert resolved(dtype="float16").attention_backend == "torch_native"
    with pytest.raises(StartupError, match="--decode-attention-backend numba has no kernels for float16"):
        resolved(dtype="float16", decode_attention_backend="numba")


@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_what_cannot_run_here_is_refused_by_name(flag, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    option = f"--{flag.replace('_', '-')}"
    with pytest.raises(StartupError, match=f"{option} triton needs a CUDA device"):
        resolved(**{flag: "triton"})
    with pytest.raises(StartupError, match=f"{option} 'flashinfer' is not one of torch_native, numba, triton"):
        resolved(**{flag: "flashinfer"})
