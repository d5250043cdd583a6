"""The triton set as a whole: complete, imported only when asked for, and what a machine that cannot run it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import load_kernels
from tinysrt.server_args import ServerArgs


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_server_on_a_cpu_never_imports_triton():
    """Every module that a scheduler process imports, and the plain kernels."""
    code = (
        "import sys, tinysrt.managers.scheduler_process, tinysrt.model_executor.model_runner\n"
        "from tinysrt.kernels.kernel_set import load_kernels\n"
        "load_kernels('torch_native')\n"
        "print('tinysrt.kernels.triton_attention' in sys.modules)"
    )
    assert python(code).strip() == "False"


def test_the_set_is_complete():
    pytest.importorskip("triton")
    kernels = load_kernels("triton")
    modules = [module for name, module in sys.modules.items() if name.startswith("tinysrt.kernels.triton_")]
    for name, kernel in vars(kernels).items():
        if callable(kernel):
            assert any(kernel is getattr(module, name, None) for module in modules), name


def test_without_the_package_the_install_line_is_the_error():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from tinysrt.errors import StartupError\n"
        "from tinysrt.kernels.kernel_set import load_kernels\n"
        "try:\n    load_kernels('triton')\nexcept StartupError as error:\n    print(error)"
    )
    assert "pip install 'tinysrt[triton]'" in python(code)


def test_on_a_cpu_it_is_refused_unless_interpreted(monkeypatch):
    args = ServerArgs(model_path="x", device="cpu", attention_backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartupError, match="--attention-backend triton needs a CUDA device"):
        args.resolve()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert args.resolve().attention_backend == "triton"
