"""The loops of a kernel in NVIDIA's machine code: how many instructions, of which kinds.

A kernel that reads pages can be bound by the instructions that it issues long before memory is, and
that shows in its code: in the width of its loads, and in the instructions of its innermost loops.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LANES = 32
"""Threads of a warp."""
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
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
    def narrowest_load(self) -> int | None:
        """Bytes of a lane; None if the loop loads nothing."""
        return min(self.loads, default=None)

    @property
    def loaded_bytes(self) -> int:
        """Most bytes of global memory that a warp loads in a pass: masked lanes load nothing."""
        return LANES * sum(width * count for width, count in self.loads.items())


def loops_of(assembly: str) -> list[Loop]:
    """Innermost loops of the code that ``nvdisasm -c`` prints, in its order.

    A loop is what lies between a label and a later branch to it. The endless loop that pads a
    kernel has one instruction, and is left out.
    """
    labels, code = dict[str, int](), list[tuple[str, str]]()
    spans = list[tuple[int, int]]()
    for label, opcode, operands in _lines(assembly):
        if label:
            labels[label] = len(code)
            continue
        code.append((opcode, operands))
        target = re.search(r"\.L_\w+", operands) if opcode.split(".")[0] == "BRA" else None
        if target and target[0] in labels:
            spans.append((labels[target[0]], len(code)))
    inner = [span for span in spans if not any(_is_inside(other, span) for other in spans)]
    return [_loop(code[start:end]) for start, end in sorted(inner) if end - start > 1]


def _lines(assembly: str) -> Iterator[tuple[str, str, str]]:
    """Labels and instructions: (label, "", "") or ("", opcode, operands)."""
    for line in assembly.splitlines():
        if found := LABEL.match(line.strip()):
            yield found[1], "", ""
        elif found := INSTRUCTION.match(line.strip()):
            yield "", found[1], found[2]


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _loop(code: Sequence[tuple[str, str]]) -> Loop:
    opcodes = [opcode for opcode, _operands in code]
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
