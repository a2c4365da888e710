"""Runs jobs in vLLM's engine and writes what came out; the judging is in vllm_parts.py. Runs in vLLM's own environment.

    python vllm_engine.py JOBS.json

JOBS.json: {"out": folder, "jobs": [{"name", "llm": options of vllm.LLM, "prompts": [[ids]], "max_tokens", "vocabulary"}]}.
A job with `batches` is timed with each of these numbers of requests. A job with `vocabulary` also gives the log-probabilities of all its
tokens at every prompt position, one with `perplexity` those of the prompts' own tokens. Each job leaves out/NAME.json and, with a
vocabulary, out/NAME.safetensors.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def served_by(model: torch.nn.Module) -> dict[str, int]:
    """How many layers each quantisation method has, as "Layer:Method"; int4_emu's with what they hold."""
    found: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        name = f"{type(module).__name__}:{type(method).__name__}"
        if hasattr(module, "int4_emu_experts"):
            name += ":packed" if module.int4_emu_experts.is_packed else ":dequantized"
        if hasattr(module, "int4_emu_parts"):
            name += ":" + "+".join(type(part).__name__ for part in module.int4_emu_parts)
        found[name] = found.get(name, 0) + 1
    return found


def model_of(llm: Any) -> torch.nn.Module | None:
    """The model of an engine that runs whole in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    return None if worker is None else worker.model_runner.model


def run(job: dict[str, Any], out: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(
        **{"seed": 0, "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 512, **job["llm"]}
    )
    loaded = time.perf_counter()
    vocabulary = job.get("vocabulary")
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job.get("max_tokens", 1),
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0 if job.get("perplexity") else vocabulary,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    # Each batch size with copies of the first prompt, best of three.
    seconds = {}
    for batch in job.get("batches", []):
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            llm.generate(prompts[:1] * batch, sampling, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        seconds[batch] = min(times)
    if vocabulary is not None:
        tables = {}
        for number, result in enumerate(results):
            rows = result.prompt_logprobs[1:]
            table = torch.full((len(rows), vocabulary), float("-inf"))
            for i, row in enumerate(rows):
                for token, entry in row.items():
                    if token < vocabulary:
                        table[i, token] = entry.logprob
            tables[f"prompt.{number}"] = table
        save_file(tables, out / f"{job['name']}.safetensors")
    own = []
    if job.get("perplexity"):
        for ids, result in zip(job["prompts"], results, strict=True):
            rows = zip(ids[1:], result.prompt_logprobs[1:], strict=True)
            own.append([row[token].logprob for token, row in rows])
    model = model_of(llm)
    return {
        "own": own,
        "ids": [list(r.outputs[0].token_ids) for r in results],
        "load_s": loaded - start,
        "seconds": seconds,
        "served": {} if model is None else served_by(model),
    }


def main() -> None:
    todo = json.loads(Path(sys.argv[1]).read_text())
    out = Path(todo["out"])
    out.mkdir(parents=True, exist_ok=True)
    for job in todo["jobs"]:
        try:
            result = run(job, out)
        except Exception as error:  # what vLLM says is a result too
            result = {"error": f"{type(error).__name__}: {error}"}
        (out / f"{job['name']}.json").write_text(json.dumps(result))
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
