"""The operators under torch: error messages, arguments that must not crash, and tracing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.kernels import (
    accumulate,
    accumulate_regions,
    compress,
    compress_regions,
    kernel_report,
    message_bytes,
    mstopk,
    round_rows,
    sum_rows,
)

X = torch.randn(100)
ROWS = torch.randn(3, 40).bfloat16()
MESSAGE = compress(X[:20], None, None, 1, torch.float32)
IN_MESSAGE = MESSAGE.view(torch.float32)[:20]
OPS = torch.ops.lightning_sparse


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mstopk(X, 0), "1 <= k <= 100"),
        (lambda: mstopk(X, 101), "1 <= k <= 100"),
        (lambda: mstopk(X, 1.5), "must be an integer"),  # type: ignore[arg-type]
        (lambda: mstopk(X, True), "must be an integer"),
        (lambda: mstopk(X.view(10, 10), 1), "flat"),
        (lambda: mstopk(X[::2], 1), "contiguous"),
        (lambda: mstopk(X[:0], 1), "not empty"),
        (lambda: mstopk(X.double(), 1), "float64"),
        (lambda: compress(X, None, None, 1, torch.float64), "value_dtype=torch.float64"),
        (lambda: compress(X, None, None, 1, torch.float16), "value_dtype=torch.float16 .* use torch.bfloat16"),
        (lambda: compress(X, X[:50], None, 1, torch.float32), "must agree"),
        (lambda: compress(X, X.half(), None, 1, torch.float32), "residual_S is torch.float16"),
        (lambda: compress(X, None, None, 1, torch.float32, torch.ones(1)), "0-dim"),
        (lambda: compress(X, None, None, 1, torch.float32, torch.tensor(1.0).double()), "float32"),
        (lambda: accumulate(torch.zeros(1, 5, dtype=torch.uint8), X.clone(), 1, torch.float32), "uint8"),
        (lambda: accumulate(torch.zeros(112, dtype=torch.uint8), X.clone(), 1, torch.float32), "uint8"),
        (lambda: accumulate(torch.zeros(0, 112, dtype=torch.uint8), X.clone(), 1, torch.float32), "M >= 1"),
        (lambda: compress_regions(X, None, None, 1, 0, torch.float32), "num_regions=0: it must be an integer"),
        (lambda: compress_regions(X, None, None, 1, 2.0, torch.float32), "num_regions=2.0"),  # type: ignore[arg-type]
        (lambda: compress_regions(X, None, None, 1, 101, torch.float32), "num_regions=101 of 100 elements"),
        (lambda: compress_regions(X.new_zeros(70_000), None, None, 1, 65_536, torch.float32), "65535 at most"),
        (lambda: accumulate_regions(torch.zeros(112, dtype=torch.uint8), X.clone(), 1, torch.float32), "uint8"),
        (
            lambda: accumulate_regions(torch.zeros(0, 9, dtype=torch.uint8), X.clone(), 1, torch.float32),
            "num_regions=0",
        ),
        (
            lambda: accumulate_regions(torch.zeros(2, 9, dtype=torch.uint8), X.clone(), 1, torch.float32),
            r"uint8\[2, 112",
        ),
        (lambda: round_rows(X, None, None, 0), "num_rows=0: it must be an integer of at least 1"),
        (lambda: round_rows(X, None, None, 1.5), "num_rows=1.5"),  # type: ignore[arg-type]
        (lambda: round_rows(X.double(), None, None, 1), "float64"),
        (lambda: round_rows(X, X[:50], None, 1), "must agree"),
        (lambda: sum_rows(X.view(10, 10), None), r"bfloat16\[M >= 1, R >= 1\]"),
        (lambda: sum_rows(ROWS[0], None), r"bfloat16\[M >= 1, R >= 1\]"),
        (lambda: sum_rows(ROWS[:, :0], None), r"bfloat16\[M >= 1, R >= 1\]"),
        (lambda: sum_rows(ROWS[:, :20], None), "contiguous"),
        (lambda: sum_rows(ROWS, X), "no longer than a row"),
        (lambda: sum_rows(ROWS, X[:40].double()), "residual_R is torch.float64"),
    ],
)
def test_operator_errors_name_the_value_and_the_rule(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: compress(X, None, X, 1, torch.float32),
        lambda: compress(X[:50], X[40:90], X[30:80], 1, torch.float32),
        lambda: round_rows(X, X, X, 1),
        lambda: sum_rows(ROWS, ROWS.view(-1).view(torch.float32)[:9]),
        lambda: accumulate(MESSAGE[None], IN_MESSAGE, 1, torch.float32),
    ],
)
def test_output_that_shares_memory_with_an_input_is_refused(call: Any) -> None:
    with pytest.raises(RuntimeError, match="an output shares memory with an input"):
        call()


@pytest.mark.skipif(kernel_report().cpu != "compiled", reason="plain torch reads messages at any address")
def test_misaligned_messages_are_refused() -> None:
    messages = torch.zeros(MESSAGE.numel() + 1, dtype=torch.uint8)[1:][None]
    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        accumulate(messages, torch.zeros(20), 1, torch.float32)


tensors = st.sampled_from(
    [
        X,
        X.half(),
        X.bfloat16(),
        X.double(),
        X.int(),
        X[:0],
        X[:7],
        X[1:],
        X[::3],
        X.view(10, 10),
        torch.tensor(1.0),
        torch.zeros(1, 112, dtype=torch.uint8),
        torch.zeros(2, 112, dtype=torch.uint8),
        torch.zeros(500, dtype=torch.uint8)[1:225].view(2, 112),
        X.to_sparse(),
        X.expand(3, 100)[0],
        torch.zeros(1).expand(100),
        ROWS,
        ROWS.t(),
    ]
)
integers = st.one_of(st.integers(-3, 120), st.sampled_from([-(2**63), 2**31, 2**62, 2**63 - 1]))


@settings(deadline=None, max_examples=400)
@given(a=tensors, b=tensors, c=tensors, s=tensors, k=integers, code=integers, none=st.integers(0, 7))
def test_raw_operators_never_crash(a: Any, b: Any, c: Any, s: Any, k: int, code: int, none: int) -> None:
    code = code % 4 if none % 2 else code
    calls = [
        lambda: OPS.mstopk(a, k),
        lambda: OPS.compress(
            a, b if none & 1 else None, c.clone() if none & 2 else None, k, 1, code, s if none & 4 else None
        ),
        lambda: OPS.compress(a, b, c, k, min(k, 999), code, None),
        lambda: OPS.compress(a, None, c.clone(), 2, k, code, None),
        lambda: OPS.accumulate(a, b.clone(), k, 1, code),
        lambda: OPS.accumulate(a, b.clone(), 2, k, code),
        lambda: OPS.accumulate(a, a, k, 1, code),
        lambda: OPS.add_messages(a, b.clone(), k, code, 0.5),
        lambda: OPS.round_rows(a, b if none & 1 else None, c.clone() if none & 2 else None, min(k, 999), s),
        lambda: OPS.round_rows(a, b, c, min(k, 999), None),
        lambda: OPS.sum_rows(a, b.clone() if none & 1 else None),
        lambda: OPS.sum_rows(a, a),
        lambda: OPS.accumulate_delta(a.clone(), b, [c], 0.5),
        lambda: OPS.accumulate_delta(a.clone(), b, [c, s], 1.0),
        lambda: OPS.lerp_into(a, b, [c.clone()], 1.0),
        lambda: OPS.lerp_into(a, b, [a] * (none % 3), 0.5),
    ]
    for call in calls:
        with contextlib.suppress(Exception):  # the test looks for crashes of the process
            call()


OPCHECKS = [
    ("mstopk", (X, 5)),
    ("mstopk", (X.half(), 100)),
    ("compress", (X, None, torch.zeros(100), 5, 1, 3, None)),
    ("compress", (X.bfloat16(), X.clone(), torch.zeros(100), 5, 3, 1, torch.tensor(0.5))),
    ("compress", (X, X.clone(), None, 5, 1, 0, None)),
    ("accumulate", (torch.stack([compress(X, None, None, 5, torch.float32)] * 3), torch.zeros(100), 5, 1, 0)),
    ("accumulate", (compress_regions(X, None, None, 5, 3, torch.float32), torch.zeros(100), 5, 3, 0)),
    ("round_rows", (X, None, None, 7, None)),
    ("round_rows", (X.bfloat16(), X.clone(), torch.zeros(100), 2, torch.tensor(0.5))),
    ("sum_rows", (ROWS, None)),
    ("sum_rows", (ROWS, torch.zeros(33))),
    ("accumulate_delta", (X.clone(), X + 1, [torch.zeros(60), torch.zeros(40).half()], 0.5)),
    ("lerp_into", (X.clone(), X + 1, [torch.zeros(60), torch.zeros(40).half()], 0.5)),
]


@pytest.mark.parametrize(("name", "arguments"), OPCHECKS, ids=[name for name, _ in OPCHECKS])
@pytest.mark.filterwarnings("ignore")
def test_operators_pass_torch_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.filterwarnings("ignore")  # torch warns while it compiles
def test_operators_compile_in_one_graph() -> None:
    def round_of(grad: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, shard = torch.empty_like(residual), torch.empty_like(residual)
        message = compress(grad, residual, left, 7, torch.bfloat16)
        accumulate(message.unsqueeze(0), shard, 7, torch.bfloat16)
        shard += sum_rows(round_rows(grad, residual, None, 1), None)
        return mstopk(shard, 7)[1], left, shard

    grad, residual = torch.randn(2, 100)
    for got, want in zip(
        torch.compile(round_of, fullgraph=True, backend="aot_eager")(grad, residual),
        round_of(grad, residual),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_results_require_no_gradient() -> None:
    x = torch.randn(10, requires_grad=True)
    values, indices = mstopk(x, 3)
    assert not values.requires_grad
    assert not indices.requires_grad


def test_fake_shapes() -> None:
    x = torch.empty(1000, device="meta")
    values, indices = mstopk(x, 10)
    assert (values.shape, indices.dtype) == ((10,), torch.int32)
    assert mstopk(torch.empty(2**31, device="meta"), 1)[1].dtype == torch.int64
    assert compress(x, None, None, 10, torch.bfloat16).numel() == message_bytes(1000, 10, torch.bfloat16)
    rows = round_rows(torch.empty(2**33 + 1, device="meta"), None, None, 4)
    assert (rows.shape, rows.dtype) == ((4, 2**31 + 1), torch.bfloat16)
    assert sum_rows(rows, None).shape == (2**31 + 1,)


def test_report_gives_a_reason_for_missing_kernels() -> None:
    report = kernel_report()
    assert {report.cpu, report.cuda} <= {"compiled", "plain torch"}
    assert report.reasons or report.cpu == report.cuda == "compiled"


def test_operators_work_without_the_library() -> None:
    program = (
        "import torch; from lightning_sparse.kernels import *; r = kernel_report(); assert r.cpu == 'plain torch', r;"
        "x = torch.arange(9.); assert mstopk(x, 2)[1].tolist() == [7, 8]; left = torch.empty(9);"
        "assert sum_rows(round_rows(x, None, left, 3), None).tolist() == [9, 12, 15]; assert not left.any();"
        "m = compress(x, None, left, 2, torch.float32); accumulate(m[None], x, 2, torch.float32);"
        "assert x.tolist() == [0.] * 7 + [7., 8.]; print(r.reasons[0])"
    )
    environment = {**os.environ, "LIGHTNING_SPARSE_KERNELS": "torch"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LIGHTNING_SPARSE_KERNELS" in done.stdout
