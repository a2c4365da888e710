"""`int4-emu inspect DIR`: what a checkpoint holds and who would run it, without reading its weights."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..errors import BackendError, CheckpointError
from ..layer_info import LayerInfo, ProjectionInfo
from ..oracle import select_backend
from ._arguments import add_reading_options, dtype_of, open_checkpoint
from ._console import console, print_pairs, ranges, say, size, table

HELP = "formats, sizes and backends of a checkpoint, layer by layer, without loading it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    parser.add_argument("dir", metavar="DIR", help="model folder: config.json and safetensors files")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--device", default="cpu", help="device to ask the backends about (default: cpu)")
    parser.add_argument(
        "--dtype", type=dtype_of, default=torch.bfloat16, help="compute dtype: bf16 (default), fp16, fp32"
    )
    add_reading_options(parser)


@dataclass(frozen=True)
class Service:
    """Who runs a layer in one mode: `selection` is a sentence, or None and then `refusal` says why."""

    backend: str | None
    selection: str | None
    refusal: str | None
    is_compiled: bool = False


def service(
    checkpoint: Checkpoint, layer: int, weights: str, dtype: torch.dtype, device: torch.device | str
) -> Service:
    """Asks the backends about one layer, as loading will."""
    try:
        config = checkpoint.moe_config(layer, weights=weights, dtype=dtype, device=device)
        found = select_backend(config, weights="packed" if weights == "packed" else "dequantized")
    except (CheckpointError, BackendError) as error:
        reason = (
            str(error)
            .removeprefix("weights='packed' is not possible since ")
            .removesuffix("; weights='dequantized' is")
        )
        return Service(None, None, reason)
    return Service(found.backend, str(found), None, found.implementation.is_compiled)


def main(args: argparse.Namespace) -> int:
    """Prints the tables or the JSON object."""
    checkpoint = open_checkpoint(args)
    infos = checkpoint.describe()
    served = {
        i.layer: {
            m: service(checkpoint, i.layer, m, args.dtype, args.device) for m in ("packed", "dequantized")
        }
        for i in infos
    }
    linears = Counter(
        (s.format.name, s.bits, s.group_size, s.symmetric, s.act_order)
        for s in checkpoint.quantized_linears().values()
    )
    if args.json:
        layers = [asdict(i) | {"backends": {m: asdict(s) for m, s in served[i.layer].items()}} for i in infos]
        names = ("format", "bits", "group_size", "symmetric", "act_order", "count")
        document = _summary(checkpoint) | {
            "layers": layers, "other_linears": [dict(zip(names, (*k, n), strict=True)) for k, n in linears.items()]
        }  # fmt: skip
        print(json.dumps(document, indent=1))
        return 0
    out = console()
    print_pairs(
        out,
        str(checkpoint.path),
        [(k.replace("_", " "), str(v)) for k, v in _summary(checkpoint).items() if v is not None],
    )
    out.print()
    print_layers(infos, served)
    if linears:
        say(out, "\nOther quantised Linears (attention, dense and shared MLPs)", "bold")
        rows = [(str(count), *_scheme_cells(*key)) for key, count in linears.items()]
        out.print(
            table(("count", "format", "bits", "group", "symmetric", "act-order"), rows, right=("count",))
        )
    return 0


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    files = {checkpoint.tensor_info(n).shard for n in checkpoint.tensor_names}
    infos = [checkpoint.tensor_info(n) for n in checkpoint.tensor_names]
    return {
        "path": str(checkpoint.path),
        "model_type": checkpoint.model.model_type or None,
        "architectures": ", ".join(checkpoint.config.get("architectures") or ()) or None,
        "quant_method": checkpoint.quantization.method if checkpoint.quantization else None,
        "moe_layers": len(checkpoint.moe_layers),
        "files": len(files),
        "tensors": len(infos),
        "bytes_on_disk": sum(i.nbytes for i in infos),
    }


def _scheme_cells(
    format: str, bits: int, group: int | None, symmetric: bool | None, act_order: bool
) -> tuple[str, ...]:
    groups = "-" if group is None else "channel" if group == -1 else str(group)
    return (format, str(bits), groups, _yes(symmetric), _yes(act_order))


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _activation(info: LayerInfo) -> str:
    given = [f"{n}={v:g}" for n in ("limit", "alpha", "beta") if (v := getattr(info, n)) is not None]
    return f"{info.activation}({', '.join(given)})" if given else info.activation


def _cells(projection: ProjectionInfo) -> tuple[str, ...]:
    p = projection
    return (
        "+".join(p.roles),
        *_scheme_cells(p.format, p.bits, p.group_size, p.symmetric, p.act_order),
        p.scales_dtype or "-",
    )


def print_layers(infos: list[LayerInfo], served: dict[int, dict[str, Service]]) -> None:
    """The table of the layers, then the reasons that do not fit into its cells."""
    out = console()
    columns = ("layer", "projections", "format", "bits", "group", "symmetric", "act-order", "scales", "activation", "experts",
               "H x I", "packed", "dequantised", "backend")  # fmt: skip
    rows = []
    for info in infos:
        packed, dense = served[info.layer]["packed"], served[info.layer]["dequantized"]
        experts = f"{info.num_experts}" + (f", top-{info.top_k}" if info.top_k else "")
        # What weights="auto" would do; the sentence stands below the table.
        if packed.backend and packed.is_compiled:
            backend = f"{packed.backend}, packed"
        else:
            backend = f"{dense.backend}, dequantised" if dense.backend else "none"
        tail = (_activation(info), experts, f"{info.hidden_size} x {info.intermediate_size}", size(info.packed_bytes),
                size(info.dequantized_bytes), backend)  # fmt: skip
        for index, projection in enumerate(info.projections):
            rows.append(
                (
                    str(info.layer) if index == 0 else "",
                    *_cells(projection),
                    *(tail if index == 0 else ("",) * len(tail)),
                )
            )
    out.print(table(columns, rows, right=("bits", "packed", "dequantised")))
    total_packed, total_dense = sum(i.packed_bytes for i in infos), sum(i.dequantized_bytes for i in infos)
    say(out, f"All experts: {size(total_packed)} packed, {size(total_dense)} dequantised to 16 bits\n")
    for mode in ("packed", "dequantized"):
        by_answer: dict[str, list[int]] = defaultdict(list)
        for info in infos:
            answer = served[info.layer][mode]
            by_answer[answer.selection or f"no: {answer.refusal}"].append(info.layer)
        for answer_text, layers in by_answer.items():
            say(out, f"{mode}, layer{'s' if len(layers) > 1 else ''} {ranges(layers)}: {answer_text}")
