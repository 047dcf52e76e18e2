"""The command line: `kvjax generate` decodes through a cache, `kvjax eval` scores what caches
keep, and more.

A command is a module here, with a function that typer calls. Everything cheap is checked before
anything long starts. An error ends in one line `error: ...` on stderr and a non-zero exit code:

    2    the request cannot be met: a wrong option, file, model or combination of them, or a
         missing extra
    1    the run failed: out of memory, no space left on the disk, numbers that are not finite
    130  interrupted
    141  the reader of stdout closed it

KVJAX_TRACEBACK=1 shows the traceback instead.

Heavy imports are inside the commands, so that `kvjax --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from errno import ELOOP, ENAMETOOLONG
from importlib import metadata
from typing import Annotated, Any

from kvjax.validation import cut, naming_absent

with naming_absent("the command kvjax"):
    import typer

    from kvjax.cli import (
        bench,
        chat,
        compare,
        evaluate,
        generate,
        heads,
        methods,
        perplexity,
        warm,
    )
    from kvjax.cli.command import Command
    from kvjax.cli.terminal import collect_garbage, say, write

# Silences transformers' advice about torch and XLA's startup warnings, which do not concern
# users of this command.
for _name, _value in (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TF_CPP_MIN_LOG_LEVEL", "2"),
    ("RUST_BACKTRACE", "0"),  # of tokenizers
):
    os.environ.setdefault(_name, _value)

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="KV caches for long-context decoding in JAX.",
    epilog="`kvjax COMMAND --help` explains a command; `kvjax --install-completion` completes names in your shell.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        write(f"kvjax {metadata.version('kvjax')}\n")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    compilation_cache: Annotated[
        bool,
        typer.Option(
            "--compilation-cache/--no-compilation-cache",
            help="Keep compiled programs on disk, in the user's cache folder or the one that KVJAX_COMPILATION_CACHE "
            "names, so that the next command starts sooner.",
        ),
    ] = True,
) -> None:
    """KV caches for long-context decoding in JAX."""
    if context.invoked_subcommand != "generate":  # it does so when its programs are compiled
        collect_garbage()
    if not compilation_cache:
        os.environ["KVJAX_COMPILATION_CACHE"] = "off"


_GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "Answer": dict(
        generate=generate.generate,
        chat=chat.chat,
        compare=compare.compare,
        methods=methods.methods,
    ),
    "Quality": dict(eval=evaluate.evaluate, perplexity=perplexity.perplexity),
    "Tune": dict(heads=heads.heads, bench=bench.bench, warm=warm.warm),
}
for _group, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_group)(_command)


# Errors in the request: checks raise ValueError, and a path that the user gave may not exist or
# be readable.
_REQUEST = (
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def _is_request(error: Exception) -> bool:
    """True for an error in the request; a name that no path can have is one."""
    no_path = isinstance(error, OSError) and error.errno in (ENAMETOOLONG, ELOOP)
    return no_path or isinstance(error, _REQUEST) or _lacks_extra(error)


def _lacks_extra(error: Exception) -> bool:
    """True if `error` is kvjax's own message that an extra must be installed."""
    # Python's own ImportError has the module's name
    return isinstance(error, ImportError) and error.name is None


def main(args: Sequence[str] | None = None) -> int:
    """The console entry point. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        with naming_absent("this command"):
            code = app(args, prog_name="kvjax", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:  # click exits so when a pipe is closed
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        if os.environ.get("KVJAX_TRACEBACK"):
            raise
        # One of click's errors, wherever typer's version keeps their class.
        is_usage = hasattr(error, "format_message")
        say(f"error: {cut(_usage(error) if is_usage else _one_line(error))}")
        return 2 if is_usage or _is_request(error) else 1


def _reader_gone() -> int:
    """Discards the rest of the output, as the reader of stdout (such as `head`) closed it;
    returns the exit code.
    """
    sys.stdout = sys.__stdout__
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 141


def _usage(error: Any) -> str:
    """Click's usage error on one line, with the command that lists the options."""
    message = " ".join(error.format_message().split())
    context = error.ctx
    if context is None:
        return message
    if "extra argument" in message:
        options = {name for option in context.command.params for name in option.opts}
        for name, value in (
            ("--prompt", "prompt as --prompt TEXT"),
            ("--model", "model as --model DIR"),
        ):
            if name in options:
                message += f": give the {value}"
    return f"{message.rstrip('.')}; see {context.command_path} --help"


def _one_line(error: Exception) -> str:
    """The part of an error that a user can act on, on one line."""
    message = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in message:
        ways = "a smaller model, a shorter prompt, --dtype bfloat16, or a smaller --batch or --parallel where available"
        return f"out of memory; use {ways} ({message[:200]})"
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        cure = ""
        if isinstance(error, FileNotFoundError | PermissionError):
            cure = "; give a path that exists and that you may use"
        return f"{error.filename}: {error.strerror}{cure}"
    known = ValueError | NotImplementedError | OSError | RuntimeError | MemoryError
    if isinstance(error, known) or _lacks_extra(error):
        return message or type(error).__name__
    return f"{type(error).__name__}: {message} (unexpected; KVJAX_TRACEBACK=1 shows where)"
