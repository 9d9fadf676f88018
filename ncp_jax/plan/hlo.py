"""What a compiled program moves, read from its HLO text: collectives, and bytes to and from HBM, loops counted fully.

XLA's own cost analysis counts a loop's body once, and knows no collective's cost. Here every instruction counts as
often as its computation runs: bodies of `while` times their trip count, written beside them or read from the counter
that their condition compares. A collective of groups of one device moves nothing. An instruction outside fusions reads
its operands and writes its result, except: a slice of an operand counts as the slice (also inside a fusion), an
in-place update as the update, and what lies in VMEM (memory space S(1)) is free.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Instructions that move nothing themselves.
FREE = frozenset(
    (
        "parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
        "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency", "domain", "async-start",
        "async-update", "async-done",
    )
)  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
WIDTH = {"pred": 8, "s4": 4, "u4": 4, "token": 0, "opaque": 0}  # bits; others end in their width
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_ALONE = re.compile(r"replica_groups=\{(?:\{\d+\},?)+\}")  # groups of one device each
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_TRIPS = re.compile(r'known_trip_count":?\s*[{=]\s*"?n"?\s*:\s*"?(\d+)')


class Instruction(NamedTuple):
    """One line of HLO. `called` computations run once per execution, or as often as a loop goes round."""

    name: str
    opcode: str
    bytes: int  # of the result in HBM
    all_bytes: int  # of the result anywhere
    operands: tuple[str, ...]
    called: tuple[str, ...]
    number: int  # of a parameter, or a constant's value
    attributes: str  # what follows the operands, as it stands


Computations = dict[str, dict[str, Instruction]]


class Traffic(NamedTuple):
    """Per device and execution: bytes by kind of collective within a slice (of results), their number; bytes sent to
    other slices, by kind; HBM bytes, loops of unknown length (counted once)."""

    collective_bytes: dict[str, float]
    collective_count: dict[str, float]
    slice_bytes: dict[str, float]
    hbm_bytes: float
    unknown_loops: int


def traffic(text: str) -> Traffic:
    """The traffic of an optimized HLO module: one slice's program, which hands what others need to its host."""
    computations, entry = parse(text)
    runs, fused, unknown = _runs(computations, entry)
    size: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    between: dict[str, float] = defaultdict(float)
    hbm = 0.0
    for name, times in runs.items():
        for instruction in computations.get(name, {}).values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES and not _ALONE.search(instruction.attributes):
                size[kind] += times * _result_of_collective(instruction, computations[name])
                count[kind] += times
            elif kind == "send" and (sent := _BETWEEN_SLICES.search(instruction.attributes)):
                given = computations[name].get(instruction.operands[0])
                between[sent.group(1).lower().replace("_", "-")] += times * (given.all_bytes if given else 0)
            if name not in fused:
                hbm += times * _moved(instruction, computations[name], computations)
    return Traffic(dict(size), dict(count), dict(between), hbm, unknown)


def largest(text: str, count: int = 5) -> list[tuple[str, int]]:
    """The largest arrays that the module makes in HBM: (operation, bytes), each operation once."""
    found: dict[str, int] = {}
    computations, entry = parse(text)
    runs, fused, _ = _runs(computations, entry)
    for instruction in (i for name in runs.keys() - fused for i in computations.get(name, {}).values()):
        if instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
            source = _SOURCE.search(instruction.attributes)
            name = source.group(1) if source else instruction.name
            found[name] = max(found.get(name, 0), instruction.bytes)
    return sorted(found.items(), key=lambda pair: -pair[1])[:count]


def parse(text: str) -> tuple[Computations, str]:
    """(instructions by name, by computation; name of the entry computation)."""
    computations: Computations = {}
    current, entry = "", ""
    for line in text.splitlines():
        if line.endswith("{") and (line.startswith("%") or line.startswith("ENTRY")):
            found = _NAME.search(line)
            current = found.group(1) if found else ""
            computations[current] = {}
            entry = current if line.startswith("ENTRY") else entry
        elif current and line.startswith("  ") and " = " in line:
            instruction = _instruction(line)
            if instruction is not None:
                computations[current][instruction.name] = instruction
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    left, _, right = line.partition(" = ")
    name, opcode = _NAME.search(left), _OPCODE.search(" " + right)
    if name is None or opcode is None:
        return None
    result, rest = right[: max(opcode.start() - 1, 0)], right[opcode.end() - 1 :]
    inside, attributes = _matching(rest)
    called = [
        part
        for found in _CALLED.finditer(attributes)
        for part in _NAME.findall(f"%{found[1]}" if found[1] else found[2])
    ]
    hbm, everywhere = _sizes(result)
    return Instruction(
        name.group(1), opcode.group(1), hbm, everywhere, tuple(_NAME.findall(inside)), tuple(called),
        int(inside) if inside.isdigit() else 0, attributes,
    )  # fmt: skip


def _matching(rest: str) -> tuple[str, str]:
    """Text inside the first parenthesis of `rest`, which is open already, and what follows."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place:]
    return rest, ""


def _sizes(types: str) -> tuple[int, int]:
    hbm = everywhere = 0
    for kind, dims, layout in _SHAPE.findall(types):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        size = count * _bits(kind) // 8
        everywhere += size
        hbm += 0 if "S(" in layout else size
    return hbm, everywhere


def _bits(kind: str) -> int:
    if kind in WIDTH:
        return WIDTH[kind]
    digits = re.match(r"[a-z]+(\d+)", kind)
    return int(digits.group(1)) if digits else 0


def _runs(computations: Computations, entry: str) -> tuple[dict[str, float], set[str], int]:
    """How often each computation runs, which belong to a fusion or a reduction, and loops of unknown length."""
    runs: dict[str, float] = defaultdict(float)
    fused: set[str] = set()
    unknown = 0

    def visit(name: str, times: float, inside: bool) -> None:
        nonlocal unknown
        runs[name] += times
        if inside:
            fused.add(name)
        for instruction in computations.get(name, {}).values():
            each = 1
            if instruction.opcode == "while":
                trips = _trips(instruction, computations[name], computations)
                unknown += trips is None
                each = 1 if trips is None else trips
            within = inside or instruction.opcode not in ("while", "conditional", "call", "async-start")
            for called in instruction.called:
                visit(called, times * each, within)

    visit(entry, 1.0, False)
    return dict(runs), fused, unknown


def _trips(loop: Instruction, around: dict[str, Instruction], computations: Computations) -> int | None:
    """How often a loop goes round: its counter, in steps of one, to the constant that its condition compares with."""
    if known := _TRIPS.search(loop.attributes):
        return int(known.group(1))
    named = _CONDITION.search(loop.attributes)
    condition = computations.get(named.group(1), {}) if named else {}
    compare = next((i for i in condition.values() if i.opcode == "compare" and "direction=LT" in i.attributes), None)
    counter, limit = (condition.get(name) for name in compare.operands) if compare else (None, None)
    if counter is None or limit is None or limit.opcode != "constant":
        return None
    index, start = _INDEX.search(counter.attributes), around.get(loop.operands[0])
    while start is not None and start.opcode in ("tuple", "copy"):
        place = int(index.group(1)) if index and start.opcode == "tuple" else 0
        start = around.get(start.operands[place])
    return max(0, limit.number - (start.number if start is not None and start.opcode == "constant" else 0))


def _result_of_collective(instruction: Instruction, around: dict[str, Instruction]) -> int:
    """Bytes of the gathered, reduced or exchanged result. A -start's tuple holds the operand beside it."""
    operands = sum(around[name].all_bytes for name in instruction.operands if name in around)
    beside = operands if instruction.opcode.endswith("-start") else 0
    return instruction.all_bytes - (beside if instruction.all_bytes > beside else 0)


def _moved(instruction: Instruction, around: dict[str, Instruction], computations: Computations) -> int:
    """HBM bytes that one execution reads and writes."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or opcode.removesuffix("-start") in COLLECTIVES:
        return 0
    if opcode == "copy-start":  # one of source and target may lie in VMEM
        return sum(_reads(instruction, around)) + instruction.bytes // 2
    if opcode in SLICES:
        return 2 * instruction.bytes
    if opcode == "dynamic-update-slice":
        return 2 * _reads(instruction, around)[1]
    if opcode == "fusion" and instruction.called:
        return _fusion(instruction, around, computations.get(instruction.called[0], {}))
    return sum(_reads(instruction, around)) + instruction.bytes


def _reads(instruction: Instruction, around: dict[str, Instruction]) -> list[int]:
    return [around[name].bytes if name in around else 0 for name in instruction.operands]


def _fusion(instruction: Instruction, around: dict[str, Instruction], inner: dict[str, Instruction]) -> int:
    """Operands that are only sliced count as their slices; a result that updates an operand in place as the update."""
    parameters = sorted((i for i in inner.values() if i.opcode == "parameter"), key=lambda i: i.number)
    total, written = 0, instruction.bytes
    updated = {update.operands[0]: inner[update.operands[1]].all_bytes for update in _updates(inner)}
    for parameter, read in zip(parameters, _reads(instruction, around), strict=False):
        users = [i for i in inner.values() if parameter.name in i.operands]
        if parameter.name in updated:
            written = max(written - read, 0) + updated[parameter.name]
        elif users and all(user.opcode in SLICES and user.operands[0] == parameter.name for user in users):
            total += min(read, sum(user.all_bytes for user in users))
        else:
            total += read
    return total + written


def _updates(inner: dict[str, Instruction]) -> Iterator[Instruction]:
    for instruction in inner.values():
        if instruction.opcode == "dynamic-update-slice" and instruction.operands[1] in inner:
            yield instruction
