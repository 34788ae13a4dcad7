"""The loops of a kernel in NVIDIA's machine code: how many instructions, of which kinds.

A kernel that reads pages can be bound by the instructions that it issues long before memory is, and
that shows in its code: in the width of its loads, and in the instructions of its innermost loops.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LANES = 32
"""Threads of a warp."""
LABEL = re.compile(r"^(\.L_\w+):")
JUMP = re.compile(r"^\s+(.*?)`?\(?(\.L_\w+)")
"""Operands of a branch: those before its label make it conditional."""
INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
JUMPS, ENDS = ("BRA", "CALL"), ("EXIT", "RET")
"""Opcodes with a label, the second of which returns or leaves a loop; and those without a next
instruction."""
GLOBAL_LOADS, GLOBAL_STORES = ("LDG", "LDGSTS"), ("STG",)
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes of a lane by the modifier of a load or store; others take 4."""
KINDS = (
    ("matrix", r"(H|I|HG|IG|QG|UTC\w*|O)MMA"),
    ("global", r"LDG(STS)?|STG|ATOMG?|RED|LDGDEPBAR"),
    ("shared", r"U?LDS(M)?|STS(M)?|ATOMS|MOVM|SHFL|REDUX"),
    ("barrier", r"BAR|DEPBAR|WARPSYNC|BSYNC|BSSY|SYNCS|NANOSLEEP|MEMBAR"),
    ("convert", r"PRMT|I2FP?|F2IP?|F2FP?|I2I|I2IP"),
    ("float16", r"H(ADD|MUL|FMA|SET|MNMX)\w*"),
    ("float32", r"F(ADD|MUL|FMA|SEL|SETP|SET|MNMX|CHK)\w*|MUFU"),
)
"""Kinds of instructions and their opcodes; all others are ``integer``: addresses, masks, moves."""


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: what one pass issues in each warp."""

    instructions: int
    kinds: Mapping[str, int]
    """Instructions by kind."""
    loads: Mapping[int, int]
    """Loads of global memory by the bytes of a lane."""
    stores: Mapping[int, int]

    @property
    def loaded_bytes(self) -> int:
        """Most bytes of global memory that a warp loads in a pass: masked lanes load nothing."""
        return LANES * sum(width * count for width, count in self.loads.items())


def loops_of(assembly: str) -> list[Loop]:
    """Innermost loops of the code that ``nvdisasm -c`` prints, in its order.

    A loop is what lies between a label and a later branch to it that the label dominates: code
    beside a loop, to which divergent warps branch and from which they come back, begins none. The
    endless loop that pads a kernel has one instruction, and is left out.
    """
    labels, code = _parsed(assembly)
    backward = [(labels[one.label], at) for at, one in enumerate(code) if _is_back(one, at, labels)]
    spans = [(start, at + 1) for start, at in backward if _dominates(start, at, code, labels)]
    inner = [span for span in spans if not any(_is_inside(other, span) for other in spans)]
    opcodes = [one.opcode for one in code]
    return [_loop(opcodes[start:end]) for start, end in sorted(inner) if end - start > 1]


def loads_of(assembly: str) -> dict[int, int]:
    """Loads of global memory of all code, by the bytes of a lane."""
    return _widths([one.opcode for one in _parsed(assembly)[1]], GLOBAL_LOADS)


class _Instruction(NamedTuple):
    opcode: str
    label: str
    """To which it branches; empty: it does not."""
    is_conditional: bool


def _parsed(assembly: str) -> tuple[dict[str, int], list[_Instruction]]:
    """Index of the instruction behind each label, and the instructions."""
    labels, code = dict[str, int](), list[_Instruction]()
    for line in map(str.strip, assembly.splitlines()):
        if found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            predicate, opcode, operands = found.groups()
            jump = JUMP.match(operands) if opcode.split(".")[0] in JUMPS else None
            condition = predicate or (jump and jump[1]) or opcode.startswith("CALL")
            code.append(_Instruction(opcode, jump[2] if jump else "", bool(condition)))
    return labels, code


def _is_back(one: _Instruction, at: int, labels: Mapping[str, int]) -> bool:
    return one.opcode.startswith("BRA") and labels.get(one.label, at + 1) <= at


def _dominates(
    start: int, end: int, code: Sequence[_Instruction], labels: Mapping[str, int]
) -> bool:
    """Whether each path from the first instruction to ``end`` passes ``start``."""
    seen, ahead = {start}, [0]
    while ahead:
        at = ahead.pop()
        if at in seen or at >= len(code):
            continue
        if at == end:
            return False
        seen.add(at)
        one = code[at]
        if one.label in labels:
            ahead.append(labels[one.label])
        leaves = one.opcode.split(".")[0] in ENDS or bool(one.label)
        if one.is_conditional or not leaves:
            ahead.append(at + 1)
    return True


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _loop(opcodes: Sequence[str]) -> Loop:
    return Loop(
        instructions=len(opcodes),
        kinds=dict(sorted(Counter(map(_kind, opcodes)).items())),
        loads=_widths(opcodes, GLOBAL_LOADS),
        stores=_widths(opcodes, GLOBAL_STORES),
    )


def _kind(opcode: str) -> str:
    name = opcode.split(".")[0]
    return next((kind for kind, names in KINDS if re.fullmatch(names, name)), "integer")


def _widths(opcodes: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    found = Counter[int]()
    for opcode in opcodes:
        name, *modifiers = opcode.split(".")
        if name in names:
            found[next((WIDTHS[one] for one in modifiers if one in WIDTHS), 4)] += 1
    return dict(sorted(found.items()))
