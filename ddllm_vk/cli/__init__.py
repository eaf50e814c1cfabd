"""The command line: commands imported when they are used, and one place where errors become messages."""

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from .. import __version__
from ..errors import DdllmError, InputError

# command -> one line of help. Each is a click.Command of that name in the module of that name.
COMMANDS = {
    "generate": "Answer a prompt.",
    "demo": "Ask the bundled model held-out questions and check its answers.",
    "convert": "Quantise a checkpoint to Q40.",
    "inspect": "Show a model's configuration, tensors and memory need.",
    "synth": "Write a model of random weights, for benchmarks.",
    "devices": "Show the CPU and every Vulkan device, and what would be used.",
    "bench": "Time loading, encoder and canvas passes of a model.",
    "warmup": "Compile the CPU kernels before they are needed.",
}

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def _remember_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().ensure_object(dict)["debug"] = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
    )


def _force_isa(ctx: click.Context, param: click.Parameter, name: str | None) -> None:
    """The kernels choose when they are imported: that is done here, with the environment saying what to choose."""
    if name is None:
        return
    if not name:
        raise click.BadParameter("is empty; name an instruction set", ctx, param)
    os.environ["DDLLM_VK_ISA"] = name
    try:
        from ..cpu import isa
    except InputError as e:
        raise click.BadParameter(str(e), ctx, param) from e
    if name != isa.ACTIVE.name:
        raise InputError(f"--isa {name}: the kernels of this process are in use already, with {isa.ACTIVE.name}")


def _isa_option() -> click.Option:
    return click.Option(
        ["--isa"],
        metavar="NAME",
        expose_value=False,
        callback=_force_isa,
        help="Instruction set of the CPU kernels: avx512vnni, avxvnni, avx512, avx2, neon-dotprod, neon or generic."
        "  [default: the best this machine has]",
    )


class LazyGroup(click.Group):
    """Lists COMMANDS without importing them; one that cannot be imported does not break the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command = getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name)
        except ImportError as e:
            raise DdllmError(f"the command {cmd_name} is not usable in this installation: {e}") from e
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params.append(_debug_option())
            if cmd_name == "warmup" or any(parameter.name == "backend" for parameter in command.params):
                command.params.append(_isa_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=LazyGroup,
    params=[_debug_option(), _isa_option()],
    context_settings={"help_option_names": ["-h", "--help"], "obj": None},
)
@click.version_option(__version__, prog_name="ddllm_vk", message="%(prog)s %(version)s")
def cli() -> None:
    """Run block-diffusion language models (DiffusionGemma)."""


def run(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; everything that goes wrong is said on stderr.

    0 done, 1 an error, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character the terminal cannot show must not end the program
    state: dict[str, bool] = {}
    try:
        with cli.make_context("ddllm_vk", list(sys.argv[1:] if args is None else args), obj=state) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return e.exit_code
    except click.ClickException as e:
        command = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx is not None else "ddllm_vk"
        click.echo(f"error: {e.format_message()} (see {command} --help)", err=True)
        return e.exit_code
    except (KeyboardInterrupt, click.Abort):
        _show_traceback(state)
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except DdllmError as e:
        _show_traceback(state)
        click.echo(f"error: {e}", err=True)
        return 1
    except MemoryError:
        _show_traceback(state)
        click.echo("error: out of memory; inspect shows what a model needs", err=True)
        return 1
    except Exception as e:
        _show_traceback(state)
        hint = "" if state.get("debug") else "; --debug shows where"
        click.echo(f"error: unexpected {type(e).__name__}: {e}{hint}", err=True)
        return 1


def _show_traceback(state: dict[str, bool]) -> None:
    if state.get("debug"):
        traceback.print_exc()


def _discard_output() -> None:
    """Nobody reads stdout any more; without this Python complains when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):  # when stdout is no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
