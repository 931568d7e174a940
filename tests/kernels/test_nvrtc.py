"""The device code compiles without spilled registers in each installed NVRTC, NVIDIA's compiler library.

torch installs the NVRTC of its CUDA version. To test another version, add it to PYTHONPATH, for example CUDA 12:

    pip install --no-deps --target /tmp/cu12 nvidia-cuda-nvrtc-cu12
    PYTHONPATH=/tmp/cu12 make test ARGS='-n0 tests/kernels/test_nvrtc.py'

Launches are removed, and stand-ins for standard headers hold only the needed declarations.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from tests.kernels.emulation import CSRC

LIBRARIES = sorted({path for each in sys.path for path in Path(each).glob("nvidia/*/lib/libnvrtc.so.*[0-9]")})
ARCHITECTURES = ["90", *(pytest.param(each, marks=pytest.mark.slow) for each in ("75", "80"))]
EACH = [f"<lightning_sparse::Dtype::{dtype}>" for dtype in ("fp32", "bf16", "fp16")]
SINKS = [
    "MessageSink",
    *(f"TensorSink<{index}, {value}>" for index in ("int", "long") for value in ("unsigned", "short")),
]
KERNELS = {
    "accumulate_cuda.cu": [f"accumulate_kernel<{in_place}>" for in_place in ("true", "false")],
    "models_cuda.cu": [f"interpolate_kernel<{adds}>" for adds in ("true", "false")],
    "mstopk_cuda.cu": [
        *(kernel + dtype for kernel in ("sample_kernel", "pass_kernel") for dtype in EACH),
        "refine_kernel",
        "two_bits_kernel",
        *(f"emit_kernel<lightning_sparse::cuda::{sink}>" for sink in SINKS),
    ],
    "rounded_cuda.cu": ["sum_kernel", *(f"round_kernel{dtype}" for dtype in EACH)],
}
HOST = {
    "algorithm": """
        namespace std { template <typename T> const T& min(const T& a, const T& b) { return b < a ? b : a; } }""",
    "atomic": """
        namespace std { template <typename T> struct atomic {
          T value;
          constexpr atomic(T value) : value(value) {}
          operator T() const { return value; }
        }; }""",
    "cmath": "namespace std { using ::ceil; using ::sqrt; }",
    "cstdint": """
        using int32_t = int; using int64_t = long; using uint8_t = unsigned char; using uint16_t = unsigned short;
        using uint32_t = unsigned; using uint64_t = unsigned long; using uintptr_t = unsigned long;""",
    "cstring": "namespace std { using ::memcpy; }",
    "cuda_runtime.h": """
        const char* cudaGetErrorString(cudaError_t);
        cudaError_t cudaGetLastError();
        cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t);""",
    "stdexcept": "",
    "string": "",
    "utility": "",
}


def device_code(source: str) -> str:
    without_launches = re.sub(r"[\w:<>]+<<<.*?>>>\(.*?\);", "", source, flags=re.DOTALL)
    return re.sub(r"\bthrow .*?;|\bforced = on;", ";", without_launches)


class Program:
    """An NVRTC program."""

    def __init__(self, library: Path, file: Path, kernels: list[str]) -> None:
        self._nvrtc = ctypes.CDLL(str(library))
        headers = {path.name: device_code(path.read_text()) for path in [*CSRC.glob("*.h"), *CSRC.glob("*.cuh")]}
        headers |= {name: f"#pragma once\n{text}\n" for name, text in HOST.items()}
        self._handle = ctypes.c_void_p()
        self._call(
            "CreateProgram",
            ctypes.byref(self._handle),
            device_code(file.read_text()).encode(),
            file.name.encode(),
            len(headers),
            _strings(list(headers.values())),
            _strings(list(headers)),
        )
        for kernel in kernels:
            self._call("AddNameExpression", self._handle, f"lightning_sparse::cuda::{kernel}".encode())

    def compile(self, *options: str) -> tuple[int, str]:
        """Return the status, 0 for success, and the log."""
        status: int = self._nvrtc.nvrtcCompileProgram(self._handle, len(options), _strings(list(options)))
        size = ctypes.c_size_t()
        self._call("GetProgramLogSize", self._handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._call("GetProgramLog", self._handle, log)
        self._call("DestroyProgram", ctypes.byref(self._handle))
        return status, log.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        assert getattr(self._nvrtc, f"nvrtc{name}")(*arguments) == 0, name


def _strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


@pytest.mark.skipif(not LIBRARIES, reason="no NVRTC is installed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", KERNELS)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: f"{path.parts[-3]}-{path.name}")
def test_device_code_compiles(library: Path, file: str, architecture: str) -> None:
    program = Program(library, CSRC / file, KERNELS[file])
    options = f"--gpu-architecture=sm_{architecture}", "-std=c++20", "--fmad=false", "-default-device", "-w"
    status, log = program.compile(*options, "--ptxas-options=-v")
    assert status == 0, log
    assert log.count("Compiling entry function") == len(KERNELS[file]), log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log


def test_compiled_kernels_are_all_kernels_in_the_sources() -> None:
    kernels = {file.name: set(re.findall(r"(\w+_kernel)\(", file.read_text())) for file in CSRC.glob("*.cu*")}
    named = {kernel.partition("<")[0] for names in KERNELS.values() for kernel in names}
    assert set().union(*kernels.values()) == named
