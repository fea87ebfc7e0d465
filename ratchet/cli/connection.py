"""The options of every verb that asks a Kubeflow Pipelines endpoint, written once."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

_PANEL = "Endpoint"

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="Kubeflow Pipelines: http://HOST:PORT, or where its UI is (https://HOST/pipeline). Without it "
        "KF_PIPELINES_ENDPOINT, the pod's own cluster, or the kubeconfig's.",
        rich_help_panel=_PANEL,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="Namespace of the profile that runs belong to, where the endpoint has profiles; KF_PIPELINES_NAMESPACE.",
        rich_help_panel=_PANEL,
    ),
]
KubeContext = Annotated[
    str | None,
    typer.Option(
        "--kube-context",
        metavar="NAME",
        help="Reach the endpoint through the API of this context's cluster, with its account.",
        rich_help_panel=_PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Bearer token; KF_PIPELINES_TOKEN_FILE, or the token itself in KF_PIPELINES_TOKEN. Cookies come from "
        "KF_PIPELINES_COOKIES.",
        rich_help_panel=_PANEL,
    ),
]
CaCert = Annotated[
    Path | None,
    typer.Option(
        "--ca-cert",
        metavar="FILE",
        help="Certificate of the authority that signed the endpoint's; KF_PIPELINES_SSL_CA_CERT.",
        rich_help_panel=_PANEL,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Do not check the endpoint's certificate.", rich_help_panel=_PANEL),
]
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "endpoint": (Endpoint, None),
    "namespace": (Namespace, None),
    "kube_context": (KubeContext, None),
    "token_file": (TokenFile, None),
    "ca_cert": (CaCert, None),
    "insecure": (Insecure, False),
}


def with_endpoint(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of an endpoint; it gets them as one mapping, its argument `connection`."""
    own = inspect.signature(verb)

    @functools.wraps(verb)
    def wrapped(**values: Any) -> None:
        given = {name: values.pop(name) for name in _OPTIONS}
        host, insecure = given.pop("endpoint"), given.pop("insecure")
        verb(**values, connection={"host": host, **given, "verify_ssl": False if insecure else None})

    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=default, annotation=a) for name, (a, default) in _OPTIONS.items()]
    kept = [one.replace(kind=kind) for one in own.parameters.values() if one.name != "connection"]
    wrapped.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in (*kept, *added)}
    return wrapped
