# SPDX-License-Identifier: Apache-2.0
"""Commands whose help has the options in named sections, and lists and examples at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

REST = "Options"
"""The section of options that no other names."""


class SectionedCommand(click.Command):
    """A command with its options in sections.

    sections: parameters' names by heading.  lists: words and what they mean, by heading.  examples: lines of a shell.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] | None = None,
        lists: Mapping[str, Mapping[str, str]] | None = None,
        examples: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.sections, self.lists = dict(sections or {}), dict(lists or {})
        self.examples = tuple(examples)

    def help_records(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """(names and value, text) of every option by the heading of its section; a section without options is left out."""
        heading_of = {name: heading for heading, names in self.sections.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*self.sections, REST)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None  # arguments stand in the usage
            if record is not None:
                rows[heading_of.get(param.name or "", REST)].append(record)
        return {heading: records for heading, records in rows.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        for heading, records in self.help_records(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists and the examples."""
        for heading, words in self.lists.items():
            with formatter.section(heading):
                formatter.write_dl(list(words.items()))
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in self.examples))
        super().format_epilog(ctx, formatter)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a file's name, as click.Path does, which checks more than a command wants."""
    return [CompletionItem(incomplete, type="file")]
