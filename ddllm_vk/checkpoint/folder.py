"""Which files of a folder hold the weights, and what to tell somebody whose path is not a model folder."""

import os
from pathlib import Path

from ..errors import CheckpointError
from .header import Entry, parse_json, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READ = (".json", ".jinja", ".safetensors")  # what is read if it lies in a model folder
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_MODEL_IS = "a model is a folder with config.json and safetensors weights"
_PICKLE = (
    "is a pickle file, which can execute code when it is read; such weights are refused. "
    "Use the model's safetensors weights"
)
_GGUF = "is a GGUF file, which is not supported yet; use the model's safetensors folder"


def check_folder(path: Path) -> None:
    """Raises CheckpointError, saying what `path` is and what is needed, unless it is a folder with a config.json."""
    try:
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist; {_MODEL_IS}")
        if not path.is_dir():
            raise CheckpointError(f"{path}: {_refuse_file(path)}")
        names = os.listdir(path)
        for name in names:
            if Path(name).suffix in _READ and not (path / name).is_file():
                raise CheckpointError(f"{path / name}: {_not_a_file(path / name)}")
        if "config.json" in names:
            return
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    suffixes = {Path(name).suffix for name in names}
    if ".safetensors" in suffixes:
        raise CheckpointError(f"{path}: has safetensors weights but no config.json; download it into the folder too")
    if ".gguf" in suffixes:
        raise CheckpointError(f"{path}: has no config.json, and the weights in it are GGUF, which is not supported yet")
    if path.name.startswith(".") and path.name.endswith(".partial"):
        raise CheckpointError(f"{path}: is an unfinished conversion; run the command that made it again to finish it")
    raise CheckpointError(f"{path}: is not a model folder (no config.json in it); {_MODEL_IS}")


def _not_a_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "is a link to a file that is not there; download the file again"
    if path.is_dir():
        return "is a folder, not a file; replace it by the model's own file"
    return "is not a regular file; replace it by the model's own"


def _refuse_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return _GGUF
    if path.suffix in PICKLES:
        return _PICKLE
    if path.suffix == ".safetensors":
        return "is a single weight file; give the folder it lies in"
    return f"is a file; {_MODEL_IS}"


def read_headers(path: Path) -> dict[str, tuple[Path, Entry]]:
    """Every tensor of the weights in a model folder: name -> its file and its entry there.

    Raises CheckpointError: no weights, only pickles, a shard or tensor that the index names is missing, a broken file.
    """
    # the order in which the reference looks
    if (path / SINGLE).exists():
        return {name: (path / SINGLE, entry) for name, entry in read_header(path / SINGLE).items()}
    index = path / INDEX
    if not index.exists():
        raise CheckpointError(_no_weights(path))
    return _read_shards(index)


def _no_weights(path: Path) -> str:
    names = sorted(os.listdir(path))
    if any(name.endswith(".safetensors") for name in names):
        return f"{path}: has safetensors files but neither {SINGLE} nor {INDEX}; download the index into the folder too"
    pickle = next((name for name in names if name.endswith(PICKLES)), None)
    if pickle is not None:
        return f"{path / pickle}: {_PICKLE}"
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf is not None:
        return f"{path / gguf}: {_GGUF}"
    return f"{path}: has no weights ({SINGLE} or {INDEX}); download them into the folder"


def _read_shards(index: Path) -> dict[str, tuple[Path, Entry]]:
    try:
        text = index.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{index}: cannot be read ({e.strerror})") from None
    weight_map = parse_json(text, index, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    found: dict[str, tuple[Path, Entry]] = {}
    shards = set()
    for name, shard in weight_map.items():
        # a shard name comes from a file that may be hostile: it must not lead out of the folder
        if (
            not isinstance(shard, str)
            or not shard.isprintable()
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise CheckpointError(f"{index}: {name!a} is said to be in {shard!a}, which is not a safetensors file name")
        shards.add(shard)
    for shard in sorted(shards):
        file = index.parent / shard
        if not file.exists():
            raise CheckpointError(f"{file}: {INDEX} names this shard, but it is not in the folder; download it")
        for name, entry in read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{file}: tensor {name} is also in {found[name][0].name}; download the model again"
                )
            found[name] = (file, entry)
    for name, shard in weight_map.items():
        if not name.isprintable():
            raise CheckpointError(f"{index}: a tensor has the malformed name {name!a}; download it again")
        if name not in found or found[name][0].name != shard:
            raise CheckpointError(f"{index.parent / shard}: tensor {name} is missing, though {INDEX} says it is there")
    return found
