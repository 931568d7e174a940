"""Write docs/cli.md from the parsers of the commands: python docs/cli.py"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from lightning_sparse.cli import COMMANDS

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Commands exit with 0, or with 2 after an error. `doctor` exits with 1 if a check fails, and `lab` with the exit code of
your command.
"""


def parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command's parser, or the parsers of its subcommands."""
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for each in inner:
        for word, subparser in each.choices.items():
            yield from parsers(subparser, f"{name} {word}")


def arguments(parser: argparse.ArgumentParser) -> str:
    """Return a list with one line for each argument."""
    lines = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            said = (action.help or "") % {"default": action.default}
            lines.append(f"- {_name(action)}: {said}" if said else f"- {_name(action)}")
    return "\n".join(lines)


def _name(action: argparse.Action) -> str:
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    takes_value = action.nargs != 0
    return f"`{action.option_strings[-1]} {value}`" if takes_value else f"`{action.option_strings[-1]}`"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for command, summary in COMMANDS.items():
        parser = argparse.ArgumentParser(f"lightning-sparse {command}")
        import_module(f"lightning_sparse.cli.{command}").declare(parser)
        parts.append(f"\n## {command}\n\n{summary[0].upper()}{summary[1:]}.\n")
        for name, each in parsers(parser, command):
            heading = f"\n### {name}\n" if name != command else ""
            parts.append(f"{heading}\n{arguments(each)}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
