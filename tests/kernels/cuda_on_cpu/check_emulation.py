"""The emulation finds each kind of fault, in kernels with one fault each: `make check-emulation`."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from tests.kernels.emulation import HERE, as_cpp, library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")
SEEDS = range(12)
FOUND = {
    "writes_past_the_end": "out of bounds: writes 4 bytes 0 bytes past words",
    "reads_before_the_start": "out of bounds: reads 4 bytes 4 bytes before words",
    "shared_past_the_end": "out of bounds: writes 4 bytes 0 bytes past shared memory",
    "misaligned": "misaligned access of 4 bytes",
    "reads_unwritten": "reads what nobody wrote: byte",
    "reads_unwritten_shared": "reads what nobody wrote: byte 0 of the 256 bytes of shared memory",
    "lacks_a_barrier": "race: ",
    "blocks_share_a_word": "race: ",
    "last_block_without_a_fence": "race: reads what was written by block",
    "last_block_before_the_barrier": "race: reads what was written by block",
    "half_at_a_barrier": "threads of one block wait at different barriers or warp collectives",
    "waits_for_the_block_before": "waits for ever",
}


@pytest.fixture(scope="module")
def broken() -> ctypes.CDLL:
    loaded = library([HERE / "broken.cu"], drivers=[])
    loaded.emulate_broken.restype = ctypes.c_char_p
    return loaded


def said(broken: ctypes.CDLL, kernel: str, seed: int) -> str:
    text: str = broken.emulate_broken(kernel.encode(), ctypes.c_uint64(seed)).decode()
    return text


@pytest.mark.parametrize("kernel", FOUND)
def test_emulation_finds_each_fault(broken: ctypes.CDLL, kernel: str) -> None:
    found = [said(broken, kernel, seed) for seed in SEEDS]
    # With a lucky order some faults have no effect, as on a GPU. An unlucky order may show another effect first.
    assert any(FOUND[kernel] in text for text in found), set(found)
    assert sum("sum" not in text for text in found) > len(SEEDS) // 2, found


def test_result_that_depends_on_the_order_differs_between_seeds(broken: ctypes.CDLL) -> None:
    assert len({said(broken, "adds_in_any_order", seed) for seed in SEEDS}) > 1


def test_kernel_without_faults_passes(broken: ctypes.CDLL) -> None:
    assert {said(broken, "right", seed) for seed in range(60)} == {"sum 0.000000"}


def test_seed_gives_repeatable_results(broken: ctypes.CDLL) -> None:
    for seed in SEEDS:
        first = said(broken, "adds_in_any_order", seed)
        assert said(broken, "adds_in_any_order", seed) == first


def test_launches_and_shared_variables_are_rewritten() -> None:
    text = as_cpp("alignas(16) __shared__ float a[kN];\n__shared__ int b;\nf<T><<<n, 32, 0, stream>>>(x, y);")
    assert text == (
        "auto& a = on_cpu::shared<float[kN]>([] {});\nauto& b = on_cpu::shared<int>([] {});\n"
        'on_cpu::launch(n, 32, "f<T>", [&] { f<T>(x, y); });'
    )
    with pytest.raises(AssertionError):
        as_cpp("f<<<n, 32, 64, stream>>>(x);")


def test_all_broken_kernels_are_tested(broken: ctypes.CDLL) -> None:
    text = Path(HERE / "broken.cu").read_text()
    assert text.count("__global__") == len(FOUND) + 2
