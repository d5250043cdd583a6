"""Four ways to capture a step, behind one call: `capture(step)` returns what replays it.

    cuda      a CUDA graph: the kernels that the step launched, launched again by one call
    tape      every operator call that the step made, made again on the same tensors: a graph to look into, on a CPU
    eager     the step itself, called again: static buffers and padding alone
    compile   the step compiled by torch.compile, weights frozen: what a CPU has instead of a CUDA graph

A captured step takes no arguments and returns nothing. It reads static buffers and writes static buffers; whoever
replays it fills the ones before and reads the others after (`cuda_graph_runner.py`). Python runs at capture only, so a
step must not look at a tensor's *values* on the host: the branch it took then would be taken forever. CUDA refuses such
a look while it captures; so does the tape.

Source: SGLang `model_executor/cuda_graph_runner.py`, which captures with CUDA graphs only.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tinysrt.errors import StartupError
from tinysrt.text.demo_model import default_cache_dir

Step = Callable[[], None]


class CaptureError(RuntimeError):
    """A step does what cannot be captured."""


class CaptureBackend(Protocol):
    name: str

    def capture(self, step: Step) -> Step:
        """Run the step as often as it needs to warm up, capture it, return its replay."""


def make_backend(name: str, device: torch.device) -> CaptureBackend:
    if name == "cuda":
        return CudaGraphCapture(device)
    if name == "compile":
        return CompileCapture()
    return TapeCapture() if name == "tape" else EagerCapture()


class EagerCapture:
    name = "eager"

    def capture(self, step: Step) -> Step:
        return step


# ---- CUDA graphs -----------------------------------------------------------------------------------------


class CudaGraphCapture:
    """All graphs share one memory pool: they never run at the same time, so the intermediate tensors of a small one may
    lie where those of a larger one do. Hence largest first: the pool then never grows."""

    name = "cuda"

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        try:
            # What happens only the first time (workspaces, compiled kernels) must not end up in the graph. It runs on
            # the capturing stream, because workspaces belong to a stream.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(2):
                    step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                step()
        except RuntimeError as error:  # the device's own: no memory, or a step that waits for it
            raise CaptureError(str(error).partition("\n")[0]) from error
        return graph.replay


# ---- the tape --------------------------------------------------------------------------------------------

# Looks at values that do not go through an operator.
HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.item, Tensor.__bool__, Tensor.__int__} | {
    Tensor.__float__,
    Tensor.__index__,
}
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


@dataclass(frozen=True)
class Call:
    """One operator call. `results`: the tensors that the call returned; a replay writes its new results into them,
    because later calls on the tape read them. None for one that the call has written itself, being its argument."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor | None]

    def replay(self) -> None:
        returned = self.operator(*self.args, **self.kwargs)
        for old, new in zip(self.results, tensors_in(returned), strict=True):
            if old is not None:
                old.copy_(new)


class Tape(TorchDispatchMode):
    """Records what PyTorch's dispatcher is asked to do while it is entered.

    A view (a slice, a transpose) is not recorded: its result shares memory with its argument, and is still there at
    replay. Neither is a bare allocation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if reads_values(func, args):
            raise CaptureError(f"{func} looks at the values of a tensor, which a captured step cannot do")
        with torch._C.DisableTorchFunction():  # what an operator does inside is its own business
            returned = func(*args, **kwargs)
        given = {memory_of(tensor) for tensor in tensors_in([args, kwargs])}
        results = [None if memory_of(tensor) in given else tensor for tensor in tensors_in(returned)]
        makes_something = any(result is not None for result in results)
        if func._schema.is_mutable or (makes_something and func._schema.name not in ALLOCATIONS):
            self.calls.append(Call(func, args, kwargs, results))
        return returned

    def replay(self) -> None:
        for call in self.calls:
            call.replay()


def reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Does the host need values for this operator, to return a number or to know the shape of what comes out?"""
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # by position: no; by mask: yes
        return any(index is not None and index.dtype is torch.bool for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in HOST_READS:
            raise CaptureError(f".{func.__name__}() looks at the values of a tensor, which a captured step cannot do")
        return func(*args, **(kwargs or {}))


class TapeCapture:
    name = "tape"

    def capture(self, step: Step) -> Step:
        tape = Tape()
        with NoHostReads(), tape:
            step()
        return tape.replay


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    )
    return [tensor for part in parts for tensor in tensors_in(part)]


def memory_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory. (A weight that oneDNN has packed has no address: it is only itself.)"""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


# ---- torch.compile ---------------------------------------------------------------------------------------


def require_compiler() -> None:
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # what Inductor will call
    how = "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), xcode-select --install (macOS)"
    if shutil.which(compiler) is None:
        raise StartupError(f"--enable-torch-compile needs a C++ compiler, and there is no {compiler}: {how}")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        raise StartupError(
            "--enable-torch-compile needs Python's C headers: apt-get install python3-dev (Debian, Ubuntu)"
        )


class CompileCapture:
    """Dynamo turns the step into one graph, Inductor fuses its small operations and generates C++ for them, matmuls
    with the weights as constants.

    `freezing`: the weights are part of the graph, laid out once as its matmuls like them. (Inductor could also time
    several kinds of matmul for each shape, `max_autotune`: minutes a bucket, for little.) The graph is called without
    guards (the checks that its assumptions still hold): the step closes over static buffers, nothing about it ever
    changes, and checking some hundred tensors before each step would cost as much as an attention layer.
    """

    name = "compile"

    def __init__(self) -> None:
        require_compiler()
        # What was compiled once is found there at the next start. (Inductor's own default does not outlive a reboot.)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "inductor"))

    def capture(self, step: Step) -> Step:
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        # Dynamo keeps what it compiles by code object; without guards it could not tell two buckets apart.
        twin = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, closure=step.__closure__)
        compiled = torch.compile(twin, fullgraph=True, dynamic=False, options=options)
        # As an option of torch.compile, freezing would come too late: Dynamo itself asks whether weights are constants.
        with torch._inductor.config.patch(freezing=True):
            compiled()
        return compiled
