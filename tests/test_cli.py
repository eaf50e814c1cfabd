"""The command line: prompts, outputs, exit codes, signals and pipes, on a model that costs nothing (fake_model.py)."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_model
import pytest
from click.testing import CliRunner

import ddllm_vk
from ddllm_vk.cli import COMMANDS, cli, live, run

FAKE = [sys.executable, str(Path(__file__).parent / "fake_model.py")]


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(ddllm_vk, "load_model", fake_model.load_model)


class Outcome:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(capsys):
    def call(*args: str) -> Outcome:
        code = run(args)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


def process(*args: str, stdin: bytes = b"", timeout: float = 30, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*FAKE, *args], input=stdin, capture_output=True, timeout=timeout, env={**os.environ, **environment}
    )


# --- the group ---


def test_help_lists_every_command(call):
    outcome = call("--help")
    assert outcome.code == 0
    assert all(name in outcome.out for name in COMMANDS)


def test_version(call):
    assert call("--version").out == f"ddllm_vk {ddllm_vk.__version__}\n"


def test_help_imports_nothing_heavy():
    code = "import sys; from ddllm_vk.cli import run; run(['--help']); print([m for m in HEAVY if m in sys.modules])"
    heavy = ["numba", "numpy", "tokenizers", "rich", "jinja2", "safetensors"]
    done = subprocess.run([sys.executable, "-c", f"HEAVY = {heavy}\n{code}"], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_a_command_that_cannot_be_imported_breaks_only_itself(call, monkeypatch):
    monkeypatch.setitem(COMMANDS, "missing", "Not there.")
    assert call("--help").code == 0
    outcome = call("missing")
    assert outcome.code == 1
    assert outcome.err.startswith("error: the command missing is not usable in this installation: ")


@pytest.mark.parametrize("args", [["no-such-command"], ["generate", "--no-such-option"], ["bench", "extra"]])
def test_usage_errors_exit_2_with_one_line(call, args):
    outcome = call(*args)
    assert outcome.code == 2
    assert re.fullmatch(r"error: .*--help\)\n", outcome.err)


def test_errors_are_one_line_and_exit_1(call, monkeypatch):
    def fail(*args, **kwargs):
        raise ddllm_vk.CheckpointError("model.safetensors: truncated")

    monkeypatch.setattr(ddllm_vk, "load_model", fail)
    outcome = call("generate", "why")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", "error: model.safetensors: truncated\n")
    for args in (["--debug", "generate", "why"], ["generate", "why", "--debug"], ["generate", "--debug", "why"]):
        outcome = call(*args)
        assert outcome.code == 1
        assert "Traceback" in outcome.err
        assert outcome.err.endswith("error: model.safetensors: truncated\n")


def test_an_unexpected_error_is_one_line_too(call, monkeypatch):
    monkeypatch.setattr(ddllm_vk, "load_model", lambda *a, **k: 1 / 0)
    outcome = call("generate", "why")
    assert outcome.code == 1
    assert outcome.err == "error: unexpected ZeroDivisionError: division by zero; --debug shows where\n"


def test_ctrl_c_while_loading_exits_130(call, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ddllm_vk, "load_model", interrupt)
    outcome = call("generate", "why")
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


# --- generate: the prompt ---


def test_text_alone_on_stdout_and_a_summary_on_stderr(call):
    outcome = call("generate", "why")
    assert (outcome.code, outcome.out) == (0, "the sky is blue\n")
    for figure in ("prompt 16 tokens", "reply 13 tokens in 1 canvas", "tokens/pass", "tokens/s", "memory", "end: stop"):
        assert figure in outcome.err
    assert call("generate", "--prompt", "why", "--quiet").err == ""


@pytest.mark.parametrize("args", [[], ["-"]])
def test_prompt_from_stdin(args):
    done = CliRunner().invoke(cli, ["generate", "--json", "--raw", *args], input="ab\n")
    ids = fake_model.load_model(None).tokenizer.encode("ab")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["stats"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([""], "the prompt is empty"),
        ([" \n"], "the prompt is empty"),
        (["--prompt", ""], "the prompt is empty"),
        (["a", "--prompt", "b"], "given twice"),
        (["a", "--raw", "--system", "b"], "--system needs the chat template"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["a", "--max-new-tokens", "-5"], "--max-new-tokens"),
        (["a", "--steps", "0"], "--steps"),
        (["a", "--steps", "x"], "--steps"),
        (["a", "--threads", "0"], "--threads"),
        (["a", "--t-max", "0"], "--t-max"),
        (["a", "--t-min", "nan"], "--t-min"),
        (["a", "--t-max", "inf"], "--t-max"),
        (["a", "--entropy-bound", "-1"], "--entropy-bound"),
        (["a", "--seed", "-1"], "--seed"),
        (["a", "--t-min", "0.9", "--t-max", "0.5"], "--t-min 0.9 is above --t-max 0.5"),
        (["a", "--backend", "tape"], "--backend"),
    ],
)
def test_what_cannot_be_used_is_named(call, args, message):
    outcome = call("generate", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_one_temperature_beyond_the_models_own_other(call):
    outcome = call("generate", "a", "--t-min", "0.9")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --t-min 0.9 is above --t-max 0.8")


def test_empty_stdin_and_stdin_that_is_not_text():
    assert process("generate").returncode == 2
    done = process("generate", stdin=b"ab\xff")
    assert done.returncode == 2
    assert b"standard input is not UTF-8 text (byte 2)" in done.stderr
    done = subprocess.run([*FAKE, "generate"], stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_an_argument_that_is_not_text():
    done = process("generate", os.fsdecode(b"a\xff"))
    assert done.returncode in (1, 2)
    assert b"Unicode" in done.stderr
    assert b"Traceback" not in done.stderr


def test_system_and_user_messages_go_through_the_template(call, monkeypatch):
    seen = []
    generate = fake_model.FakeModel.generate

    def spy(self, ids, *args, **kwargs):
        seen.append(list(ids))
        return generate(self, ids, *args, **kwargs)

    monkeypatch.setattr(fake_model.FakeModel, "generate", spy)
    call("generate", "why", "--system", "be brief")
    call("generate", "why", "--raw")
    tokenizer = fake_model.load_model(None).tokenizer
    assert seen[0] == tokenizer.encode("<|turn>system\nbe brief<turn|>\n<|turn>user\nwhy<turn|>\n<|turn>model\n")
    assert seen[1] == tokenizer.encode("why")


def test_options_reach_the_generation(call, monkeypatch):
    seen = {}

    def load_model(path, **choices):
        seen.update(choices, path=path)
        return fake_model.load_model(path)

    monkeypatch.setattr(ddllm_vk, "load_model", load_model)
    options = [
        "--t-max",
        "0.7",
        "--t-min",
        "0.3",
        "--entropy-bound",
        "0.2",
        "--seed",
        "9",
        "--steps",
        "5",
        "--no-guard",
    ]
    place = ["--model", "some/model", "--threads", "2", "--weights", "q40", "--activations", "f32"]
    place += ["--kv-cache", "q80"]
    shown = json.loads(call("generate", "a", "--json", "--max-new-tokens", "3", *options, *place).out)
    settings = shown["settings"]
    assert (settings["t_max"], settings["t_min"], settings["entropy_bound"], settings["seed"]) == (0.7, 0.3, 0.2, 9)
    assert (settings["max_denoising_steps"], settings["max_new_tokens"]) == (5, 3)
    assert settings["guard_empty_reply"] is False
    assert seen["kv_cache"] == "q80"
    assert (seen["path"], seen["threads"], seen["weights"], seen["activations"]) == (
        Path("some/model"),
        2,
        "q40",
        "f32",
    )
    assert (len(shown["ids"]), shown["finish_reason"]) == (3, "length")


# --- generate: the output ---


def test_json_is_one_object(call):
    shown = json.loads(call("generate", "why", "--json", "--quiet").out)
    assert (shown["text"], shown["finish_reason"]) == ("the sky is blue", "stop")
    assert shown["ids"][-1] == 6
    assert shown["stats"]["steps"] == [4]
    assert shown["stats"]["new_tokens"] == len(shown["ids"])


def test_each_canvas_is_written_when_it_is_finished():
    reply = "one two three four five six seven " * 4  # several canvases of 32
    started = subprocess.Popen(
        [*FAKE, "generate", "why", "--max-new-tokens", "96", "--quiet"],
        env={**os.environ, "FAKE_REPLY": reply, "FAKE_STEP_SECONDS": "0.15"},
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    parts = []
    while part := os.read(started.stdout.fileno(), 4096):
        parts.append((time.perf_counter(), part.decode()))
    assert started.wait() == 0
    text = "".join(part for _, part in parts)
    assert text == reply[: len(text) - 1] + "\n"
    assert len(parts) >= 3
    assert parts[1][0] - parts[0][0] > 0.3


@pytest.mark.parametrize("limit", [5, 32, 33, 64, 70])
def test_streamed_text_is_the_result_text(call, monkeypatch, limit):
    monkeypatch.setenv("FAKE_REPLY", "漢字 é " * 20)
    streamed = call("generate", "a", "--max-new-tokens", str(limit), "-q").out
    shown = json.loads(call("generate", "a", "--max-new-tokens", str(limit), "-q", "--json").out)
    assert streamed == shown["text"] + "\n"
    assert len(shown["ids"]) == limit


@pytest.mark.parametrize("mode", [[], ["--quiet"], ["--json"]])
def test_an_empty_reply_is_said(call, monkeypatch, mode):
    monkeypatch.setenv("FAKE_REPLY", "<turn|>")
    outcome = call("generate", "why", *mode)
    assert outcome.code == 0
    assert "warning: the reply is empty" in outcome.err
    if not mode:
        assert outcome.out == ""


def test_a_reader_that_goes_away_is_no_error():
    environment = {**os.environ, "FAKE_REPLY": "word " * 60, "FAKE_STEP_SECONDS": "0.1"}
    started = subprocess.Popen(
        [*FAKE, "generate", "a"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    errors = started.stderr.read()
    assert (started.wait(), errors) == (141, b"")


def test_a_stdout_that_cannot_show_a_character():
    done = process("generate", "a", PYTHONIOENCODING="ascii", FAKE_REPLY="né")
    assert (done.returncode, done.stdout) == (0, b"n?\n")


def test_a_full_disk_is_an_error():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*FAKE, "generate", "a"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


# --- Ctrl-C ---


def wait_for(stream, pattern: str, seconds: float = 20) -> str:
    """What comes out of a descriptor until the pattern matches."""
    seen = b""
    end = time.monotonic() + seconds
    while not re.search(pattern, seen.decode(errors="replace")):
        assert time.monotonic() < end, seen
        if select.select([stream], [], [], 0.1)[0]:
            chunk = os.read(stream, 4096)
            assert chunk, seen
            seen += chunk
    return seen.decode(errors="replace")


def test_the_first_interrupt_keeps_what_is_finished():
    environment = {**os.environ, "FAKE_REPLY": "one two three " * 20, "FAKE_STEP_SECONDS": "0.1", "FAKE_STEPS": "4"}
    started = subprocess.Popen(
        [*FAKE, "generate", "a", "--max-new-tokens", "640"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdout is not None
    first = wait_for(started.stdout.fileno(), "one")
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=20)
    assert started.returncode == 130
    text = first + out.decode()
    assert text.startswith("one two three")
    assert text.endswith("\n")
    assert b"end: cancelled" in err
    assert b"interrupted: the text is of 1 finished canvas\n" in err
    assert b"Traceback" not in err


def test_an_interrupt_before_anything_is_finished():
    script = "import fake_model, os, sys; fake_model.ddllm_vk.load_model = fake_model.load_model\n"
    script += "import ddllm_vk.cli.generate as g; real = g.stop_on_interrupt\n"
    script += "import contextlib, signal\n@contextlib.contextmanager\ndef now():\n"
    script += "    with real() as stop:\n        os.kill(os.getpid(), signal.SIGINT)\n        yield stop\n"
    script += "g.stop_on_interrupt = now\nfrom ddllm_vk.cli import run; sys.exit(run(['generate', 'a']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=Path(__file__).parent)
    assert (done.returncode, done.stdout) == (130, b"")
    assert b"interrupted before a canvas was finished" in done.stderr


def test_the_second_interrupt_aborts():
    environment = {**os.environ, "FAKE_STEP_SECONDS": "30", "FAKE_ANNOUNCE": ""}
    master, slave = pty.openpty()
    started = subprocess.Popen([*FAKE, "generate", "a", "-q"], env=environment, stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    wait_for(master, "a step begins")
    started.send_signal(signal.SIGINT)
    wait_for(master, "stopping after this step; Ctrl-C again aborts")
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=10) == 130
    assert "Traceback" not in wait_for(master, "interrupted")
    os.close(master)


def test_an_interrupt_while_the_prompt_is_read():
    """Seen after the pass that is running, not when the prompt is through."""
    environment = {**os.environ, "FAKE_CHUNK_SECONDS": "0.3", "TERM": "xterm-256color", "COLUMNS": "80"}
    master, slave = pty.openpty()
    command = [*FAKE, "generate", "a" * 2000]  # 37 s
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    wait_for(master, "reading the prompt")
    started.send_signal(signal.SIGINT)
    seen = wait_for(master, "interrupted before a canvas was finished", seconds=15)
    assert started.wait(timeout=10) == 130
    assert "Traceback" not in seen
    os.close(master)


# --- a terminal ---


def on_terminal(columns: int, rows: int, *args: str, **environment: str) -> tuple[int, str]:
    """Exit code of `generate` and everything written to a terminal of that size."""
    master, slave = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows), **environment}
    command = [*FAKE, "generate", *(args or ["a"])]
    started = subprocess.Popen(command, env=variables, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    return started.wait(), seen.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_terminal_shows_the_canvas_and_keeps_the_text():
    code, seen = on_terminal(80, 24, FAKE_STEPS="6", FAKE_STEP_SECONDS="0.07")
    assert code == 0
    assert "step 2/48" in seen
    assert "entropy" in seen
    assert "tokens/s" in seen
    assert "\x1b[2;36m" in seen  # unsettled
    assert "\x1b[1m" in seen  # accepted
    after = seen[seen.rindex("\x1b[2K") :]  # what is left once the live lines are erased
    lines = ESCAPE.sub("", after).replace("\r", "").split("\n")
    assert lines[0] == "the sky is blue"
    assert lines[1].startswith("prompt 14 tokens")


LONG = "a" * 200  # a prompt of 13 chunks of the fake model's


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_a_long_prompt_shows_how_far_it_is(mode):
    code, seen = on_terminal(80, 24, LONG, *mode, FAKE_CHUNK_SECONDS="0.2")
    assert code == 0
    counts = re.findall(r"([0-9]+)(?: of |/)([0-9]+)", ESCAPE.sub("", seen))
    total = int(re.findall(r"prompt ([0-9]+) tokens", seen)[0])
    done = [int(a) for a, b in counts if int(b) == total]
    assert len(set(done)) >= 3
    assert done == sorted(done)
    assert seen.count("reading the prompt") >= 3


@pytest.mark.parametrize(("delay", "shown"), [(0.0, True), (1e9, False)])
def test_a_bar_is_for_what_takes_its_time(monkeypatch, capsys, delay, shown):
    monkeypatch.setattr(live, "BAR_DELAY", delay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with live.encoding_bar(enabled=True) as bar:
        bar.update(256, 600)
        bar.update(600, 600)
    assert ("256/600" in capsys.readouterr().err) == shown


def test_no_bar_without_a_terminal_or_when_quiet():
    done = process("generate", LONG, "--json", FAKE_CHUNK_SECONDS="0.1")
    assert b"reading" not in done.stderr
    code, seen = on_terminal(80, 24, LONG, "--json", "--quiet", FAKE_CHUNK_SECONDS="0.1")
    assert code == 0
    assert "reading" not in seen


def test_an_interrupt_in_the_live_view_leaves_the_finished_text():
    master, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "FAKE_STEPS": "3"}
    variables |= {"FAKE_REPLY": "one two three " * 20, "FAKE_STEP_SECONDS": "0.2"}
    started = subprocess.Popen(
        [*FAKE, "generate", "a", "--max-new-tokens", "640"], env=variables, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    wait_for(master, "canvas 2")
    started.send_signal(signal.SIGINT)
    assert "stopping after this step" in wait_for(master, "end: cancelled")
    assert started.wait(timeout=10) == 130
    os.close(master)


@pytest.mark.parametrize(("columns", "rows"), [(30, 6), (80, 24)])
def test_no_line_is_wider_than_the_terminal(columns, rows):
    reply = "one two three four five six seven\n" * 6
    _, seen = on_terminal(columns, rows, FAKE_REPLY=reply, FAKE_STEP_SECONDS="0.06")
    live = seen[: seen.rindex("\x1b[2K")]
    frames = re.split(r"(?:\x1b\[2K|\x1b\[1A)+", live)
    assert len(frames) > 3
    for frame in frames:
        lines = ESCAPE.sub("", frame).replace("\r", "").split("\n")
        assert max(map(len, lines)) <= columns
        assert len(lines) <= rows


def test_no_color_is_respected():
    _, seen = on_terminal(80, 24, NO_COLOR="1", FAKE_STEP_SECONDS="0.06")
    assert "step 2/48" in seen
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen)
    assert "\x1b[1m" in seen
    assert "\x1b[2m" in seen


def test_a_terminal_that_cannot_be_redrawn_gets_plain_text():
    code, seen = on_terminal(80, 24, TERM="dumb")
    assert code == 0
    assert "\x1b" not in seen
    assert seen.startswith("the sky is blue\r\n")


def test_a_reply_cannot_steer_the_terminal():
    _, seen = on_terminal(80, 24, FAKE_REPLY="a\x1b]0;title\x07\x1b[31mred", FAKE_STEP_SECONDS="0.06")
    assert "\x1b]0;" not in seen
    assert "\x1b[31m" not in seen
    assert "\x07" not in seen


# --- bench ---


def test_bench_prints_a_table_and_json(call, tmp_path):
    target = tmp_path / "figures.json"
    outcome = call("bench", "--context", "8,16", "--repeat", "2", "--json", str(target))
    assert outcome.code == 0, outcome.err
    assert "canvas passes" in outcome.out
    figures = json.loads(target.read_text())
    assert [c["context"] for c in figures["contexts"]] == [8, 16]
    for row in figures["contexts"]:
        for name in ("encode_seconds", "canvas_first_seconds", "canvas_seconds"):
            assert 0 < row[name]["min"] <= row[name]["median"]
    assert figures["peak_memory_bytes"] > 1e6
    assert list(tmp_path.iterdir()) == [target]
    assert [c["encoded_tokens"] for c in figures["contexts"]] == [8, 16]
    assert figures["synthetic_context"] is False
    piped = call("bench", "--json", "-")
    assert json.loads(piped.out)["canvas_length"] == 32
    assert "peaks" not in json.loads(piped.out)
    assert "canvas passes" in piped.err


def test_bench_at_a_context_that_is_not_encoded(call):
    """The encoder's time is that of the next tokens after it: one pass, or as many as the model's context still has."""
    outcome = call("bench", "--context", "8,4000", "--synthetic-context", "--repeat", "1", "--json", "-")
    assert outcome.code == 0, outcome.err
    figures = json.loads(outcome.out)
    assert figures["synthetic_context"] is True
    assert [(c["context"], c["encoded_tokens"]) for c in figures["contexts"]] == [(8, 256), (4000, 96)]
    assert "random cache" in outcome.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--context", "-1"], 2, "-1 is negative"),
        (["--context", "a"], 2, "not a comma-separated list"),
        (["--repeat", "0"], 2, "--repeat"),
        (["--context", "1000000"], 1, "exceed the model's context"),
        (["--json", "/no/such/folder/x.json"], 1, "cannot be written"),
    ],
)
def test_bench_names_what_it_cannot_use(call, args, code, message):
    outcome = call("bench", *args)
    assert outcome.code == code
    assert message in outcome.err
