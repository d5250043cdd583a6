"""The Triton kernels, compiled for sm_80 and sm_90 on a machine without a GPU: do they fit, do they spill, do they use
the matrix units and wide loads. Says nothing of correctness (test_triton_interpreter.py) or of speed (`tinysrt bench
gpu`).

Runs in a process of its own, without the interpreter's variable. `python -m tests.kernels.test_triton_compile FILE`
prints the table of all variants and writes it, for the docs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton kernels need the triton package: pip install 'tinysrt[triton]'")
ROOT = Path(__file__).parents[2]
CHIPS = (80, 90)
CI = [(chip, [64, 128], [4], ["bfloat16"], [None]) for chip in CHIPS]
SOAK = [
    (chip, [64, 80, 96, 128, 256], [1, 3, 8, 20], ["bfloat16", "float16", "float32"], [None, 4096])
    for chip in (*CHIPS, 89)
]


def measure(chip: int, dims: list[int], groups: list[int], dtypes: list[str], windows: list[int | None]) -> list[dict]:
    """Compile and check. Runs in a child process."""
    import torch

    from tests.kernels.variants import SHARED_LIMIT, attention_launches, compiling, inspect, other_launches
    from tinysrt.kernels.kernel_set import load_kernels

    kernels = load_kernels("triton")
    rows = []
    seen = set()
    with compiling(chip) as compiled:
        for dtype_name in dtypes:
            dtype = getattr(torch, dtype_name)
            cases = [(f"dim {d}, group {g}{'' if w is None else ', window'}{more}", launch)
                     for d in dims for g in groups for w in windows
                     for more, launch in attention_launches(kernels, d, g, dtype, w).items()]  # fmt: skip
            cases += other_launches(kernels, dtype).items()
            for case, launch in cases:
                before = len(compiled)
                launch()
                for kernel in compiled[before:]:
                    if kernel.hash in seen:
                        continue
                    seen.add(kernel.hash)
                    code = inspect(kernel)
                    where = f"{code.kernel} {case} {dtype_name} sm_{chip}"
                    assert code.stack == 0 and code.spills == 0, f"{where}: spills {code.stack} bytes"
                    assert code.shared <= SHARED_LIMIT[chip], f"{where}: {code.shared} bytes of shared memory"
                    if code.kernel in ("decode", "extend"):
                        assert code.wide_loads > 0 and code.narrow_copies == 0, f"{where}: {code.instructions}"
                        # a slot of 32 bits, widened before it meets the stride
                        assert "arith.extsi" in code.ttir and "xi64>" in code.ttir
                        if dtype_name != "float32":
                            wanted = "wgmma" if (code.kernel, chip) == ("extend", 90) else "mma"
                            assert code.matrix == wanted, f"{where}: {code.matrix}"
                    rows.append(
                        {
                            "kernel": code.kernel,
                            "case": case,
                            "dtype": dtype_name,
                            "chip": f"sm_{chip}",
                            "registers": code.registers,
                            "shared": code.shared,
                            "spills": code.spills,
                            "matrix": code.matrix,
                            "wide_loads": code.wide_loads,
                            "instructions": sum(code.instructions.values()),
                        }
                    )
    return rows


def in_a_process(plan: tuple, cache: Path) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", f"import tests.kernels.test_triton_compile as t; t.print_rows({plan!r})"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=7000,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def print_rows(plan: tuple) -> None:
    print(json.dumps(measure(*plan)))


def table(rows: list[dict]) -> str:
    """As Markdown."""
    names = {"kernel": "kernel", "case": "case", "chip": "chip", "registers": "registers", "shared": "shared memory",
             "spills": "spills", "matrix": "matrix unit", "wide_loads": "128-bit loads",
             "instructions": "instructions"}  # fmt: skip
    lines = ["| " + " | ".join(names.values()) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        shown = row | {"shared": f"{row['shared'] / 1024:.1f} KiB"}
        lines.append("| " + " | ".join(str(shown[name]) for name in names) + " |")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("plan", CI, ids=lambda plan: f"sm_{plan[0]}")
def test_what_ships_fits_the_chip_and_uses_it(plan: tuple, tmp_path: Path) -> None:
    rows = in_a_process(plan, tmp_path)
    print(table(rows))
    assert {row["kernel"] for row in rows} == {
        "decode", "merge", "extend", "rms_norm", "add_rms_norm", "silu_and_mul", "rope_and_store", "grouped_gemm",
        "sample",
    }  # fmt: skip
    chapter = (ROOT / "docs/chapters/19-triton-kernels.md").read_text(encoding="utf-8")
    for row in rows:  # the table there is of these launches; its numbers come from a recorded run
        assert f"| {row['kernel']} | {row['case']} | {row['chip']} |" in chapter


@pytest.mark.soak
@pytest.mark.parametrize("plan", SOAK, ids=lambda plan: f"sm_{plan[0]}")
def test_every_variant(plan: tuple, tmp_path: Path) -> None:
    print(table(in_a_process(plan, tmp_path)))


if __name__ == "__main__":
    found = [row for plan in CI for row in in_a_process(plan, Path(sys.argv[1]).resolve().parent / "triton-cache")]
    Path(sys.argv[1]).write_text(table(found) + "\n", encoding="utf-8")
    print(table(found))
