"""Help of commands with many options, which are listed under headings."""

from typing import Any

from typer.core import TyperCommand


class GroupedOptions(TyperCommand):
    """A command whose help has a list for each heading that options name (``rich_help_panel``).

    Typer itself shows these headings only in boxes, which this program has none of.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:  # typer has no names for the types
        lists = dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            heading: str = getattr(param, "rich_help_panel", None) or usual
            if record := param.get_help_record(ctx):
                lists.setdefault(heading, []).append(record)
        for heading, records in lists.items():
            with formatter.section(heading):
                formatter.write_dl(records)
