"""`make host-check`: vLLM's OpenAI-compatible server on loopback, and tokens per second."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_environment import ROOT, WORK, Failure, engine, python, settings
from vllm_parts import BARD_OPTIONS, IDS, bard_job, check_ids, prompt_ids

from test_examples import SAYS


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ask(port: int, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[int, Path]]:
    """A server on loopback: (its port, its log)."""
    port, log = free_port(), WORK / "out" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python()), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", *options]
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=WORK, env=settings(), stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                ask(port, "/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failure(f"the server did not come up\n{log.read_text()[-6000:]}") from None
                time.sleep(1)
        yield port, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server() -> str:
    """The reference ids over HTTP, one request and six at once."""
    prompt = prompt_ids()
    body = {
        "model": BARD_OPTIONS["model"],
        "prompt": prompt,
        "max_tokens": len(IDS) - len(prompt),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def complete(port: int) -> list[int]:
        ids: list[int] = ask(port, "/v1/completions", body)["choices"][0]["token_ids"]
        return ids

    with serving(BARD_OPTIONS["model"], "--dtype", "float32", "--enforce-eager") as (port, log):
        check_ids({"ids": [complete(port)]})
        with ThreadPoolExecutor(6) as pool:
            check_ids({"ids": list(pool.map(lambda _: complete(port), range(6)))})
        if "int4_emu serves RoutedExperts, since" not in log.read_text():
            raise Failure(f"the server's log has no line of int4_emu\n{log.read_text()[-3000:]}")
    return f"{len(IDS)} of {len(IDS)} ids from one request and from six at once"


def example() -> str:
    """examples/vllm_serve.py as it stands."""
    out = WORK / "out" / "example.log"
    with open(out, "w") as log:
        done = subprocess.run(
            [str(python()), str(ROOT / "examples" / "vllm_serve.py")],
            cwd=WORK,
            env=settings(),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    text = out.read_text()
    if done.returncode != 0 or not re.search(SAYS["vllm_serve.py"], text):
        raise Failure(f"status {done.returncode}\n{text[-4000:]}")
    return text.splitlines()[-1]


SPEED_TOKENS, BATCHES = 64, (1, 8)


def speed() -> str:
    """Tokens per second of bard, and of the same weights in floating point in vLLM's own experts."""
    plain = WORK / "bard-float"
    if not plain.is_dir():
        command = [sys.executable, "-m", "int4_emu", "convert", BARD_OPTIONS["model"], str(plain)]
        done = subprocess.run(
            [*command, "--dtype", "bf16"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Failure(f"int4-emu convert: {done.stderr}")
    jobs = []
    for dtype in ("float32", "bfloat16"):
        for name, options in (
            ("int4_emu packed", {"weights": "packed", "quantization": "int4_emu"}),
            ("int4_emu dequantized", {"weights": "dequantized", "quantization": "int4_emu"}),
            ("vLLM, float", {"model": str(plain)}),
        ):
            job = bard_job(f"{name}, {dtype}", dtype=dtype, **options)
            jobs.append({**job, "max_tokens": SPEED_TOKENS, "batches": BATCHES})
    results, _ = engine("speed", jobs, timeout=1800)
    lines = []
    for job, result in zip(jobs, results, strict=True):
        if "error" in result:
            lines.append(f"  {job['name']}: {result['error'][:200]}")
            continue
        told = [f"{int(n) * SPEED_TOKENS / s:.0f} with {n}" for n, s in result["seconds"].items()]
        lines.append(f"  {job['name']}: {', '.join(told)}")
    return "tokens per second of so many requests at once, the best of three\n" + "\n".join(lines)
