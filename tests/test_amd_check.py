"""amd-check's own judgement, on texts: what it reads out of compilers' words, what it counts, what it ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

from amd import check, common, gates, launches, parse

REMARKS = """\
a.cu:25:1: remark: Function Name: _Z1kv [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     TotalSGPRs: 69 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     VGPRs: 114 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     AGPRs: 4 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     ScratchSize [bytes/lane]: 32 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     Dynamic Stack: False [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     Occupancy [waves/SIMD]: 3 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     SGPRs Spill: 1 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     VGPRs Spill: 2 [-Rpass-analysis=kernel-resource-usage]
a.cu:25:1: remark:     LDS Size [bytes/block]: 256 [-Rpass-analysis=kernel-resource-usage]
"""

NOTES = """\
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           288
        .value_kind:     by_value
      - .offset:         288
        .size:           8
        .value_kind:     global_buffer
      - .offset:         296
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 64
    .kernarg_segment_align: 8
    .kernarg_segment_size: 296
    .max_flat_workgroup_size: 256
    .name:           _Z1kv
    .private_segment_fixed_size: 0
    .symbol:         _Z1kv.kd
    .wavefront_size: 64
  - .args:           []
    .group_segment_fixed_size: 0
    .kernarg_segment_size: 0
    .max_flat_workgroup_size: 1024
    .name:           _Z1gv
    .private_segment_fixed_size: 16
    .wavefront_size: 32
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
"""

# A kernel with two nested loops: the outer loads, the inner multiplies, and a branch in the inner one skips an instruction.
LISTING = """\

k.o:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001000 <_Z1kv>:
	s_load_dwordx2 s[0:1], s[4:5], 0x0                         // 000000001000: C0060002 00000000
	v_mov_b32_e32 v0, 0                                        // 000000001008: 7E000280
	global_load_dwordx4 v[0:3], v4, s[0:1]                     // 00000000100C: DC5C8000 00000004
	v_and_b32_e32 v5, v0, v1                                   // 000000001014: 260A0300
	s_cbranch_scc1 1                                           // 000000001018: BF850001 <_Z1kv+0x20>
	v_or_b32_e32 v5, v0, v1                                    // 00000000101C: 280A0300
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]    // 000000001020: D3E10000 04020D04
	v_mfma_f32_16x16x16_bf16 v[8:11], v[4:5], v[6:7], v[8:11]// 000000001028: D3E10008 04220D04
	s_cbranch_scc0 65527                                       // 000000001030: BF84FFF7 <_Z1kv+0x14>
	v_mfma_f32_16x16x4_f32 v[0:3], v4, v6, v[0:3]              // 000000001034: D3C50000 04020D04
	v_mov_b32_e32 v0, 0                                        // 00000000103C: 7E000280
	s_cbranch_scc0 65522                                       // 000000001040: BF84FFF2 <_Z1kv+0xc>
	s_endpgm                                                   // 000000001044: BF810000

0000000000001100 <_Z1gv>:
	s_endpgm                                                   // 000000001100: BF810000
"""


def test_resource_usage_is_read() -> None:
    assert parse.resource_usage(REMARKS) == {"_Z1kv": parse.Resources(114, 4, 69, 32, 3, 1, 2, 256)}


def test_a_remark_that_is_missing_is_no_zero() -> None:
    text = "\n".join(line for line in REMARKS.splitlines() if "ScratchSize" not in line)
    with pytest.raises(ValueError, match="no remark about scratch of _Z1kv"):
        parse.resource_usage(text)


def test_metadata_is_read() -> None:
    found = parse.metadata(NOTES)
    assert found["_Z1kv"] == parse.Metadata(
        64, 0, 296, 256, 64, ((0, 288), (288, 8)), (("hidden_block_count_x", 296),)
    )
    assert found["_Z1gv"] == parse.Metadata(0, 16, 0, 1024, 32, ())


def test_disassembly_is_read() -> None:
    found = parse.disassembly(LISTING)
    assert {name: len(code) for name, code in found.items()} == {"_Z1kv": 13, "_Z1gv": 1}
    load = found["_Z1kv"][2]
    assert (load.address, load.name, load.operands) == (0x100C, "global_load_dwordx4", "v[0:3], v4, s[0:1]")
    assert [i.target for i in found["_Z1kv"] if i.target] == [0x1020, 0x1014, 0x100C]


def test_loops_are_found_and_the_innermost_is_the_main_one() -> None:
    code = parse.disassembly(LISTING)["_Z1kv"]
    assert sorted(len(loop) for loop in parse.loops(code)) == [6, 10]
    loop = parse.main_loop(code)
    assert [i.address for i in loop] == [0x1014, 0x1018, 0x101C, 0x1020, 0x1028, 0x1030]
    assert parse.vector_alu(loop) == 2
    assert parse.main_loop(parse.disassembly(LISTING)["_Z1gv"]) == []


@pytest.mark.parametrize(
    ("instruction", "wave", "weights"),
    [
        ("v_mfma_f32_16x16x16_bf16", 64, 4),
        ("v_mfma_f32_16x16x16_bf16_1k", 64, 4),
        ("v_mfma_f32_16x16x16bf16_1k", 64, 4),
        ("v_mfma_f32_16x16x16f16", 64, 4),
        ("v_mfma_f32_16x16x32_f16", 64, 8),
        ("v_wmma_f32_16x16x16_bf16", 32, 8),
        ("v_mfma_f32_16x16x4_f32", 64, 0),
        ("v_mfma_f32_16x16x4f32", 64, 0),
        ("v_fma_f32", 64, 0),
    ],
)
def test_weights_of_a_matrix_instruction(instruction: str, wave: int, weights: float) -> None:
    code = [parse.Instruction(0, instruction, "")]
    assert parse.weights_per_lane(code, wave, 1) == weights
    assert parse.weights_per_lane(code * 2, wave, 2) == weights


def kernel(
    name: str = "stream_kernel<MfmaGfx9<Bf16>, Bf16, (WeightKind)1, (Form)0, 1, 1>", **changes: object
) -> gates.Kernel:
    """One with nothing wrong."""
    valu = changes.pop("valu", 0.9)
    values = {
        "vgprs": 64,
        "agprs": 0,
        "sgprs": 40,
        "scratch": 0,
        "occupancy": 8,
        "sgpr_spills": 0,
        "vgpr_spills": 0,
        "lds": 1024,
    }
    return gates.Kernel(
        "gfx942", "gemm_mfma_gfx9_bf16.cu", name, "_Z", parse.Resources(**values | changes), valu
    )  # type: ignore[arg-type]


CODE = [parse.Instruction(0, n, "") for n in ("global_load_dwordx4", "v_mfma_f32_16x16x16_bf16")]


def test_a_good_kernel_passes_the_gates() -> None:
    assert gates.complaints(kernel(), CODE, 256) == []


@pytest.mark.parametrize(
    ("made", "code", "threads", "said"),
    [
        (kernel(scratch=8), CODE, 256, "scratch"),
        (kernel(sgpr_spills=1), CODE, 256, "spilled"),
        (kernel(vgpr_spills=1), CODE, 256, "spilled"),
        (kernel(lds=65537), CODE, 256, "local memory"),
        (kernel(occupancy=1), CODE, 256, "1 waves fit a SIMD, 2 must"),
        (kernel(occupancy=3), CODE, 1024, "3 waves fit a SIMD, 4 must"),
        (kernel(), CODE[:1], 256, "no matrix instruction on bf16"),
        (kernel(kernel().name.replace("Bf16", "Fp16")), CODE, 256, "no matrix instruction on f16"),
        (kernel(), CODE[1:], 256, "no 16-byte load"),
        (kernel(valu=1.01), CODE, 256, "1.01 vector-ALU"),
        (kernel(kernel().name.replace("(Form)0", "(Form)1"), valu=1.21), CODE, 256, "1.21 vector-ALU"),
    ],
)
def test_each_gate_can_fail(
    made: gates.Kernel, code: list[parse.Instruction], threads: int, said: str
) -> None:
    bad = gates.complaints(made, code, threads)
    assert len(bad) == 1 and said in bad[0]


@pytest.mark.parametrize(("name", "least"), [
    ("stream_kernel<WmmaGfx12<Fp16>, Fp16, (WeightKind)1, (Form)0, 1, 1, 4>", 6),
    ("stream_kernel<MfmaGfx9<Bf16>, Bf16, (WeightKind)1, (Form)0, 1, 1>", 2),
    ("act_order_kernel<(CodeReader::Words)1, 8, float>", 3),
    ("act_order_kernel<(CodeReader::Words)1, 4, float>", 4),
    ("moe_sum_kernel", 4),
])  # fmt: skip
def test_the_least_occupancy_goes_by_how_a_name_begins(name: str, least: int) -> None:
    """Names hold parentheses, which mean something else in a pattern."""
    said = f"{least - 1} waves fit a SIMD, {least} must"
    assert said in gates.complaints(kernel(name, occupancy=least - 1), CODE, 64)
    assert not any("SIMD" in c for c in gates.complaints(kernel(name, occupancy=least), CODE, 64))


def test_other_tiles_are_counted_and_not_gated() -> None:
    two = kernel(kernel().name.replace(", 1, 1>", ", 2, 1>"), valu=3.0)
    assert gates.token_tiles(two.name) == 2
    assert gates.complaints(two, CODE, 256) == []


def test_kernel_names_are_shortened() -> None:
    long = "void int4_emu::gpu::gemm_kernel<int4_emu::gpu::FmaAtom<64>, float, (int4_emu::gpu::WeightKind)1>(int4_emu::gpu::GemmArgs, long)"
    assert gates.short(long) == "gemm_kernel<FmaAtom<64>, float, (WeightKind)1>"
    assert gates.short("int4_emu::gpu::(anonymous namespace)::count_kernel(int*)") == "count_kernel"


# Files per architecture.


def test_atoms_are_read_and_recognised_in_names() -> None:
    atoms = common.read_atoms("# families\nmfma_gfx9 hip gfx90a gfx942 # two\n\nfma any *\n")
    assert atoms == {"mfma_gfx9": ("hip", ["gfx90a", "gfx942"]), "fma": ("any", ["*"])}
    assert common.atom_of("gemm_mfma_gfx9_bf16.cu", atoms) == "mfma_gfx9"
    assert common.atom_of("gemm_fma.cu", atoms) == "fma"
    assert common.atom_of("align.cu", atoms) is None


def test_no_architecture_gets_another_vendor_s_files() -> None:
    names = {arch: {p.name for p in common.sources_for(arch)} for arch in common.TARGETS}
    for arch, files in names.items():
        assert {"align.cu", "dequantize.cu", "gemm_fma.cu", "select.cu"} <= files, arch
        assert not [f for f in files if "sm80" in f], arch
    assert not [f for f in names["gfx1100"] if "gfx9" in f or "gfx12" in f]


# Launches.


def test_launches_are_read_and_held_against_kernel_and_chip() -> None:
    text = "launch gfx942 _Z1kv 10 256 1024\nFAIL something\n2 checks, 1 failed\n"
    assert launches.read_launches(text) == [launches.Launch("gfx942", "_Z1kv", 10, 256, 1024)]
    kernels = parse.metadata(NOTES)
    assert launches.complaints(launches.Launch("gfx942", "_Z1kv", 10, 256, 65536 - 64), kernels) == []
    for launch, said in [
        (launches.Launch("gfx942", "_Z1kv", 10, 512, 0), "512 threads, compiled for 256"),
        (launches.Launch("gfx942", "_Z1kv", 10, 256, 65536 - 63), "65536 are there"),
        (launches.Launch("gfx942", "_Z1kv", 10, 96, 0), "96 threads in waves of 64"),
        (launches.Launch("gfx942", "_Z1gv", 10, 1024, 0), "1024 threads in waves of 32"),
        (launches.Launch("gfx942", "_Z1kv", 1 << 24, 256, 0), "2^32 threads"),
        (launches.Launch("gfx942", "_Z1xv", 1, 256, 0), "not in the code objects"),
    ]:
        bad = launches.complaints(launch, kernels)
        assert len(bad) == 1 and said in bad[0]


# The end.


def test_result_line_and_exit_status() -> None:
    ran = dict.fromkeys("abcd", "ran")
    assert check.result_line(ran) == "amd-check: a=ran b=ran c=ran d=ran"
    assert check.exit_status(ran, False) == 0
    skipped = ran | {"b": "skipped(the mirror cannot be reached)"}
    assert (
        check.result_line(skipped) == "amd-check: a=ran b=skipped(the mirror cannot be reached) c=ran d=ran"
    )
    assert check.exit_status(skipped, False) == 3
    assert check.exit_status(skipped, True) == 0
    assert check.exit_status(skipped | {"a": "FAILED"}, True) == 1


def test_a_part_s_end_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ending(error: BaseException | None) -> object:
        def part(install: bool) -> None:
            if error:
                raise error

        return part

    for error, said in [
        (None, "ran"),
        (common.Skip("no root"), "skipped(no root)"),
        (common.Failure("a.cu: it spills"), "FAILED"),
        (KeyError("lost"), "FAILED"),
    ]:
        monkeypatch.setitem(check.RUN, "a", ending(error))  # type: ignore[arg-type]
        assert check.run_part("a", False) == said
    assert "it spills" in capsys.readouterr().out


def test_an_object_is_made_anew_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compiler"
    fake.write_text(
        "#!/bin/sh\nd=; o=\nwhile [ $# -gt 1 ]; do case $1 in -dependency-file) d=$3;; -o) o=$2;; esac; shift; done\n"
        'echo "$(basename $o): k.cu k.h" > $d; echo object > $o; echo said\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "WORK", tmp_path / "build")
    source, header = tmp_path / "k.cu", tmp_path / "k.h"
    source.write_text("1")
    header.write_text("1")
    out = tmp_path / "build" / "k.o"

    def compiled(*flags: str, version: str = "1") -> int:
        compiler = common.Compiler([fake], version)
        assert compiler.compile(source, out, flags) == "said\n"
        return compiler.compiled

    assert [compiled(), compiled()] == [1, 0]
    header.write_text("2")
    assert [compiled(), compiled()] == [1, 0]
    assert [compiled("-O3"), compiled("-O3", version="2")] == [1, 1]


@pytest.mark.parametrize(
    ("name", "k", "operand"),
    [
        ("v_mfma_f32_16x16x16bf16_1k", "16", "bf16"),  # gfx90a spells them without the underscore
        ("v_mfma_f32_16x16x16f16", "16", "f16"),
        ("v_mfma_f32_16x16x16_bf16", "16", "bf16"),
        ("v_mfma_f32_16x16x32_f16", "32", "f16"),
        ("v_wmma_f32_16x16x16_bf16", "16", "bf16"),
    ],
)
def test_matrix_instruction_names(name: str, k: str, operand: str) -> None:
    matched = parse.MATRIX.match(name)
    assert matched is not None
    assert matched.groups() == (k, operand)
