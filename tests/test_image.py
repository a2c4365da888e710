"""The rules of Dockerfile.rocm, read from its text; tests/amd/image.py executes it."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from amd import image
from amd.offload import code_objects, kernels
from amd.rocm_build import SOURCES
from int4_emu.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "Dockerfile.rocm"

pytestmark = pytest.mark.skipif(not DOCKERFILE.is_file(), reason="runs in a source checkout")


def instructions() -> list[tuple[str, str]]:
    """(word, the rest) of each instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name; those before the first belong to none."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.rpartition(" ")[2]
            found[name] = []
        found[name].append((word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [rest for w, rest in stages()[stage] if w == word]


def test_the_base_is_for_the_builder_to_name() -> None:
    assert stages()[""] == [("ARG", "BASE_IMAGE")]
    assert [rest for word, rest in instructions() if word == "FROM"] == [
        "${BASE_IMAGE} AS wheel",
        "${BASE_IMAGE} AS runtime",
    ]


def test_the_default_architectures_have_matrix_kernels() -> None:
    served = {
        name
        for line in (ROOT / "csrc/gpu/atoms.txt").read_text(encoding="utf-8").splitlines()
        if (words := line.partition("#")[0].split()) and words[1] == "hip"
        for name in words[2:]
    }
    given = {rest for stage in ("wheel", "runtime") for rest in of(stage, "ARG") if "ROCM" in rest}
    assert len(given) == 1  # the same in both
    (text,) = given
    names = re.fullmatch(r'PYTORCH_ROCM_ARCH="([\w;]+)"', text)
    assert names and set(names[1].split(";")) <= served
    assert {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"} <= set(names[1].split(";"))
    for stage in ("wheel", "runtime"):
        assert any("PYTORCH_ROCM_ARCH=${PYTORCH_ROCM_ARCH}" in rest for rest in of(stage, "ENV"))


def test_the_wheel_is_built_against_the_torch_of_the_base() -> None:
    (wheel,) = [rest for rest in of("wheel", "RUN") if "pip wheel" in rest]
    assert "--no-build-isolation" in wheel and "--no-deps" in wheel


def test_nothing_installs_torch() -> None:
    """No upgrade, no torch by name; the one command that resolves requirements is held to the base's versions and checked."""
    for word, rest in instructions():
        for arguments in re.findall(r"pip install ([^;|&]*)", rest) if word == "RUN" else ():
            assert not re.search(r"(^|\s)(-U|--upgrade\S*|--force\S*|-I)(\s|$)", arguments), arguments
            assert not re.search(r"(^|[\s\"'])torch", arguments), arguments
    (install,) = [rest for rest in of("runtime", "RUN") if "pip install" in rest]
    before, _, after = install.partition("pip install")
    assert "held > /tmp/before" in before and "--constraint /tmp/before" in after
    assert re.search(r"held > /tmp/after; *cmp /tmp/before /tmp/after \|\| \{[^}]*exit 1; \}", after)


@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a command of the file")
@pytest.mark.parametrize(
    ("after", "status", "said"),
    [
        ("torch==2.10.0+rocm7.1 triton==3.6.0 rich==15.0", 0, ""),
        ("torch==2.11.0 triton==3.6.0", 1, "the installation changed torch"),
        ("torch==2.10.0+rocm7.1", 1, "the installation changed torch"),
    ],
    ids=["kept", "replaced", "triton gone"],
)
def test_an_installation_that_changes_torch_fails(tmp_path: Path, after: str, status: int, said: str) -> None:
    (install,) = [rest for rest in of("runtime", "RUN") if "pip install" in rest]
    python = tmp_path / "python3"
    python.write_text(
        f"""#!/bin/sh
case "$3 $4" in
  "list --format=freeze") {{ test -e {tmp_path}/installed && echo {after} || echo torch==2.10.0+rocm7.1 triton==3.6.0; }} | tr ' ' '\\n' ;;
  *) touch {tmp_path}/installed ;;
esac
"""
    )
    python.chmod(0o755)
    script = re.sub(r"^--mount=\S+ ", "", install).replace("/tmp/", f"{tmp_path}/")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout and (tmp_path / "installed").exists()


def test_the_user_is_a_number() -> None:
    user = of("runtime", "USER")[-1]
    match = re.fullmatch(r"(\d+):(\d+)", user)
    assert match and int(match[1]) > 0 and int(match[2]) > 0
    assert f"{match[1]}:{match[2]}" in DOCKERFILE.read_text().partition("/etc/passwd")[0]


def test_health_check_and_command_run_the_selftest() -> None:
    (health,) = of("runtime", "HEALTHCHECK")
    (command,) = of("runtime", "CMD")
    options, _, check = health.partition("CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} == set(re.findall(r"--[\w-]+", options))
    for words in (json.loads(check), json.loads(command)):
        assert words[:2] == ["int4-emu", "selftest"]
        build_parser().parse_args(words[1:])
    assert "--quick" in json.loads(check)


def test_labels() -> None:
    (text,) = of("runtime", "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', text))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {"title", "description", "version", "revision", "licenses", "base.name"} <= set(labels)
    assert f'version = "{labels["version"]}"' in project
    assert f'license = "{labels["licenses"]}"' in project
    assert labels["base.name"] == "${BASE_IMAGE}"


def test_an_older_builder_understands_it() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert "<<" not in text and not re.search(r"^#\s*syntax", text, flags=re.MULTILINE)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    copied = [name for rest in of("wheel", "COPY") for name in rest.split()[:-1]]
    assert copied == list(SOURCES)  # amd-check builds from the same
    assert not of("runtime", "COPY")
    for name in copied:
        assert (ROOT / name).exists()
        assert not ignored(name)
    for name in (".git/config", "tests/test_image.py", ".venv/bin/python", "build/x.o", "python/int4_emu/_C.abi3.so"):
        assert ignored(name), name


def ignored(name: str) -> bool:
    """Whether .dockerignore leaves a file out: the last line that matches it or a folder above decides."""
    folders = [name, *(str(parent) for parent in Path(name).parents if str(parent) != ".")]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if any(fnmatch.fnmatchcase(f, pattern) or fnmatch.fnmatchcase(f"/{f}", pattern.replace("**", "*")) for f in folders):
            verdict = not line.startswith("!")
    return verdict


def test_readme_runs_it_with_the_devices() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    build = re.search(r"docker build .*", readme)
    assert build and "-f Dockerfile.rocm" in build[0] and "--build-arg BASE_IMAGE=" in build[0]
    run = re.search(r"docker run (?:.*\\\n)*.*", readme)
    assert run
    for option in (
        "--device /dev/kfd",
        "--device /dev/dri",
        "--group-add video",
        "--group-add $(stat -c %g /dev/dri/renderD128)",
        "--security-opt seccomp=unconfined",
        "--ipc host",
    ):
        assert option in run[0], option


def test_what_cannot_be_done_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image, "FOLDER", tmp_path / "image")
    monkeypatch.setattr(image.shutil, "which", lambda *a, **k: None)
    monkeypatch.setattr(image.os, "geteuid", lambda: 0)
    monkeypatch.setattr("sys.argv", ["image.py"])
    monkeypatch.delenv("INT4_EMU_AMD_ALLOW_SKIP", raising=False)
    assert image.main() == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"image-check: lint=skipped \(.*hadolint.*\) base=skipped \(.*buildah.*\) build=not reached run=not reached", last
    )
    monkeypatch.setenv("INT4_EMU_AMD_ALLOW_SKIP", "1")
    assert image.main() == 0


# What amd-check and image-check read out of a library.


def bundle(objects: dict[str, bytes]) -> bytes:
    """An offload bundle as clang lays it out."""
    entries, data = b"", b""
    start = 32 + sum(24 + len(name) for name in objects)
    for name, content in objects.items():
        entries += struct.pack("<QQQ", start + len(data), len(content), len(name)) + name.encode()
        data += content
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(objects)) + entries + data


@pytest.mark.skipif(not (shutil.which("as") and shutil.which("objcopy")), reason="binutils are needed")
def test_kernels_of_every_code_object_are_found(tmp_path: Path) -> None:
    device, host = tmp_path / "device.o", tmp_path / "host.o"
    for path, text in ((device, ".globl a_kernel.kd, b_kernel\n.data\na_kernel.kd:\nb_kernel:\n.quad 0\n"), (host, "\n")):
        subprocess.run(["as", "-o", str(path), "-"], input=text, text=True, check=True)
    code = device.read_bytes()
    names = {"host-x86_64-unknown-linux-gnu-": b"", "hipv4-amdgcn-amd-amdhsa--gfx942": code}
    fat = tmp_path / "fat"
    fat.write_bytes(bundle(names) + bytes(100) + bundle({"hipv4-amdgcn-amd-amdhsa--gfx1100": code}))
    subprocess.run(["objcopy", "--add-section", f".hip_fatbin={fat}", str(host)], check=True)
    found = list(code_objects(host.read_bytes()))
    assert [name for name, _ in found] == ["gfx942", "gfx1100"]
    assert all(kernels(content) == {"a_kernel"} for _, content in found)
    with pytest.raises(ValueError, match="no code object"):
        list(code_objects(code))
