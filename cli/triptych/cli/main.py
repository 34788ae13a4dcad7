"""The ``triptych`` command: registers the subcommands, and maps errors to exit codes."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from triptych.cli import config, kernels, keys, model, pool
from triptych.cli.checks.doctor import doctor
from triptych.cli.checks.plan import plan
from triptych.cli.checks.validate import validate
from triptych.cli.measure import bench, simulate
from triptych.cli.measure.profile import profile
from triptych.cli.option_groups import GroupedOptions
from triptych.cli.output import notes
from triptych.cli.quality import evaluate, train
from triptych.cli.quality.calibrate import calibrate
from triptych.cli.quality.codebooks import codebooks
from triptych.cli.quality.eval_claims import claims
from triptych.cli.quality.eval_frontier import frontier
from triptych.cli.quality.eval_learned import learned
from triptych.cli.quality.eval_tasks import tasks
from triptych.cli.quality.retrieval import retrieval
from triptych.cli.quality.spread import spread
from triptych.cli.serving.chat import chat
from triptych.cli.serving.drain import drain
from triptych.cli.serving.serve import serve
from triptych.cli.serving.top import top
from triptych.core.errors import ConfigError, TriptychError

app = typer.Typer(
    help="Serve large language models in three stages: prefill, compress, decode.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command()(chat)
app.command()(validate)
app.command(cls=GroupedOptions)(calibrate)
app.command()(spread)
app.command()(retrieval)
app.command()(codebooks)
app.command()(doctor)
app.command()(drain)
app.command()(plan)
app.command()(profile)
app.command()(top)
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")
app.add_typer(simulate.app, name="simulate")
app.add_typer(kernels.app, name="kernels")
evaluate.app.command("learned")(learned)
evaluate.app.command("frontier")(frontier)
evaluate.app.command("claims")(claims)
evaluate.app.command("tasks")(tasks)
app.add_typer(evaluate.app, name="eval")
app.add_typer(train.app, name="train")
app.add_typer(pool.app, name="pool")
app.add_typer(keys.app, name="key")
app.add_typer(config.app, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models in three stages: prefill, compress, decode."""


def main() -> None:
    """Run the command. Exit code: 0 success, 1 failure, 2 wrong argument or setting."""
    try:
        app()
    except TriptychError as error:
        notes.print(f"triptych: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
