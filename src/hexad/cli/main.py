"""The ``hexad`` command. Subcommands are imported when they are called, so that help starts fast."""

import errno
import os
import sys
from importlib import import_module

import click

from hexad import __version__
from hexad.config import HexadError, did_you_mean
from hexad.launching.environment import end_with, hold_back_notice

from .options import fail_once, in_options, print_once

# command -> (module, attribute, first line of help)
_COMMANDS = {
    "demo": ("hexad.cli.demo", "demo", "Train a small model on real text, on this machine."),
    "train": ("hexad.cli.train", "train", "Train a model from a configuration."),
    "submit": ("hexad.cli.submit", "submit", "Queue a training run on a cluster."),
    "megatron": ("hexad.cli.megatron", "megatron", "Train by a launch line of Megatron-LM."),
    "evaluate": ("hexad.cli.evaluate", "evaluate", "Loss and bits per byte of a model on data sets."),
    "score": ("hexad.cli.score", "score", "Log-probabilities of given tokens."),
    "generate": ("hexad.cli.generate", "generate", "Continue a prompt with a trained model."),
    "serve": ("hexad.cli.serve", "serve", "Answer requests of OpenAI's interface with a model."),
    "data": ("hexad.cli.data", "data", "Build, inspect and verify datasets."),
    "tokenizer": ("hexad.cli.tokenizer", "tokenizer", "Train and show tokenizers."),
    "checkpoint": ("hexad.cli.checkpoint", "checkpoint", "Inspect, verify, import and export checkpoints."),
    "plan": ("hexad.cli.plan", "plan", "Find the fastest layouts of a model on a cluster."),
    "show": ("hexad.cli.show", "show", "Draw layouts, schedules and runs."),
    "config": ("hexad.cli.config", "config", "Write, show and check configurations; presets."),
}


class _Commands(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            hint = did_you_mean(args[0], _COMMANDS) or f"; known: {', '.join(_COMMANDS)}"
            ctx.fail(f"no such command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hexad")
@click.option(
    "--debug",
    is_flag=True,
    help="Show the traceback of errors. Those of started ranks are in run.dir/log-rankN.txt.",
)
def hexad(debug: bool) -> None:
    """Train and run transformers too large for one accelerator."""


def main() -> None:
    """Entry point: a user's error is one line on stderr and exit status 2."""
    # At once: what a command imports takes seconds.
    if {"train", "megatron"} & set(sys.argv[1:]):
        hold_back_notice()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit status."""
    debug = "--debug" in arguments
    # The flag may stand anywhere; the group declares it for the help text.
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        result = hexad.main(arguments, prog_name="hexad", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HexadError as error:
        command = hexad.get_command(click.Context(hexad), arguments[0])
        return fail_once(in_options(error.marked, command), debug)
    except click.exceptions.NoArgsIsHelpError as error:
        text = error.format_message()
        return print_once(text, lambda: click.echo(text, err=True))
    except click.UsageError as error:
        message, group = error.format_message(), error.ctx and error.ctx.command
        if isinstance(group, click.Group) and message.startswith("No such command") and "mean" not in message:
            message = f"{message.rstrip('.')}; known: {', '.join(group.commands)}"
        hint = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
        return fail_once(message + hint, debug)
    except (click.Abort, KeyboardInterrupt):
        print("hexad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        return fail_once(f"the output cannot be written: {error.strerror}", debug)


if __name__ == "__main__":
    main()
