"""The verbs of training data: check."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ratchet.cli.app import app

if TYPE_CHECKING:
    from ratchet.data.check import Measure
    from ratchet.data.check_rows import Judge

Objective = Literal["rl", "sft", "dpo", "reward_model"]

data = typer.Typer(no_args_is_help=True, help="Look at training data before anything is trained on it.")
app.add_typer(data, name="data")


@data.callback()
def _data() -> None:
    """Keeps `check` a verb of its own while it is the only one."""


@data.command()
def check(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Training data, as in data.train_files; several are one set."),
    ],
    val: Annotated[list[str] | None, typer.Option("--val", metavar="SOURCE", help="Held-out data; repeatable.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="Count its tokens, by its chat template.")
    ] = None,
    objective: Annotated[
        Objective | None, typer.Option("--objective", help="algorithm.objective; else what the columns say.")
    ] = None,
    data_source: Annotated[
        str | None, typer.Option("--data-source", help="data.data_source: of rows that name none.")
    ] = None,
    prompt_key: Annotated[str, typer.Option("--prompt-key", help="data.prompt_key: the column of prompts.")] = "prompt",
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
) -> None:
    """Say what is wrong with training data, row by row. Ends with code 1 if there is an error."""
    from ratchet.data.check import check_data

    report = check_data(
        sources,
        val or (),
        objective=objective,
        prompt_key=prompt_key,
        data_source=data_source,
        judge=_judge(),
        measure=None if tokenizer is None else _measure(tokenizer),
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        for line in report.lines():
            typer.echo(line)
    if report.has_errors:
        raise typer.Exit(1)


def _judge() -> "Judge":
    """Whether the rule of a row's data_source could grade it."""
    from ratchet.errors import DataError
    from ratchet.rewards.registry import rule_for

    def judge(row: Any) -> tuple[Literal["error", "warning"], str] | None:
        try:
            rule = rule_for(row.data_source)
        except DataError as error:
            return "warning", str(error)
        try:
            if rule.check_ground_truth is not None:
                rule.check_ground_truth(row.reward_model["ground_truth"])
        except DataError as error:
            return "error", f"the rule of {row.data_source} cannot read the ground truth: {error}"
        return None

    return judge


def _measure(path: str) -> "Measure":
    """Counts of tokens under the chat template of a model."""
    from ratchet.engines.chat_template import conversation_ids
    from ratchet.engines.model import chat_prompt_ids, load_tokenizer
    from ratchet.engines.model_source import resolve_tokenizer_folder

    tokenizer = load_tokenizer(resolve_tokenizer_folder(path))

    def measure(prompt: Sequence[Any], completions: Sequence[Any]) -> tuple[int, list[int]]:
        if not completions:
            return len(chat_prompt_ids(tokenizer, prompt)), []
        found = [conversation_ids(tokenizer, prompt, completion) for completion in completions]
        return len(found[0][0]), [len(ids) for _, ids, _ in found]

    return measure
