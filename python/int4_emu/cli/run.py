"""`int4-emu run [DIR]`: load a model, let it speak, measure its perplexity."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .._memory import anonymous_bytes
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..experts import Experts
from ..layer_info import LayerInfo
from ._arguments import dtype_name, dtype_of, positive
from ._console import console, print_pairs, ranges, say, size, table
from .inspect import service

HELP = "load a checkpoint, generate text, measure perplexity (without DIR: the embedded model)"

_DEFAULT_NEW_TOKENS = 96
# A stored perplexity is of the first whole rows of reference/eval.txt, up to this many tokens.
_REFERENCE_CONTEXT, _REFERENCE_ROWS = 256, 63
_REFERENCE_KEY = "perplexity_val_16k_tokens"
# Relative distance from the stored perplexity that rounding explains.
_PERPLEXITY_BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 3e-3, torch.float32: 2e-4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", help="model folder; default: a small model of Shakespeare's plays"
    )
    parser.add_argument(
        "--prompt", help="text to continue, or token ids (1 2 3) for a model without a tokenizer"
    )
    parser.add_argument("--weights", choices=("auto", "packed", "dequantized"), default="auto",
                        help="how to hold the weights (default: auto)")  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help=f"default: {_DEFAULT_NEW_TOKENS}"
    )
    parser.add_argument("--dtype", type=dtype_of, default=torch.bfloat16, help="bf16 (default), fp16 or fp32")
    parser.add_argument("--device", help="default: cpu")
    parser.add_argument(
        "--perplexity",
        metavar="FILE",
        help="measure on this text; default: the model's own eval.txt, if it has one",
    )
    parser.add_argument("--no-perplexity", action="store_true", help="do not measure it")
    parser.add_argument(
        "--context",
        type=positive,
        default=_REFERENCE_CONTEXT,
        help="tokens in a row of the perplexity (default: 256)",
    )
    parser.add_argument(
        "--lenient", action="store_true", help="ignore unknown tensors and non-finite scales with a warning"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the model; status 1 where its perplexity is not the stored one."""
    if args.perplexity is not None and args.no_perplexity:
        raise ValueError("give --perplexity or --no-perplexity, not both")
    with _folder(args.dir) as folder:
        return _run(args, folder)


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given)
        return
    with as_file(files("int4_emu") / "data" / "bard") as bard:
        yield bard


def _run(args: argparse.Namespace, folder: Path) -> int:
    out = console()
    # Everything that can be refused is looked at before the model is loaded.
    checkpoint = Checkpoint(folder, strict=not args.lenient)
    infos = checkpoint.describe()
    text_file = _perplexity_file(args, folder)
    text = None if text_file is None else _read_text(text_file)
    print_pairs(
        out, str(folder) if args.dir else "the embedded model (no DIR given)", _found(checkpoint, infos)
    )
    tokenizer = _load_tokenizer(folder)
    if text is not None and tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, which --perplexity needs")

    ids = None if tokenizer is not None else _prompt_ids(args.prompt, folder, checkpoint)
    from_pretrained = _import_loader(checkpoint)
    before, start = anonymous_bytes(), time.perf_counter()
    model = from_pretrained(folder, weights=args.weights, dtype=args.dtype, device=args.device, strict=not args.lenient,
                            progress=console(stderr=True).is_terminal)  # fmt: skip
    seconds, measured = time.perf_counter() - start, anonymous_bytes() - before
    out.print()
    _print_backends(out, checkpoint, infos, model, args)
    print_memory(out, checkpoint, infos, model, args.dtype, measured)
    say(out, f"loaded in {seconds:.2f} s\n")
    _speak(out, args, model, tokenizer, ids)
    if text is None:
        return 0
    return _perplexity(out, args, folder, model, tokenizer, text, text_file)


def _import_loader(checkpoint: Checkpoint) -> Callable[..., Any]:
    """`from_pretrained`, with the imports done that would count as loading time and memory."""
    from ..integrations.transformers import _import_transformers, from_pretrained

    transformers = _import_transformers()
    from ..integrations import _hf_quantizer  # noqa: F401

    for name in checkpoint.config.get("architectures") or ():
        getattr(transformers, name, None)
    return from_pretrained


def _found(checkpoint: Checkpoint, infos: list[LayerInfo]) -> list[tuple[str, str]]:
    ways: dict[str, list[int]] = defaultdict(list)
    for info in infos:
        told = []
        for p in info.projections:
            group = (
                "" if p.group_size is None else " per-channel" if p.group_size == -1 else f" g{p.group_size}"
            )
            kind = "" if p.symmetric is None else " symmetric" if p.symmetric else " asymmetric"
            told.append(
                f"{'+'.join(p.roles)} {p.format} {p.bits}-bit{group}{kind}{' act-order' if p.act_order else ''}"
            )
        shape = f"{info.num_experts} experts" + (f", top-{info.top_k}" if info.top_k else "")
        ways[
            f"{shape}, hidden {info.hidden_size}, intermediate {info.intermediate_size}, {info.activation}; {'; '.join(told)}"
        ].append(info.layer)
    lines = [
        (
            "model",
            f"{checkpoint.model.model_type}, {checkpoint.quantization.method if checkpoint.quantization else 'not quantised'}",
        )
    ]
    return lines + [
        (f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}", way) for way, layers in ways.items()
    ]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _perplexity_file(args: argparse.Namespace, folder: Path) -> Path | None:
    if args.no_perplexity:
        return None
    if args.perplexity is not None:
        return Path(args.perplexity)
    own = folder / "reference" / "eval.txt"
    return own if own.is_file() else None


def _load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, None where the folder has none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    from ..integrations.transformers import _import_transformers

    transformers = _import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _print_backends(
    out: Console, checkpoint: Checkpoint, infos: list[LayerInfo], model: Any, args: argparse.Namespace
) -> None:
    """Which backend runs which layers, and why."""
    loaded = [m for m in model.modules() if isinstance(m, Experts)]
    sentences: dict[str, list[int]] = defaultdict(list)
    for info, experts in zip(infos, loaded, strict=True):
        why = f"--weights {args.weights}" if args.weights != "auto" else "a compiled backend serves it packed"
        if args.weights == "auto" and not experts.is_packed:
            packed = service(checkpoint, info.layer, "packed", args.dtype, args.device or "cpu")
            why = f"not packed since {packed.refusal or 'no compiled backend serves it'}"
        sentences[f"{experts.selection} [{why}]"].append(info.layer)
    for sentence, layers in sentences.items():
        say(out, f"backend, layer{'s' if len(layers) > 1 else ''} {ranges(layers)}: {sentence}")


@dataclass(frozen=True)
class _Bytes:
    packed: int
    dense: int


def _linear_bytes(checkpoint: Checkpoint, itemsize: int) -> _Bytes:
    """The quantised Linears beside the experts in both forms."""
    packed = dense = 0
    for module, scheme in checkpoint.quantized_linears().items():
        rows, columns = checkpoint.linear_shape(module)
        groups = 1 if scheme.group_size == -1 else -(-columns // scheme.group_size)
        packed += rows * columns * scheme.bits // 8 + rows * groups * (2 if scheme.symmetric else 3)
        dense += rows * columns * itemsize
    return _Bytes(packed, dense)


def print_memory(
    out: Console,
    checkpoint: Checkpoint,
    infos: list[LayerInfo],
    model: Any,
    dtype: torch.dtype,
    measured: int,
) -> None:
    """Sizes in both modes: of the one in use as it is held and measured, of the other computed from its shapes."""
    held = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    loaded = [m for m in model.modules() if isinstance(m, Experts)]
    inside = sum(p.numel() * p.element_size() for m in loaded for p in m.parameters())
    linears = _linear_bytes(checkpoint, dtype.itemsize)
    packed = _Bytes(sum(i.packed_bytes for i in infos), 0).packed
    dense = sum(i.dequantized_bytes for i in infos) // 2 * dtype.itemsize
    is_packed = any(m.is_packed for m in loaded)
    rest = sum(held.values()) - inside - (linears.packed if is_packed else linears.dense)
    rows = []
    for name, experts, others, used in (
        ("packed", packed, linears.packed, is_packed),
        ("dequantized", dense, linears.dense, not is_packed),
    ):
        total = sum(held.values()) if used else experts + others + rest
        told = f"measured: {size(measured)} more than before" if used else "computed"
        rows.append((name, size(inside if used else experts), size(total), told))
    out.print(table(("weights", "experts", "whole model", ""), rows, right=("experts", "whole model")))


def _speak(out: Console, args: argparse.Namespace, model: Any, tokenizer: Any, ids: list[int] | None) -> None:
    """Streams the continuation; a model without a tokenizer speaks in ids."""
    from ..generation import check_length, greedy_ids, stream_text

    if ids is not None:
        count, prompt = len(ids), f"ids {' '.join(map(str, ids))} ->"
    else:
        prompt = args.prompt
        if prompt is None:
            prompt = "ROMEO.\nBut soft, what light" if args.dir is None else "The"
        count = len(tokenizer(prompt)["input_ids"])
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new = args.max_new_tokens or min(_DEFAULT_NEW_TOKENS, max(1, (positions or 1 << 30) - count))
    check_length(model, count, new)  # before the prompt is printed
    forwards: list[float] = []
    hook = model.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
    if ids is not None:
        pieces: Iterator[str] = (f" {i}" for i in greedy_ids(model, ids, max_new_tokens=new))
    else:
        pieces = stream_text(model, tokenizer, prompt, max_new_tokens=new)
    start = time.perf_counter()
    try:
        # Text of a model is no markup and must not be folded: written as it is, piece by piece.
        out.file.write(prompt)
        for piece in pieces:
            out.file.write(piece)
            out.file.flush()
    finally:
        hook.remove()
        out.file.write("\n")
    if not forwards:
        return
    first, rest = forwards[0] - start, forwards[-1] - forwards[0]
    speed = f", then {(len(forwards) - 1) / rest:.1f} tokens/s" if len(forwards) > 1 and rest > 0 else ""
    say(out, f"\n{len(forwards)} tokens; the first after {first:.2f} s ({count} prompt tokens){speed}")


def _prompt_ids(prompt: str | None, folder: Path, checkpoint: Checkpoint) -> list[int]:
    """Ids that were given, those of the checkpoint's stored reference, or the one that begins a text."""
    config = checkpoint.model.config
    vocabulary = config.get("vocab_size", 1 << 31)
    if prompt is not None:
        try:
            ids = [int(part) for part in prompt.replace(",", " ").split()]
        except ValueError:
            raise ValueError(
                f"--prompt must be token ids like '1 2 3' since {folder} has no tokenizer, got {prompt!r}"
            ) from None
        if not ids or any(not 0 <= i < vocabulary for i in ids):
            raise ValueError(f"--prompt must be token ids from 0 to {vocabulary - 1}, got {prompt!r}")
        return ids
    stored = folder / "reference" / "reference.safetensors"
    if stored.is_file():
        from safetensors import safe_open

        with safe_open(str(stored), "pt") as file:
            if "input_ids" in file.keys():  # noqa: SIM118  (not a mapping)
                return [int(i) for i in file.get_tensor("input_ids").flatten()[:8]]
    first = config.get("bos_token_id")
    return [first if isinstance(first, int) else 0]


def _perplexity(
    out: Console,
    args: argparse.Namespace,
    folder: Path,
    model: Any,
    tokenizer: Any,
    text: str,
    path: Path | None,
) -> int:
    from ..generation import perplexity

    reference = _stored_perplexity(args, folder, path)
    start = time.perf_counter()
    found = perplexity(
        model, tokenizer, text, context=args.context, max_rows=None if reference is None else _REFERENCE_ROWS
    )
    seconds = time.perf_counter() - start
    tokens = found.rows * found.context
    name = path if args.perplexity else "its eval.txt"
    told = (
        f"perplexity {found.value:.3f} over {found.rows} rows of {found.context} tokens of {name}, "
        f"{tokens / seconds:.0f} tokens/s"
    )
    if reference is None:
        say(out, told)
        return 0
    distance, bound = found.value / reference - 1, _PERPLEXITY_BOUNDS[args.dtype]
    say(
        out,
        f"{told}\nstored reference {reference:.3f}: {distance:+.3%}, bound {bound:.2%} in {dtype_name(args.dtype)}",
    )
    if abs(distance) <= bound:
        return 0
    say(
        out,
        "FAILED: the perplexity is not the stored one; int4-emu selftest shows which part computes wrong numbers",
        "bold red",
    )
    return 1


def _stored_perplexity(args: argparse.Namespace, folder: Path, path: Path | None) -> float | None:
    """The checkpoint's own figure, where it is of this text and this context."""
    own, record = folder / "reference" / "eval.txt", folder / "reference" / "reference.json"
    if (
        path is None
        or not own.is_file()
        or not record.is_file()
        or args.context != _REFERENCE_CONTEXT
        or not path.samefile(own)
    ):
        return None
    try:
        value = json.loads(record.read_text(encoding="utf-8")).get(_REFERENCE_KEY)
    except (ValueError, AttributeError):
        raise CheckpointError(f"{record} is not a JSON object") from None
    return float(value) if isinstance(value, (int, float)) else None
