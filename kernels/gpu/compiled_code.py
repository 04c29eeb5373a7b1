"""What is in a compiled kernel, read from its binary (NVIDIA) or its assembly (AMD)."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "tcgen05": r"\btcgen05\.mma\b",
    "mfma": r"\bv_mfma_",
    "cp.async 16 B": r"\bcp\.async\.c[ag]\.shared\.global [^;]*, (?:0x10|16)\b",
}
"""Matrix units, and the copy to shared memory that prefetches at full width: a name and what
stands in the assembly."""


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """What one kernel takes, and which of INSTRUCTIONS it uses."""

    registers: int
    """Per thread; on AMD GPUs vector registers, accumulators among them."""
    local_bytes: int
    """Per thread: registers spilled to memory, and the stack. 0 is no spill."""
    instructions: tuple[str, ...]


def read_code(code: Mapping[str, bytes | str]) -> CodeFacts:
    """Of what `triton.compile` leaves in `asm`."""
    if "amdgcn" in code:
        assembly = str(code["amdgcn"])
        registers, local_bytes = _amd_usage(assembly)
    else:
        assembly = str(code["ptx"])
        cubin = code["cubin"]
        assert isinstance(cubin, bytes)
        registers, local_bytes = _nvidia_usage(cubin)
    return CodeFacts(
        registers=registers,
        local_bytes=local_bytes,
        instructions=tuple(
            name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, assembly)
        ),
    )


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory and stack) of a one-kernel cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_usage(assembly: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch memory) from the kernel's metadata.

    Scalar registers spill into lanes of vector registers, which costs no memory.
    """
    keys = r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)"
    usage = {key: int(value) for key, value in re.findall(keys, assembly)}
    return usage["vgpr_count"], usage["private_segment_fixed_size"]
