"""`inspect`: what a model folder holds and what it needs in memory."""

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..cache import FORMATS
from .options import CountList, format_bytes
from .tables import print_table


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--context",
    "contexts",
    type=CountList(),
    default=[],
    help="Tokens to reckon memory for.  [default: 8192, or the model's limit]",
)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with every tensor if --tensors).")
def inspect(path: Path, contexts: list[int], tensors: bool, as_json: bool) -> None:
    """Show the config, tensors, formats and sizes of the model folder PATH, and the memory it needs."""
    from ..checkpoint.inspect import describe

    description = describe(path, contexts)
    if as_json:
        if not tensors:
            del description["tensors"]
        click.echo(json.dumps(description, indent=2))
        return
    for table in _tables(description, tensors):
        print_table(table)


def _tables(d: dict[str, Any], tensors: bool) -> list[Table]:
    tables = [_config(d), _layers(d), _groups(d), _memory(d), _kv_cache(d)]
    return [*tables, _every_tensor(d)] if tensors else tables


def _table(title: str, *columns: str, numbers: int = 0) -> Table:
    """A table whose last `numbers` columns are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        right = i >= len(columns) - numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="fold")
    return table


def _config(d: dict[str, Any]) -> Table:
    c = d["config"]
    table = _table(d["path"], "", "")
    table.show_header = False
    rows = {
        "hidden size": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "attention heads": c["num_attention_heads"],
        "dense MLP": c["intermediate_size"],
        "experts": f"{c['num_experts']} of width {c['moe_intermediate_size']}, top {c['top_k_experts']}",
        "vocabulary": c["vocab_size"],
        "canvas": f"{c['canvas_length']} tokens",
        "context": f"{c['max_position_embeddings']} tokens",
        "logit softcap": c["final_logit_softcapping"],
        "vision": "yes" if c["has_vision"] else "no",
        "denoising": "up to {max_denoising_steps} steps, temperature {t_max} to {t_min}, entropy bound "
        "{entropy_bound}".format(**d["generation"]),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _layers(d: dict[str, Any]) -> Table:
    table = _table("Layers", "kind", "rope", "count", "head_dim", "KV heads", "window", "theta", "rotated", numbers=6)
    for kind in d["config"]["layers"]:
        sliding = kind["layer_type"].startswith("sliding")
        table.add_row(
            kind["layer_type"],
            kind["rope_type"],
            str(kind["count"]),
            str(kind["head_dim"]),
            str(kind["num_key_value_heads"]),
            str(d["config"]["sliding_window"]) if sliding else "-",
            f"{kind['rope_theta']:g}",
            f"{kind['partial_rotary_factor']:.0%}",
        )
    return table


def _groups(d: dict[str, Any]) -> Table:
    files = f"{d['files']} file{'s' if d['files'] > 1 else ''}"
    table = _table(f"Tensors ({files})", "role", "format", "tensors", "parameters", "size", "bits a weight", numbers=4)
    for g in d["groups"]:
        bits = f"{8 * g['bytes'] / max(g['parameters'], 1):.2f}"
        table.add_row(g["role"], g["format"], str(g["tensors"]), f"{g['parameters']:,}", format_bytes(g["bytes"]), bits)
    table.add_row("total", "", str(len(d["tensors"])), f"{d['parameters']:,}", format_bytes(d["bytes"]), "")
    if d["ignored"]:
        table.add_row("tied copies, ignored", "", str(len(d["ignored"])), "", "", "")
    return table


def _memory(d: dict[str, Any]) -> Table:
    m = d["memory"]
    table = _table(f"Memory to run, {m['context']} tokens", "", "Q40", "float32", numbers=2)
    table.add_row("weights", format_bytes(m["weights_q40"]), format_bytes(m["weights_f32"]))
    rows = {
        "KV cache, sliding layers": "kv_sliding",
        "KV cache, full layers": "kv_full",
        "each further 1024 tokens": "kv_per_1k_tokens",
    }
    for label, key in rows.items():
        table.add_row(label, format_bytes(m[key]["f16"]), format_bytes(m[key]["f32"]))
    table.add_row("program and buffers (about)", format_bytes(m["working"]), format_bytes(m["working"]))
    table.add_row("total", format_bytes(m["total_q40"]), format_bytes(m["total_f32"]))
    return table


def _kv_cache(d: dict[str, Any]) -> Table:
    table = _table("KV cache of a session", "tokens", *FORMATS, numbers=1 + len(FORMATS))
    for row in d["memory"]["kv_cache"]:
        table.add_row(str(row["context"]), *(format_bytes(row[fmt]) for fmt in FORMATS))
    return table


def _every_tensor(d: dict[str, Any]) -> Table:
    table = _table("Every tensor", "name", "role", "format", "shape", "file", "size", numbers=1)
    for t in d["tensors"]:
        table.add_row(
            t["name"], t["role"], t["format"], "x".join(map(str, t["shape"])), t["file"], format_bytes(t["bytes"])
        )
    return table
