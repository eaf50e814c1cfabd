"""Model folders that tests make and break: safetensors files taken apart and put together by hand."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).parent / "oracle"
WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "I64": 8}


@dataclass
class Tensors:
    """The tensors of a file: name -> [dtype, shape, bytes]."""

    by_name: dict[str, list[Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def oracle_folder(case: str) -> Path:
    return ORACLE / case / "checkpoint"


def copy_of(case: str, target: Path) -> Path:
    """A writable copy of an oracle case's checkpoint."""
    shutil.copytree(oracle_folder(case), target)
    for file in target.iterdir():
        file.chmod(0o644)
    target.chmod(0o755)
    return target


def read_tensors(file: Path) -> Tensors:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    return Tensors({n: [e["dtype"], e["shape"], body[slice(*e["data_offsets"])]] for n, e in header.items()}, metadata)


def write_tensors(file: Path, tensors: Tensors) -> None:
    entries: dict[str, Any] = {"__metadata__": tensors.metadata} if tensors.metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.by_name.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    write_raw(file, json.dumps(entries).encode(), b"".join(t[2] for t in tensors.by_name.values()))


def write_raw(file: Path, header: bytes, body: bytes = b"") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + body)


def write_sharded(folder: Path, tensors: Tensors, shards: int) -> None:
    """The same tensors in several files and an index, instead of model.safetensors."""
    names = list(tensors.by_name)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors.by_name[name] for name in names[i::shards]}
        write_tensors(folder / file, Tensors(part, tensors.metadata))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
