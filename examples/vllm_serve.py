"""vLLM's OpenAI-compatible server on an int4 checkpoint, with the plug-in, and one request to it.

Needs an environment with vLLM 0.32 and int4_emu (docs/serving.md). Another model: give its folder.

Run: python examples/vllm_serve.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import vllm

from int4_emu.data import BARD

PORT = 8137
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def post(path: str, body: dict[str, object] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(BARD)
    # As a module: the command `vllm` does not start where the package is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--quantization", "int4_emu", "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=OFFLINE | os.environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    post("/health")
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None:
                        log.seek(0)
                        sys.exit(log.read())
                    time.sleep(1)
            prompt = "ROMEO.\nBut soft, what light is this?\n"
            body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
            answer = json.loads(post("/v1/completions", body))
            print(prompt + answer["choices"][0]["text"])
            print(f"vLLM {vllm.__version__}: {answer['usage']['completion_tokens']} tokens")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
