"""Part a: clang 19 and the HIP 5.2.3 headers and bitcode of Debian 12 compile and link every GPU file."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from amd.common import (
    ROOT,
    TARGETS,
    WORK,
    Compiler,
    Failure,
    Skip,
    definitions,
    each,
    jobs,
    must,
    run,
    sources_for,
)
from native.simt.build import Builder, BuildError
from native.simt.kernels import difference, of_code_objects, of_program

PACKAGES = {
    "clang-19": "1:19.1.7",
    "lld-19": "1:19.1.7",
    "llvm-19": "1:19.1.7",
    "libamdhip64-dev": "5.2.3",
    "rocm-device-libs": "5.2.3",
}
BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
# gfx950 is newer than this compiler.
ARCHS = ["gfx90a", "gfx942", "gfx1100", "gfx1201"]
# Kernels of the fma family only, as for any architecture that nobody listed; a name that the compiler refuses is reported.
EXTRA_ARCHS = ["gfx1030", "gfx1151"]
OBJECTS = WORK / "debian"


def flags_for(arch: str) -> list[str]:
    """Flags for a linked code object: this compiler would look for ROCm's own folder layout, so the bitcode is named one by one.

    Little optimised: quick, and unoptimised this compiler's backend fails on the main loop (an illegal copy from a vector register).
    """
    target = TARGETS[arch]
    options = [
        "daz_opt_off",
        "unsafe_math_off",
        "finite_only_off",
        "correctly_rounded_sqrt_on",
        f"wavefrontsize64_{'on' if target.wave == 64 else 'off'}",
        f"isa_version_{target.bitcode}",
        "abi_version_500",
    ]
    linked = [f"{name}.bc" for name in ("ocml", "ockl", "opencl", "hip")] + [
        f"oclc_{name}.bc" for name in options
    ]
    bitcode = [
        word
        for name in linked
        for word in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", f"{BITCODE / name}")
    ]
    return [
        *("-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib"),
        *bitcode,
        *(
            "-mcode-object-version=5",
            "-std=c++17",
            "-O1",
            "-D__HIP_PLATFORM_AMD__",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-pass-failed",  # an occupancy that a launch bound asks for and little optimised code misses
        ),
        *definitions(arch),
    ]


def check_packages(install: bool) -> None:
    """Asserts the versions, after installing what is missing when asked to.

    Raises:
        Skip: a package is missing, or this is not Debian.
        Failure: another version than the recipe was written for.
    """
    if shutil.which("dpkg-query") is None:
        raise Skip("not a Debian machine: no dpkg-query")

    def version(name: str) -> str:
        done = run(["dpkg-query", "-W", "-f", "${Status}\t${Version}", name])
        status, _, number = done.stdout.partition("\t")
        return number if status == "install ok installed" else ""

    missing = [name for name in PACKAGES if not version(name)]
    if missing and install:
        must(["apt-get", "update", "-q"], "apt-get update")
        must(["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing], "apt-get install")
        missing = [name for name in PACKAGES if not version(name)]
    if missing:
        raise Skip(f"not installed; as root: apt-get install -y --no-install-recommends {' '.join(missing)}")
    for name, wanted in PACKAGES.items():
        found = version(name)
        print(f"a: {name} {found}")
        if not found.startswith(wanted):
            raise Failure(f"{name} must be {wanted}*, found {found}")


def compare_kernels() -> None:
    """The programs that run on the host have exactly the kernels of the objects, for an architecture of each wave size.

    Raises:
        Failure: a kernel that only one side has, or the host's compiler refused a file.
    """
    for arch in ("gfx942", "gfx1100"):
        try:
            ours = of_program(Builder().program(arch))
        except BuildError as error:
            raise Failure(str(error)) from error
        theirs = of_code_objects(OBJECTS / arch / f"{source.stem}.o" for source in sources_for(arch))
        only = difference(ours, theirs, "in the code objects")
        if only:
            raise Failure(
                "\n".join([f"{arch}: kernels of the host's program and of the objects differ", *only])
            )
        print(f"a: {arch}: {len(theirs)} kernels, those that run on the host (tests/native/test_simt.py)")


def compile_all(install: bool) -> None:
    """Part a."""
    check_packages(install)
    version = must(["clang++-19", "--version"], "clang++-19").splitlines()[0]
    compiler = Compiler(["clang++-19"], version)
    began = time.monotonic()

    def accepts(arch: str) -> bool:
        probe = [
            "clang++-19",
            "-x",
            "hip",
            f"--offload-arch={arch}",
            "--cuda-device-only",
            "-nogpuinc",
            "-nogpulib",
        ]
        return run([*probe, "-fsyntax-only", "-"], input="").returncode == 0

    extra = [a for a in EXTRA_ARCHS if accepts(a)]
    for arch in sorted(set(EXTRA_ARCHS) - set(extra)):
        print(f"a: {arch}: unknown to this compiler")
    work = [(source, arch) for arch in [*ARCHS, *extra] for source in sources_for(arch)]
    each(lambda w: compiler.compile(w[0], OBJECTS / w[1] / f"{w[0].stem}.o", flags_for(w[1])), work, jobs())
    took = time.monotonic() - began
    for arch in [*ARCHS, *extra]:
        print(f"a: {arch}: {len(sources_for(arch))} files compiled and linked")
    print(f"a: {compiler.compiled} of {len(work)} compiled anew in {took:.0f} s ({version}, {ROOT.name})")
    compare_kernels()
