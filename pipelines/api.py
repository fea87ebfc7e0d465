"""The REST API of Kubeflow Pipelines, version v2beta1, as plain JSON, and what its refusals mean.

Traps: the methods of kfp's client print, know no timeout, and take a login page for an answer; its models refuse what a
newer server adds. Requests therefore go through the transport below them, which signs them.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kfp_server_api import ApiException
from urllib3.exceptions import HTTPError

from ratchet.errors import ClusterError, ConfigError, NotAllowedError

ENDPOINT = "KF_PIPELINES_ENDPOINT"
TOKEN, COOKIES = "KF_PIPELINES_TOKEN", "KF_PIPELINES_COOKIES"
SA_TOKEN = "KF_PIPELINES_SA_TOKEN_PATH"

TIMEOUT = (5.0, 60.0)
"""Seconds to connect, and to wait for an answer."""
PAGE = 100
"""Items of one page of a listing."""
_ROOT = "/apis/v2beta1"
_MAX_SAID = 500
"""Characters of a server's message that are repeated."""


class MissingError(ConfigError):
    """The endpoint knows no such thing."""


class ConflictError(ConfigError):
    """The endpoint has one of that name already."""


@dataclass(frozen=True)
class Api:
    """The REST API of one endpoint, version v2beta1."""

    place: str
    """What messages call it."""
    ui: str
    """Address of its pages; empty where none is known."""
    namespace: str | None
    """The profile's namespace; None where the endpoint has no profiles."""
    client: Any = field(repr=False)

    def ask(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        file: Path | None = None,
    ) -> dict[str, Any]:
        """Send one request and return the answer. `what` ends the sentence "the endpoint was asked to ...".

        ConfigError: nobody answers. MissingError: 404. ConflictError: 409. NotAllowedError: 401, 403, and the way to a
        login page. ClusterError: anything else that is no answer.
        """
        kind = "application/json" if file is None else "multipart/form-data"
        try:
            with warnings.catch_warnings():
                # The generated client uses what urllib3 will drop.
                warnings.simplefilter("ignore", DeprecationWarning)
                found = self.client.call_api(
                    f"{_ROOT}{path}",
                    method,
                    query_params=[(name, value) for name, value in (query or {}).items() if value not in (None, "")],
                    header_params={"Accept": "application/json", "Content-Type": kind},
                    body=body,
                    files={"uploadfile": str(file)} if file else None,
                    response_type="object",
                    auth_settings=["Bearer"],
                    _return_http_data_only=True,
                    _request_timeout=TIMEOUT,
                )
        except HTTPError as error:
            hint = "; name the server's authority with --ca-cert" if "SSL" in str(error) else ""
            raise ConfigError(
                f"cannot reach {self.place} to {what}: {_said(str(error))} (check the address, {ENDPOINT}, and that "
                f"this machine may connect to it{hint})"
            ) from error
        except ApiException as error:
            self._refused(what, path, error)
        if not isinstance(found, dict):
            raise ClusterError(
                f"{self.place} was asked to {what} and answered something other than JSON: {_said(str(found))!r}; it "
                f"is no Kubeflow Pipelines API, or a login page stands before it: check the address, {TOKEN}, {COOKIES}"
            )
        return found

    def pages(self, what: str, path: str, key: str, query: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield every item of a listing, whose items the answer holds under `key`."""
        token = ""
        while True:
            page = self.ask(what, "GET", path, query={**(query or {}), "page_size": PAGE, "page_token": token})
            yield from page.get(key) or ()
            token = page.get("next_page_token") or ""
            if not token:
                return

    def page(self, place: str) -> str:
        """Return the address of one of its pages, such as runs/details/ID; empty where it has none."""
        return f"{self.ui}/#/{place}" if self.ui else ""

    def _refused(self, what: str, path: str, error: Any) -> NoReturn:
        status, said = error.status, _message(error)
        asked = f"{self.place} was asked to {what}"
        if status in (401, 403):
            profile = f" in the namespace {self.namespace}" if self.namespace else ""
            raise NotAllowedError(
                f"{asked}{profile} and refused ({status}): {said}. Check who asks ({TOKEN} or --token-file, {COOKIES}, "
                f"in a pod {SA_TOKEN}) and what that account may do{profile} (docs/operations.md)"
            ) from error
        if status == 404:
            raise MissingError(
                f"{asked} and found nothing ({_ROOT}{path}): {said}. Check the name, the namespace, and that the "
                "address is the API's (where the UI is at http://HOST/pipeline, so is the API)"
            ) from error
        if status == 409:
            raise ConflictError(f"{asked} and there is one already: {said}") from error
        if status and 300 <= status < 400:
            raise NotAllowedError(
                f"{asked} and was sent elsewhere ({status}, {said}): a login page stands before it, or the address has "
                f"moved. Pass {TOKEN} or {COOKIES}, or the address that it sends to"
            ) from error
        raise ClusterError(f"{asked} and failed ({status}): {said}") from error


def _message(error: Any) -> str:
    """Return what the server said: its JSON's message, or the beginning of its page."""
    body = error.body or ""
    try:
        parsed = json.loads(body)
    except ValueError:
        return _said(body or str(error.reason))
    told = (
        parsed.get("message") or parsed.get("error_message") or parsed.get("error")
        if isinstance(parsed, dict)
        else None
    )
    return _said(str(told or body))


def _said(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SAID else f"{line[:_MAX_SAID]}..."
