"""Device code of a cubin, disassembled: its functions, what each takes of the device, and its loops."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import vendor

_FUNCTION = re.compile(r"\s*Function : (\w+)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([^;]*);")
_USAGE = re.compile(r"\s*Function (\w+):\s*\n\s*(REG:.*)")


def cuobjdump() -> Path:
    """The toolkit's (with nvdisasm, which it calls, beside it), else a wheel's, Triton's too; skips without any."""
    toolkit = vendor.toolkit()
    found = [toolkit / "bin/cuobjdump"] if toolkit else []
    found += [wheel.file("bin/cuobjdump") for wheel in vendor.wheels("nvidia-cuda-cuobjdump", "triton")]
    tools = [tool for tool in found if tool.exists() and (tool.parent / "nvdisasm").exists()]
    if not tools:
        vendor.missing("a disassembler (cuobjdump and nvdisasm)")
    return tools[0]


def _run(option: str, cubin: Path) -> str:
    command = [cuobjdump(), option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout


def usage(cubin: Path) -> dict[str, dict[str, int]]:
    """By function: REG, STACK, LOCAL, SHARED... as the compiler recorded them."""
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", text)}
        for name, text in _USAGE.findall(_run("--dump-resource-usage", cubin))
    }


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # without the predicate

    @property
    def opcode(self) -> str:
        return self.text.split()[0]

    @property
    def is_load(self) -> bool:
        return self.opcode.startswith("LDG.")

    @property
    def is_store(self) -> bool:
        return self.opcode.startswith("STG.")

    @property
    def is_generic(self) -> bool:
        """Of memory that could be any: shared, local or global."""
        return re.match(r"(LD|ST|ATOM)(\.|$)", self.opcode) is not None

    @property
    def registers(self) -> set[int]:
        """All that are named; a load's four, though it names the first."""
        return {int(number) for number in re.findall(r"\bR(\d+)\b", self.text)}

    @property
    def loaded(self) -> set[int]:
        """What a load of 16 bytes fills."""
        match = re.match(r"LDG\S*\s+R(\d+)", self.text)
        assert match, self.text
        return set(range(int(match.group(1)), int(match.group(1)) + 4))


@dataclass
class DeviceFunction:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def loops(self) -> list[list[Instruction]]:
        """What lies between a jump back and its target, innermost ones alone."""
        spans = []
        for instruction in self.instructions:
            match = re.match(r"BRA\S*\s.*?(?:`\(\.L_\w+\)|0x([0-9a-f]+))", instruction.text)
            if match and match.group(1) and int(match.group(1), 16) < instruction.address:
                spans.append((int(match.group(1), 16), instruction.address))
        inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
        return [[i for i in self.instructions if begin <= i.address <= end] for begin, end in inner]


def disassemble(cubin: Path) -> dict[str, DeviceFunction]:
    functions: dict[str, DeviceFunction] = {}
    current = None
    for line in _run("-sass", cubin).splitlines():
        if match := _FUNCTION.match(line):
            current = functions.setdefault(match.group(1), DeviceFunction(match.group(1)))
        elif (match := _INSTRUCTION.match(line)) and current is not None:
            current.instructions.append(Instruction(int(match.group(1), 16), match.group(3).strip()))
    return functions
