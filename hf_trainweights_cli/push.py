"""`trainweights push`: uploads a quantized model from a directory to the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, working
from hf_trainweights_cli.sources import Model, local_copy


def push(
    model: Model,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Its name on the Hub; made if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch to commit to, made if missing.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the commit.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Push a quantized model to the Hub with its tokenizer and a model card, in one commit.

    A card that someone wrote or edited is kept; weight files of an earlier push are removed. The Hub may refuse before
    anything is uploaded. The token is the one of `hf auth login`, or HF_TOKEN.
    """
    from huggingface_hub.errors import HFValidationError

    from hf_trainweights.models.directory import push_directory

    options = {"revision": revision, "create_pr": create_pr, "commit_message": message}
    with errors_in_one_line(debug), working(f"pushing to {repo_id}"):
        try:
            commit = push_directory(local_copy(model), repo_id, private=private or None, **options)
        except HFValidationError as error:
            raise typer.BadParameter(str(error), param_hint="REPO_ID") from error
    if as_json:
        print_json({"source": model, "repo_id": repo_id, "commit": str(commit), "pull_request": commit.pr_url})
    else:
        say(f"pushed to {commit.pr_url or commit}")
