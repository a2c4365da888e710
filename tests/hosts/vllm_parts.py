"""What `make host-check` shows of the vLLM plug-in, part by part. Each function raises Failure or Skip, or returns a line to print."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hosts"), str(ROOT / "python")]

from vllm_environment import WORK, Failure, engine  # noqa: E402

from checkpoints import CHECKPOINT_NAMES, checkpoint_path, reference_tensors  # noqa: E402
from int4_emu.data import BARD  # noqa: E402

REFERENCE = json.loads((BARD / "reference" / "reference.json").read_text())
IDS: list[int] = REFERENCE["greedy_ids"]
ROWS, CONTEXT = 63, 256  # of the reference perplexity
# float32, so that no two logits tie; a continuation that differs in one id counts as another text.
BARD_OPTIONS = {"model": str(BARD), "dtype": "float32"}


def prompt_ids() -> list[int]:
    """bard's prompt: the reference ids start with it."""
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(BARD / "tokenizer.json"))
        .encode("ROMEO.\nBut soft, what light is this?\n")
        .ids
    )
    if IDS[: len(ids)] != ids:
        raise Failure(f"the reference ids do not start with the prompt {ids}")
    return ids


def bard_job(name: str, *, weights: str | None = None, **options: Any) -> dict[str, Any]:
    prompt = prompt_ids()
    if weights is not None:
        options["additional_config"] = {"int4_emu": {"weights": weights}}
    return {
        "name": name,
        "llm": {**BARD_OPTIONS, **options},
        "prompts": [prompt],
        "max_tokens": len(IDS) - len(prompt),
    }


def check_ids(result: dict[str, Any]) -> None:
    if "error" in result:
        raise Failure(result["error"])
    prompt = prompt_ids()
    for ids in result["ids"]:
        got = prompt + ids
        same = sum(a == b for a, b in zip(got, IDS, strict=True))
        if same != len(IDS):
            raise Failure(f"{same} of {len(IDS)} reference ids: {got}")


def check_served(result: dict[str, Any], experts: str, linears: str) -> None:
    """Every routed layer and every attention Linear of bard by int4_emu, in the given form."""
    served = result["served"]
    wanted = {
        f"RoutedExperts:Int4EmuMoEMethod:{experts}": 4,
        f"QKVParallelLinear:Int4EmuLinearMethod:{linears}": 4,
        f"RowParallelLinear:Int4EmuLinearMethod:{linears}": 4,
    }
    if any(served.get(k) != n for k, n in wanted.items()):
        raise Failure(f"expected {wanted} among the layers, got {served}")


def greedy() -> str:
    """bard's 76 ids with packed and with dequantised weights, and by name."""
    jobs = [
        bard_job("packed", weights="packed", quantization="int4_emu"),
        bard_job("dequantized", weights="dequantized", quantization="int4_emu"),
        bard_job("overriding"),
    ]
    (packed, dense, overriding), log = engine("greedy", jobs)
    for result in (packed, dense, overriding):
        check_ids(result)
    check_served(packed, "packed", "Int4Linear")
    check_served(dense, "dequantized", "Linear")
    if overriding["served"].get("RoutedExperts:Int4EmuMoEMethod:packed") != 4:
        raise Failure(f"int4_emu does not serve bard's experts: {overriding['served']}")
    line = "int4_emu serves RoutedExperts, since vLLM's own method refuses: No WNA16 MoE backend supports"
    if line not in log:
        raise Failure(f"the log has no line {line!r}\n{log[-3000:]}")
    return f"{len(IDS)} of {len(IDS)} ids: packed, dequantized, and without asking by name"


def compiled() -> str:
    """The same with torch.compile, both forms from one cache."""
    turns = ("packed", "dequantized", "packed")
    jobs = [
        bard_job(f"{turn}-{weights}", weights=weights, enforce_eager=False)
        for turn, weights in enumerate(turns)
    ]
    results, log = engine("compiled", jobs, VLLM_CACHE_ROOT=str(WORK / "cache"))
    for result in results:
        check_ids(result)
    for result, weights in zip(results, turns, strict=True):
        if result["served"].get(f"RoutedExperts:Int4EmuMoEMethod:{weights}") != 4:
            raise Failure(f"the experts are not {weights}: {result['served']}")
    if "AOT compiled function" not in log:
        raise Failure(f"the log speaks of no compiled function\n{log[-3000:]}")
    return f"{len(IDS)} of {len(IDS)} ids, packed, dequantized and packed again from one cache folder"


def parallel() -> str:
    """Two ranks: tensor parallel; tensor parallel with the experts spread."""
    options = {"tensor_parallel_size": 2, "quantization": "int4_emu"}
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    for name, more in (("tp2", {}), ("tp2-ep", {"enable_expert_parallel": True})):
        (result,), log = engine(name, [bard_job(name, **options, **more)], **bind)
        check_ids(result)
        if more and "Expert parallelism is enabled" not in log:
            raise Failure(f"the experts were not spread\n{log[-3000:]}")
    return f"{len(IDS)} of {len(IDS)} ids with 2 ranks, experts sliced and experts spread"


def perplexity() -> str:
    """bard's, over the reference's rows, from vLLM's own log-probabilities."""
    from tokenizers import Tokenizer

    text = (BARD / "reference" / "eval.txt").read_text()
    ids = Tokenizer.from_file(str(BARD / "tokenizer.json")).encode(text).ids
    rows = [ids[i * CONTEXT : (i + 1) * CONTEXT] for i in range(ROWS)]
    job = {"name": "perplexity", "llm": BARD_OPTIONS, "prompts": rows, "perplexity": True}
    (result,), _ = engine("perplexity", [job])
    if "error" in result:
        raise Failure(result["error"])
    total = math.fsum(value for row in result["own"] for value in row)
    value = math.exp(-total / (ROWS * (CONTEXT - 1)))
    want = REFERENCE["perplexity_val_16k_tokens"]
    if abs(value / want - 1) > 2e-4:
        raise Failure(f"perplexity must be {want:.3f} within 0.02 %, got {value:.4f}")
    return f"{value:.3f}, reference {want:.3f}"


# Two float32 engines that sum in another order; random weights make no routing tie at this size.
LOGPROB_BOUND = 1e-3


def expected_logprobs(path: Path) -> tuple[list[int], torch.Tensor]:
    """A checkpoint's input ids and the log-probabilities of int4_emu's own from_pretrained in float32."""
    import int4_emu

    ids = reference_tensors(path).get("input_ids", torch.arange(3, 27).unsqueeze(0))
    model = int4_emu.from_pretrained(path, dtype=torch.float32, progress=False)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float()
    return ids[0].tolist(), torch.log_softmax(logits, -1)


def here() -> Iterator[tuple[str, Path]]:
    for name in CHECKPOINT_NAMES:
        path = checkpoint_path(name)
        if path is not None:
            yield name, path


def checkpoint_job(path: Path, name: str, ids: list[int], vocabulary: int, **options: Any) -> dict[str, Any]:
    llm = {"model": str(path), "dtype": "float32", "max_model_len": 128, "max_logprobs": -1, **options}
    return {"name": name, "llm": llm, "prompts": [ids], "vocabulary": vocabulary}


def checkpoints() -> str:
    """Every checkpoint of other projects' tools by name, and one of each method without it: from_pretrained's log-probabilities.

    What vLLM accepts without being asked by name depends on the CPU, and is vLLM's then: those layers are not judged.
    """
    expected = {name: (path, *expected_logprobs(path)) for name, path in here()}
    jobs, names = [], []
    for name, (path, ids, want) in expected.items():
        jobs.append(checkpoint_job(path, name, ids, want.shape[1], quantization="int4_emu"))
        names.append(name)
    for method in ("autoround", "awq", "ct", "gptq", "quark"):
        for name in [n for n in expected if n.startswith(method)][:1]:
            path, ids, want = expected[name]
            jobs.append(checkpoint_job(path, f"{name}-unasked", ids, want.shape[1]))
            names.append(name)
    results, _ = engine("checkpoints", jobs, timeout=2400)
    worst = 0.0
    for name, job, result in zip(names, jobs, results, strict=True):
        if "error" in result:
            raise Failure(f"{job['name']}: {result['error']}")
        asked = "quantization" in job["llm"]
        ours = [k for k in result["served"] if k.startswith("RoutedExperts:Int4EmuMoEMethod")]
        if asked and not ours:
            raise Failure(f"{job['name']}: int4_emu serves no experts: {result['served']}")
        got = load_file(Path(result["folder"]) / f"{job['name']}.safetensors")["prompt.0"]
        error = float((got - expected[name][2][:-1]).abs().max())
        if asked or ours:
            worst = max(worst, error)
            if not error < LOGPROB_BOUND:
                raise Failure(f"{job['name']}: log-probabilities are off by {error:.1e}")
    missing = len(CHECKPOINT_NAMES) - len(expected)
    more = f"; {missing} are not here" if missing else ""
    return f"{len(expected)} checkpoints, largest error of a log-probability {worst:.1e}{more}"


def switched_off() -> str:
    """Without the plug-in vLLM's own error is back."""
    jobs = [bard_job("off"), bard_job("named", quantization="int4_emu")]
    (result, named), _ = engine("off", jobs, VLLM_PLUGINS="")
    if "No WNA16 MoE backend supports the deployment configuration" not in result.get("error", ""):
        raise Failure(f"expected vLLM's own refusal, got {result}")
    if "int4_emu" not in named.get("error", ""):
        raise Failure(f"expected vLLM not to know the method int4_emu, got {named}")
    return "VLLM_PLUGINS= gives vLLM's own error"


def emulation() -> str:
    """--moe-backend emulation: dequantised experts; a kernel of vLLM's own is not replaced in silence."""
    jobs = [
        bard_job("overriding", moe_backend="emulation"),
        bard_job("named", moe_backend="emulation", quantization="int4_emu"),
        bard_job("packed", moe_backend="emulation", weights="packed", quantization="int4_emu"),
        bard_job("kernel", moe_backend="marlin"),
        bard_job("kernel-named", moe_backend="marlin", quantization="int4_emu"),
    ]
    (overriding, named, packed, kernel, kernel_named), log = engine("emulation", jobs)
    for result in (overriding, named):
        check_ids(result)
        if result["served"].get("RoutedExperts:Int4EmuMoEMethod:dequantized") != 4:
            raise Failure(f"the experts are not dequantised: {result['served']}")
    for result, sentence in (
        (packed, "--moe-backend emulation contradicts"),
        (kernel, "WNA16 MoE backend 'MARLIN' does not support the deployment configuration"),
        (kernel_named, "--moe-backend marlin is a kernel of vLLM's own"),
    ):
        if sentence not in result.get("error", "") and sentence not in log:
            raise Failure(f"expected {sentence!r}, got {result}")
        if "error" not in result:
            raise Failure(f"expected {sentence!r}, and the model was served: {result['served']}")
    return "emulation gives dequantized experts; other kernels' refusals stand"


def two_claims() -> str:
    """Another plug-in that claims a name of ours, whichever comes first."""
    folder = WORK / "claims"
    info = folder / "other_plugin-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_plugin:register\n")
    (folder / "other_plugin.py").write_text(
        "def register():\n"
        "    from vllm.model_executor.layers.quantization import register_quantization_config\n"
        "    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig\n"
        "    register_quantization_config('gptq')(type('Theirs', (AutoGPTQConfig,), {}))\n"
    )
    (result,), log = engine("claims", [bard_job("claims")], PYTHONPATH=str(folder))
    sentence = "two plug-ins claim vLLM's quantization method 'gptq'"
    if "error" not in result or sentence not in result["error"] + log:
        raise Failure(f"expected {sentence!r}, got {result}\n{log[-3000:]}")
    (chosen,), _ = engine(
        "claims-chosen", [bard_job("chosen")], PYTHONPATH=str(folder), VLLM_PLUGINS="int4_emu"
    )
    check_ids(chosen)
    return "one sentence; VLLM_PLUGINS=int4_emu chooses"
