"""Reads what the compiler and the disassembler say about kernels, and counts instructions in their loops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a compute unit, as `-Rpass-analysis=kernel-resource-usage` says it."""

    vgprs: int
    agprs: int
    sgprs: int
    scratch: int  # bytes per lane
    occupancy: int  # waves per SIMD
    sgpr_spills: int
    vgpr_spills: int
    lds: int  # static bytes per block


REMARKS = {
    "VGPRs": "vgprs",
    "AGPRs": "agprs",
    "TotalSGPRs": "sgprs",
    "ScratchSize": "scratch",
    "Occupancy": "occupancy",
    "SGPRs Spill": "sgpr_spills",
    "VGPRs Spill": "vgpr_spills",
    "LDS Size": "lds",
}


def resource_usage(text: str) -> dict[str, Resources]:
    """Mangled kernel name -> its resources, from the compiler's remarks.

    Raises:
        ValueError: a kernel's remarks are incomplete.
    """
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        remark = re.search(r"remark:\s+([A-Za-z ]+?)(?: \[[^\]]*\])?: (\S+)", line)
        if not remark:
            continue
        if remark[1] == "Function Name":
            name = remark[2]
            found[name] = {"agprs": 0}  # not said where a chip has none
        elif remark[1] in REMARKS and name:
            found[name][REMARKS[remark[1]]] = int(remark[2])
    for kernel, values in found.items():
        missing = set(REMARKS.values()) - set(values)
        if missing:
            raise ValueError(f"no remark about {', '.join(sorted(missing))} of {kernel}")
    return {kernel: Resources(**values) for kernel, values in found.items()}


@dataclass(frozen=True)
class Metadata:
    """What a code object says to the loader about a kernel."""

    lds: int
    scratch: int
    kernarg: int
    most_threads: int
    wave: int
    arguments: tuple[tuple[int, int], ...]  # offset and bytes of each
    hidden: tuple[tuple[str, int], ...] = ()  # kind and offset of those that the compiler added


def metadata(text: str) -> dict[str, Metadata]:
    """Mangled kernel name -> metadata, from `llvm-readelf --notes`."""
    kernels = {}
    for part in re.split(r"^  - (?=\.a)", text, flags=re.MULTILINE)[1:]:

        def number(key: str, part: str = part) -> int:
            found = re.search(rf"^ *\.{key}: +(\d+)", part, flags=re.MULTILINE)
            if not found:
                raise ValueError(f"no .{key} in\n{part}")
            return int(found[1])

        name = re.search(r"^    \.name: +(\S+)", part, flags=re.MULTILINE)
        if not name:
            raise ValueError(f"a kernel without a name:\n{part}")
        visible = re.findall(r"\.offset: +(\d+)\s+\.size: +(\d+)\s+\.value_kind:(?! +hidden)", part)
        hidden = re.findall(r"\.offset: +(\d+)\s+\.size: +\d+\s+\.value_kind: +(hidden_\w+)", part)
        kernels[name[1].strip("'")] = Metadata(
            lds=number("group_segment_fixed_size"),
            scratch=number("private_segment_fixed_size"),
            kernarg=number("kernarg_segment_size"),
            most_threads=number("max_flat_workgroup_size"),
            wave=number("wavefront_size"),
            arguments=tuple((int(offset), int(size)) for offset, size in visible),
            hidden=tuple((kind, int(offset)) for offset, kind in hidden),
        )
    return kernels


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly; `target` is the address that a branch goes to."""

    address: int
    name: str
    operands: str
    target: int | None = None


def disassembly(text: str) -> dict[str, list[Instruction]]:
    """Function -> its instructions, from `llvm-objdump -d` of a code object: `name operands// address: words <symbol+offset>`."""
    starts = {
        name: int(at, 16) for at, name in re.findall(r"^([0-9a-f]+) <(\S+)>:$", text, flags=re.MULTILINE)
    }
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if line.endswith(">:"):
            name = line.partition("<")[2][:-2]
            current = (
                [] if name == ".text" else functions.setdefault(name, [])
            )  # the section itself, where it is empty
            continue
        said, comment, rest = line.partition("// ")
        if not comment or not line.startswith("\t"):
            continue
        name, _, operands = said.strip().partition(" ")
        address, _, words = rest.partition(":")
        target = None
        if "branch" in name and words.endswith(">"):
            symbol, _, offset = words.partition("<")[2][:-1].rpartition("+0x")
            symbol, offset = (symbol, offset) if symbol else (offset, "0")
            target = starts[symbol] + int(offset, 16) if symbol in starts else None
        current.append(Instruction(int(address, 16), name, operands.strip(), target))
    return functions


def blocks_of(code: list[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Basic blocks as ranges of instructions, and the blocks that each leads to."""
    index = {i.address: at for at, i in enumerate(code)}
    ends = ("s_endpgm", "s_setpc_b64", "s_branch")
    leaders = {0} | {index[i.target] for i in code if i.target in index}
    leaders |= {
        at + 1 for at, i in enumerate(code) if (i.target is not None or i.name in ends) and at + 1 < len(code)
    }
    firsts = sorted(leaders)
    blocks = [range(a, b) for a, b in zip(firsts, [*firsts[1:], len(code)], strict=True)]
    number = {block.start: n for n, block in enumerate(blocks)}
    follow = []
    for n, block in enumerate(blocks):
        last = code[block[-1]]
        after = [number[index[last.target]]] if last.target in index else []
        if last.name not in ends and n + 1 < len(blocks):
            after.append(n + 1)
        follow.append(after)
    return blocks, follow


def back_edges(follow: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Edges that lead back to a block on the way from the entry, found depth first."""
    state = [0] * len(follow)  # 1 on the way, 2 done
    stack = [(0, iter(follow[0]))] if follow else []
    if follow:
        state[0] = 1
    while stack:
        block, rest = stack[-1]
        for after in rest:
            if state[after] == 1:
                yield block, after
            elif state[after] == 0:
                state[after] = 1
                stack.append((after, iter(follow[after])))
                break
        else:
            state[block] = 2
            stack.pop()


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The natural loops of a function, each with all instructions of its blocks."""
    blocks, follow = blocks_of(code)
    before: list[list[int]] = [[] for _ in blocks]
    for block, after in enumerate(follow):
        for a in after:
            before[a].append(block)
    members: dict[int, set[int]] = {}
    for latch, header in back_edges(follow):
        body = members.setdefault(header, {header})
        todo = [latch]
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += before[block]
    return [[code[i] for b in sorted(body) for i in blocks[b]] for body in members.values()]


# Multiply-adds of 16-bit operands; the fp32 ones fold zero points and multiply no weight.
MATRIX = re.compile(r"v_(?:mfma|wmma)_f32_16x16x(\d+)_?(bf16|f16)")


def is_vector_alu(i: Instruction) -> bool:
    """An instruction that occupies the vector ALU: v_*, without the matrix unit's."""
    return i.name.startswith("v_") and not i.name.startswith(("v_mfma", "v_wmma", "v_smfmac", "v_swmmac"))


def vector_alu(code: list[Instruction]) -> int:
    """How many; a dual instruction (v_dual_x :: v_dual_y) is two operations in one issue and counts as one."""
    return sum(map(is_vector_alu, code))


def weights_per_lane(code: list[Instruction], wave: int, token_tiles: int) -> float:
    """Weights that a lane handles in `code`: each matrix instruction meets a 16 x K tile of them, once per tile of tokens."""
    depths = [int(m[1]) for i in code if (m := MATRIX.match(i.name))]
    return sum(depths) * 16 / wave / token_tiles


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The loop with most matrix instructions among those that hold no other loop with any; empty where there is none."""
    with_matrix = [(loop, sum(bool(MATRIX.match(i.name)) for i in loop)) for loop in loops(code)]
    with_matrix = [(loop, n) for loop, n in with_matrix if n]
    addresses = [{i.address for i in loop} for loop, _ in with_matrix]
    innermost = [
        (n, loop)
        for (loop, n), own in zip(with_matrix, addresses, strict=True)
        if not any(a < own for a in addresses)
    ]
    return max(innermost, key=lambda pair: pair[0], default=(0, []))[1]
