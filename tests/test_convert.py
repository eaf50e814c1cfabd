"""Conversion: exact blocks, streaming, resuming after a kill at any moment, and nothing half-written after an error."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from checkpoint_files import copy_of, oracle_folder, read_tensors, write_sharded, write_tensors
from click.testing import CliRunner
from safetensors import safe_open

from ddllm_vk import quants
from ddllm_vk.checkpoint import convert as convert_module
from ddllm_vk.checkpoint import expected_tensors, open_checkpoint, quantizer, staging, writer
from ddllm_vk.checkpoint.convert import convert
from ddllm_vk.checkpoint.writer import Progress
from ddllm_vk.cli.convert import convert as command
from ddllm_vk.errors import CheckpointError, ConfigError, DdllmError, InputError

SOURCE = oracle_folder("case_2_long_prompt")
Q_PROJ = "model.decoder.layers.0.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def assert_nothing_is_there(target: Path) -> None:
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}*"))


# What is written


@pytest.mark.parametrize("case", ["case_1_base", "case_5_image"])
@pytest.mark.parametrize("embedding", ["q80", "q40", "f16"])
def test_values_are_the_quantised_source(tmp_path: Path, case: str, embedding: str) -> None:
    done = convert(oracle_folder(case), tmp_path / "out", embedding=embedding)
    formats = {"matrix": "q40", "embedding": embedding, "float": "f32"}
    with open_checkpoint(oracle_folder(case)) as source, open_checkpoint(tmp_path / "out") as target:
        for name, tensor in target.tensors.items():
            assert tensor.role is not None
            assert tensor.format == formats[tensor.role]
            expected = quants.quantize(tensor.format, source.tensors[name].float32())
            np.testing.assert_array_equal(tensor.raw(), expected)
            np.testing.assert_array_equal(tensor.float32(), quants.dequantize(tensor.format, expected))
        assert set(target.vision) == set(source.vision)
        for name, tensor in target.vision.items():
            assert tensor.format == source.vision[name].format
            np.testing.assert_array_equal(tensor.raw(), source.vision[name].raw())
        assert done.kept == ()
        assert target.config == source.config
        assert target.generation_defaults == source.generation_defaults


def test_small_files_come_along_as_they_are(tmp_path: Path) -> None:
    source = copy_of("case_5_image", tmp_path / "in")
    (source / "training_args.py").write_text("not part of a model")
    convert(source, tmp_path / "out")
    texts = {p.name: p.read_bytes() for p in oracle_folder("case_5_image").iterdir() if p.name != WEIGHTS}
    found = contents(tmp_path / "out")
    assert {name: found[name] for name in texts} == texts
    assert set(found) == {*texts, WEIGHTS}


def test_any_safetensors_reader_reads_the_blocks(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "out")
    file = tmp_path / "out" / WEIGHTS
    with open_checkpoint(tmp_path / "out") as c, safe_open(file, "np") as f:
        np.testing.assert_array_equal(f.get_tensor(Q_PROJ), c.tensors[Q_PROJ].raw())
        assert json.loads(f.metadata()["ddllm_vk.quantized"])[Q_PROJ] == {"format": "q40", "shape": [128, 64]}
        assert f.metadata()["ddllm_vk.format_version"] == "1"
        for tensor in c.tensors.values():
            assert tensor.start % {"f32": 4}.get(tensor.format, 1) == 0
    assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0


def test_shards_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(SOURCE, tmp_path / "one")
    monkeypatch.setattr(writer, "SHARD_BYTES", 200_000)
    done = convert(SOURCE, tmp_path / "many")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) == done.shards > 1
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(f.stat().st_size <= 200_000 for f in files)
    with open_checkpoint(tmp_path / "one") as one, open_checkpoint(tmp_path / "many") as many:
        for name, tensor in one.tensors.items():
            np.testing.assert_array_equal(tensor.raw(), many.tensors[name].raw())


def test_sharded_source_gives_the_same(tmp_path: Path) -> None:
    source = copy_of("case_2_long_prompt", tmp_path / "in")
    write_sharded(source, read_tensors(source / WEIGHTS), 3)
    convert(source, tmp_path / "sharded")
    convert(SOURCE, tmp_path / "single")
    assert contents(tmp_path / "sharded") == contents(tmp_path / "single")


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_threads_do_not_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    convert(SOURCE, tmp_path / "whole")
    monkeypatch.setattr(convert_module, "PIECE_BYTES", 5000)
    convert(SOURCE, tmp_path / "pieces", threads=threads)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_compiled_kernel_gives_the_same_bytes() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 96), dtype=np.float32) * np.float32(10.0) ** rng.integers(-3, 3, (500, 1))
    x[3] = 0
    x[4, :32] = -0.0
    x[5, ::2], x[5, 1::2] = 1.5, -1.5  # which of the equally large ones decides the sign is fixed
    x[6, ::2], x[6, 1::2] = -1.5, 1.5
    x = x.astype(np.float32)
    np.testing.assert_array_equal(quantizer.quantize("q40", x, compiled=True), quants.quantize_q40(x))


def test_matrices_without_whole_blocks_stay_as_stored(tmp_path: Path) -> None:
    source = copy_of("case_2_long_prompt", tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 24
    (source / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(source / WEIGHTS)
    for i in range(6):
        for name, shape in (("gate_up_proj", [8, 48, 64]), ("down_proj", [8, 64, 24])):
            data = np.full(shape, 0x3F80 + i, "<u2").tobytes()
            tensors.by_name[f"model.decoder.layers.{i}.experts.{name}"] = ["BF16", shape, data]
    write_tensors(source / WEIGHTS, tensors)
    done = convert(source, tmp_path / "out")
    assert set(done.kept) == {f"model.decoder.layers.{i}.experts.down_proj" for i in range(6)}
    with open_checkpoint(tmp_path / "out") as c:
        assert {c.tensors[name].format for name in done.kept} == {"bf16"}
        assert c.tensors["model.decoder.layers.0.experts.gate_up_proj"].format == "q40"
    result = CliRunner().invoke(command, [str(source), str(tmp_path / "again")])
    assert "left as stored (rows are not a multiple of 32): 6 tensors" in result.output


def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 64 MB, in a file without blocks on the disk, passes through far less memory."""
    monkeypatch.setattr(convert_module, "PIECE_BYTES", 1 << 20)
    source = copy_of("case_2_long_prompt", tmp_path / "in")
    tensors = read_tensors(source / WEIGHTS)
    size = 64 << 20
    write_tensors(source / WEIGHTS, tensors)
    data = (source / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    at = len(data) - 8 - length
    big = {"dtype": "F32", "shape": [256, size // 1024], "data_offsets": [at, at + size]}
    text = json.dumps(header | {"model.encoder.vision_tower.big": big}).encode()
    (source / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    os.truncate(source / WEIGHTS, 8 + len(text) + at + size)
    process, peak = psutil.Process(), []
    before = process.memory_info().rss
    convert(source, tmp_path / "out", progress=lambda _: peak.append(process.memory_info().rss))
    assert max(peak) - before < 32e6


def test_progress_counts_tensors_and_bytes(tmp_path: Path) -> None:
    events: list[Progress] = []
    done = convert(SOURCE, tmp_path / "out", progress=events.append)
    writes = [e for e in events if e.phase == "write"]
    assert (writes[0].tensors, writes[0].bytes) == (0, 0)
    assert writes[-1].tensors == writes[-1].tensors_total
    assert writes[-1].bytes == writes[-1].bytes_total == done.source_bytes
    assert [e.bytes for e in writes] == sorted(e.bytes for e in writes)
    assert events[-1].phase == "verify"
    assert events[-1].bytes == events[-1].bytes_total


# Interruption

KILLED = """
import os, signal, sys
from ddllm_vk.checkpoint import convert, staging, writer
convert_module = convert
source, target, moment = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
phase, _, count = moment.partition(":")
writer.SHARD_BYTES = 200_000
convert_module.PIECE_BYTES = 5000
if phase == "rename":
    os.rename = die
if phase == "renamed":
    staging.Staging.discard = die
seen = 0
def progress(p):
    global seen
    if p.phase == phase:
        seen += 1
        if seen == int(count):
            die()
convert_module.convert(source, target, progress=progress)
"""


def run_killed(target: Path, moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(SOURCE), str(target), moment], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def assert_no_model_in(folder: Path) -> None:
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        with pytest.raises(DdllmError):
            open_checkpoint(path)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of KILLED."""
    monkeypatch.setattr(writer, "SHARD_BYTES", 200_000)
    monkeypatch.setattr(convert_module, "PIECE_BYTES", 5000)


@pytest.mark.usefixtures("in_pieces")
def test_killed_again_and_again_then_finished(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "one_go" / "out")
    target = tmp_path / "killed" / "out"
    for moment in ("write:1", "write:50", "write:77", "write:120", "verify:3", "verify:150"):
        run_killed(target, moment)
        assert not target.exists()
        assert_no_model_in(target.parent)
    done = convert(SOURCE, target)
    assert done.resumed > 100
    assert not done.restarted
    assert contents(target) == contents(tmp_path / "one_go" / "out")
    assert [p.name for p in target.parent.iterdir()] == ["out"]


@pytest.mark.usefixtures("in_pieces")
def test_killed_around_the_rename(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "one_go")
    run_killed(tmp_path / "out", "rename:0")
    assert not (tmp_path / "out").exists()
    run_killed(tmp_path / "out", "renamed:0")
    assert contents(tmp_path / "out") == contents(tmp_path / "one_go")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(SOURCE, tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


def test_killed_at_any_time(tmp_path: Path) -> None:
    """The clock decides: at start-up, while writing, when it is all over."""
    code = "import sys; from ddllm_vk.checkpoint.convert import convert; convert(*sys.argv[1:])"
    for i, seconds in enumerate((0.35, 0.5, 0.7)):
        target = tmp_path / str(i) / "out"
        child = subprocess.Popen([sys.executable, "-c", code, str(SOURCE), str(target)], stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        child.kill()
        child.wait()
        if target.exists():
            open_checkpoint(target).check_finite()
        else:
            convert(SOURCE, target)
        assert [p.name for p in target.parent.iterdir()] == ["out"]


def interrupted(target: Path, source: Path = SOURCE, embedding: str = "q80") -> None:
    """A conversion stopped by Ctrl-C on the way."""
    seen = 0

    def stop(_: Progress) -> None:
        nonlocal seen
        seen += 1
        if seen == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=stop, embedding=embedding)


def test_interrupted_run_is_continued(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = convert(SOURCE, tmp_path / "out")
    assert done.resumed > 0


def test_other_options_start_over(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", embedding="q40")
    done = convert(SOURCE, tmp_path / "out", embedding="q80")
    assert done.restarted
    assert done.resumed == 0


def test_a_changed_source_starts_over(tmp_path: Path) -> None:
    source = copy_of("case_2_long_prompt", tmp_path / "in")
    interrupted(tmp_path / "out", source=source)
    tensors = read_tensors(source / WEIGHTS)
    tensors.by_name[Q_PROJ][2] = np.full(128 * 64, 0x3F80, "<u2").tobytes()
    write_tensors(source / WEIGHTS, tensors)
    done = convert(source, tmp_path / "out")
    assert done.restarted
    convert(source, tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_what_a_power_cut_lost_is_written_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    file = tmp_path / ".out.partial" / "model" / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-5000:] = bytes(5000)
    file.write_bytes(data)
    with open(tmp_path / ".out.partial" / "journal.jsonl", "a") as f:
        f.write('{"tensor": "model.deco')  # a line cut in half
    convert(SOURCE, tmp_path / "out")
    convert(SOURCE, tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_disk_that_lies_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writer._write_at

    def flip(fd: int, data: bytes | memoryview, at: int) -> None:
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1 if at else 0
        write(fd, bytes(damaged), at)

    monkeypatch.setattr(writer, "_write_at", flip)
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(SOURCE, tmp_path / "out")
    assert_nothing_is_there(tmp_path / "out")


def test_two_at_once(tmp_path: Path) -> None:
    messages = []

    def second(_: Progress) -> None:
        if not messages:
            with pytest.raises(CheckpointError) as e:
                convert(SOURCE, tmp_path / "out")
            messages.append(str(e.value))

    convert(SOURCE, tmp_path / "out", progress=second)
    assert "another process is writing this model" in messages[0]
    open_checkpoint(tmp_path / "out").close()


# Errors leave nothing


def test_target_exists(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists already; remove it or choose another"):
            convert(SOURCE, tmp_path / name)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "out"]


def test_empty_target_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(SOURCE, tmp_path / "out")
    open_checkpoint(tmp_path / "out").close()


@pytest.mark.parametrize("target", ["/proc/nowhere/out", "/dev/null/out"])
def test_unwritable_target(target: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(SOURCE, target)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_target_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(SOURCE, tmp_path / "out")


def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="is in the way"):
        convert(SOURCE, tmp_path / "out")
    assert (tmp_path / ".out.partial" / "precious").exists()


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(CheckpointError, match=r"out: needs 0\.4\d MB more, but only 0\.10 MB are free on that disk"):
        convert(SOURCE, tmp_path / "out")
    assert_nothing_is_there(tmp_path / "out")


def test_disk_full_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, at: int) -> int:
        if at > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(CheckpointError, match="out: the disk is full; free some space"):
        convert(SOURCE, tmp_path / "out")
    assert_nothing_is_there(tmp_path / "out")


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    """A failure of the real system call: the process may not write files over 100,000 bytes."""
    code = textwrap.dedent("""
        import sys
        from ddllm_vk.checkpoint.convert import convert
        from ddllm_vk.errors import CheckpointError
        try:
            convert(*sys.argv[1:])
        except CheckpointError as e:
            print(e)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(SOURCE), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert "out: the file would be larger than this system allows" in done.stdout, done.stderr
    assert_nothing_is_there(tmp_path / "out")


@pytest.mark.parametrize(("value", "says"), [(np.nan, "NaN"), (np.inf, "NaN"), (1e30, "too large for q40")])
def test_weights_that_cannot_be_quantised(tmp_path: Path, value: float, says: str) -> None:
    source = copy_of("case_1_base", tmp_path / "in")
    tensors = read_tensors(source / WEIGHTS)
    x = np.frombuffer(tensors.by_name[Q_PROJ][2], "<f4").copy()
    x[777] = value
    tensors.by_name[Q_PROJ][2] = x.tobytes()
    write_tensors(source / WEIGHTS, tensors)
    with pytest.raises(CheckpointError) as e:
        convert(source, tmp_path / "out")
    assert f"{source / WEIGHTS}: tensor {Q_PROJ}" in str(e.value)
    assert says in str(e.value)
    assert_nothing_is_there(tmp_path / "out")


def test_a_bad_source_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source = copy_of("case_2_long_prompt", tmp_path / "in")
    os.truncate(source / WEIGHTS, 500_000)
    with pytest.raises(CheckpointError, match="is truncated"):
        convert(source, tmp_path / "out")
    (source / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        convert(source, tmp_path / "out")
    assert_nothing_is_there(tmp_path / "out")


def test_a_converted_source_is_refused(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "once")
    with pytest.raises(CheckpointError, match="once: is converted already"):
        convert(tmp_path / "once", tmp_path / "twice")
    assert_nothing_is_there(tmp_path / "twice")


def test_unknown_embedding_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="q80, q40, f16"):
        convert(SOURCE, tmp_path / "out", embedding="q5")


# The command


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(SOURCE), str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "MB/s" in result.stderr
    assert "tensors), verified" in result.stdout
    with open_checkpoint(tmp_path / "out") as c:
        assert set(c.tensors) == set(expected_tensors(c.config))


def test_command_quiet(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(SOURCE), str(tmp_path / "out"), "--quiet"])
    assert (result.exit_code, result.output) == (0, "")


def test_command_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(staging.Staging, "publish", interrupt)
    result = CliRunner().invoke(command, [str(SOURCE), str(tmp_path / "out")])
    assert result.exit_code == 130
    assert "run the same command again to continue" in result.stderr
    monkeypatch.undo()
    result = CliRunner().invoke(command, [str(SOURCE), str(tmp_path / "out")])
    assert "continued an earlier run" in result.stderr


def test_command_says_when_it_starts_over(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", embedding="q40")
    result = CliRunner().invoke(command, [str(SOURCE), str(tmp_path / "out")])
    assert "started over" in result.stderr
