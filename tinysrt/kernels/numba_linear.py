"""y = x Wᵀ + b for a few rows of x: the matrix is read once, at the speed of memory.

A decode step of one request multiplies every weight of the model with one number, so reading the weights is all that
costs. A library's matrix product is built for many rows: it brings tiles of the matrix into cache, and between tiles
memory idles. Here a row of W is one straight run of memory, its lines are asked for a few rows ahead (the processor's
own guess ends at each page of 4 KB), and each is multiplied with all rows of x while it is there.

Sums and results are float32 until the last step, so an output head that asks for float32 gets logits that were never
rounded. From about `MOST_ROWS` rows on, arithmetic costs more than reading, and the packed oneDNN product of
`model_executor/layers/linear.py` wins. Experts of a mixture (`grouped_gemm`) go through the reference: their row counts
vary, and PyTorch's product of each group is as good as a loop here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinysrt.kernels.numba_runtime import (
    BF16,
    F32,
    bf16_at,
    draw_ticket,
    f32_at,
    format_of,
    inner,
    kernel,
    launch,
    narrow,
    prefetch,
    scratch,
    widen,
)

MOST_ROWS = 4
ENOUGH = 32  # rows of W worth a ticket
AHEAD = 1024  # elements between asking for a piece of W and using it


@inner
def _stream(x, w, bias, y, begin, end, rows, size, outputs, wide):
    """Outputs begin .. end-1 of each row. x: (rows, size) in its own format; wide: room for it as float32."""
    for i in range(rows * size):
        wide[i] = widen(x, i)
    for output in range(begin, end):
        row = output * size
        for i in range(0, size, 32):
            prefetch(w, row + i + AHEAD)
        plus = np.float32(0.0)
        if bias[0] == 1:
            plus = widen(bias[1], output)
        m = 0
        while m + 4 <= rows:
            a, b, c, e = plus, plus, plus, plus
            x0, x1, x2, x3 = m * size, (m + 1) * size, (m + 2) * size, (m + 3) * size
            for i in range(size):
                weight = widen(w, row + i)
                a += weight * wide[x0 + i]
                b += weight * wide[x1 + i]
                c += weight * wide[x2 + i]
                e += weight * wide[x3 + i]
            y[m * outputs + output] = narrow(y, a)
            y[(m + 1) * outputs + output] = narrow(y, b)
            y[(m + 2) * outputs + output] = narrow(y, c)
            y[(m + 3) * outputs + output] = narrow(y, e)
            m += 4
        while m < rows:
            a = plus
            for i in range(size):
                a += widen(w, row + i) * wide[m * size + i]
            y[m * outputs + output] = narrow(y, a)
            m += 1


@kernel
def _few_rows_linear(args):
    rows, size, outputs = args[8], args[9], args[10]
    wide = scratch(rows * size)
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        begin, end = outputs * ticket // args[1], outputs * (ticket + 1) // args[1]
        if args[2] == F32:
            x, w, y, bias = f32_at(args[3]), f32_at(args[4]), f32_at(args[7]), (args[5], f32_at(args[6]))
            _stream(x, w, bias, y, begin, end, rows, size, outputs, wide)
        else:
            x_, w_, bias_ = bf16_at(args[3]), bf16_at(args[4]), (args[5], bf16_at(args[6]))
            if args[11] == BF16:
                _stream(x_, w_, bias_, bf16_at(args[7]), begin, end, rows, size, outputs, wide)
            else:
                _stream(x_, w_, bias_, f32_at(args[7]), begin, end, rows, size, outputs, wide)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x: (rows, in); weight: (out, in), contiguous; both and the bias in one format. Returns (rows, out) in `dtype`."""
    x = x.contiguous()
    rows, size = x.shape
    outputs = weight.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype)
    tickets = max(1, min(outputs // ENOUGH, 4 * torch.get_num_threads()))
    launch(
        _few_rows_linear, tickets, format_of(x), x.data_ptr(), weight.data_ptr(), int(bias is not None),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), rows, size, outputs, format_of(y),
    )  # fmt: skip
    return y
