"""`devices`: every Vulkan device and the CPU, what they can do, and what would be used."""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import click
import psutil
from rich.table import Table

from ..errors import GpuError
from .options import format_bytes
from .tables import print_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes in bytes.")
def devices(as_json: bool) -> None:
    """Show the CPU and every Vulkan device: memory, limits, features, and the runtime that would be used.

    A Vulkan device is tried once in a process of its own, which takes a few seconds; the result is kept.
    """
    description = {"cpu": describe_cpu(), "vulkan": describe_vulkan()}
    if as_json:
        click.echo(json.dumps(description, indent=2))
        return
    print_table(_cpu_table(description["cpu"]))
    for device in description["vulkan"]["devices"]:
        click.echo()
        print_table(_device_table(device))
    click.echo()
    click.echo(_conclusion(description["vulkan"]))


def describe_cpu() -> dict[str, Any]:
    """Cores, memory, and the instruction sets of the compiled kernels: in use, available, and what others lack."""
    from ..cpu import isa
    from ..cpu.threads import default_threads

    features = isa.target_features()
    memory = psutil.virtual_memory()
    return {
        "name": _cpu_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "threads": psutil.cpu_count() or 1,
        "allowed_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "default_threads": default_threads(),
        "memory": memory.total,
        "memory_available": memory.available,
        "isa": isa.ACTIVE.name,
        "isas": [{"name": i.name, "missing": sorted(i.missing(features))} for i in isa.ISAS.values()],
    }


def _cpu_name() -> str:
    """As the kernel calls it; boards without a model name give their own."""
    for file, key in (("/proc/cpuinfo", "model name"), ("/proc/cpuinfo", "Model")):
        try:
            for line in Path(file).read_text(errors="replace").splitlines():
                name, _, value = line.partition(":")
                if name.strip() == key and value.strip():
                    return value.strip()
        except OSError:
            break
    return platform.processor() or platform.machine()


def describe_vulkan() -> dict[str, Any]:
    """Every Vulkan device with the verdict on each runtime, or why there is none. "default": the index that is used
    when none is named, or None."""
    from ..gpu.choice import RUNTIMES, best
    from ..gpu.devices import list_devices, pick
    from ..gpu.selftest import check_drivers, judge

    try:
        check_drivers()
        found = list_devices()
    except GpuError as e:
        return {"devices": [], "default": None, "reason": str(e)}
    described = []
    for device in found:
        verdicts = {name: judge(device, name) for name in RUNTIMES}
        try:
            runtime, reason = best(device, verdicts), ""
        except GpuError as e:
            runtime, reason = None, str(e)
        described.append(
            {
                **dataclasses.asdict(device),
                "features": sorted(device.features),
                "memory": device.memory,
                "largest_buffer": device.largest_buffer,
                "runtime": runtime,
                "reason": reason,
                "runtimes": {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()},
            }
        )
    try:
        return {"devices": described, "default": pick(found, None).index, "reason": ""}
    except GpuError as e:
        return {"devices": described, "default": None, "reason": str(e)}


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _cpu_table(cpu: dict[str, Any]) -> Table:
    sets = [i["name"] if not i["missing"] else f"{i['name']} (lacks {', '.join(i['missing'])})" for i in cpu["isas"]]
    return _table(
        f"CPU: {cpu['name']}",
        {
            "cores": f"{cpu['cores']}, {cpu['threads']} threads, {cpu['default_threads']} used",
            "memory": f"{format_bytes(cpu['memory'])}, {format_bytes(cpu['memory_available'])} available",
            "instruction set": f"{cpu['isa']} in use",
            "instruction sets": "\n".join(sets),
        },
    )


def _device_table(d: dict[str, Any]) -> Table:
    def heap(h: dict[str, Any]) -> str:
        free = f", {format_bytes(h['free'])} free" if h["free"] is not None else ""
        return f"{format_bytes(h['nbytes'])}{' on the device' if h['device_local'] else ''}{free}"

    def by(sizes: Any) -> str:
        return " x ".join(map(str, sizes))

    rows = {
        "type": "cpu: a software device, for tests" if d["type"] == "cpu" else d["type"],
        "memory": format_bytes(d["memory"]) + (" (the host's)" if d["type"] in ("cpu", "integrated") else ""),
        "heaps": "; ".join(map(heap, d["heaps"])),
        "largest buffer": format_bytes(d["largest_buffer"]),
        "shared memory": f"{format_bytes(d['max_shared_memory'])} a workgroup",
        "workgroup": f"{d['max_invocations']} invocations, {by(d['max_workgroup_size'])}",
        "workgroups": by(d["max_workgroups"]),
        "push constants": format_bytes(d["max_push_constants"]),
        "subgroup": f"{d['subgroup_size']} invocations",
        "features": ", ".join(f for f in d["features"] if not f.startswith("subgroup_")) or "none",
        "subgroup features": ", ".join(f.removeprefix("subgroup_") for f in d["features"] if f.startswith("subgroup_")),
        "Vulkan": f"{d['api_version']}, {d['driver'] or 'driver'} ({d['driver_version']})",
        "UUID": d["uuid"],
        "runtime": d["runtime"] or "none",
    }
    for name, verdict in d["runtimes"].items():
        timed = f"works, {verdict['seconds'] / 200 * 1e6:.0f} µs a dispatch"
        rows[f"  {name}"] = timed if verdict["usable"] else verdict["reason"]
    return _table(f"Vulkan device {d['index']}: {d['name']}", rows)


def _conclusion(vulkan: dict[str, Any]) -> str:
    if vulkan["default"] is not None:
        return f"Used unless another is named: Vulkan device {vulkan['default']}"
    return f"Used unless a device is named: the CPU; {vulkan['reason']}"
