"""Opens a Kubeflow Pipelines endpoint: where it is, who asks, and whose runs these are.

kfp's client does what it supports: tokens, cookies, Google's proxy, a pod's projected token. Trap: its constructor asks
the endpoint five times with pauses, in a pod writes a file below HOME, which is read-only there, and goes on with
localhost where a kubeconfig cannot be read.
"""

import dataclasses
import logging
import os
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp
import kfp_server_api
import kubernetes
import yaml
from google.auth.exceptions import GoogleAuthError
from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials
from kfp_server_api.rest import RESTClientObject
from urllib3 import Retry

from pipelines.api import COOKIES, ENDPOINT, SA_TOKEN, TOKEN, Api
from ratchet.errors import ConfigError

logger = logging.getLogger(__name__)

NAMESPACE = "KF_PIPELINES_NAMESPACE"
SERVER_NAMESPACE = "KF_PIPELINES_SERVER_NAMESPACE"
TOKEN_FILE = "KF_PIPELINES_TOKEN_FILE"
CA_CERT, VERIFY_SSL = "KF_PIPELINES_SSL_CA_CERT", "KF_PIPELINES_VERIFY_SSL"
UI = "KF_PIPELINES_UI_ENDPOINT"

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PROJECTED_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")


class _Client(kfp.Client):  # type: ignore[misc]
    def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
        """Say nothing to the constructor; `open_api` asks for itself."""
        return kfp_server_api.V2beta1GetHealthzResponse(multi_user=None)


def open_api(
    *,
    host: str | None = None,
    namespace: str | None = None,
    kube_context: str | None = None,
    token_file: str | Path | None = None,
    ca_cert: str | Path | None = None,
    verify_ssl: bool | None = None,
) -> Api:
    """Open the endpoint: the first of `host`, `kube_context`, KF_PIPELINES_ENDPOINT, the pod's own and a kubeconfig's.

    `namespace` is a profile's; without it KF_PIPELINES_NAMESPACE, kfp's context file, or the pod's. Who asks: a token
    (`token_file`, KF_PIPELINES_TOKEN_FILE, KF_PIPELINES_TOKEN), what kfp knows of Google's proxy, or a pod's projected
    token; KF_PIPELINES_COOKIES go along. Through a kubeconfig, its account asks the cluster's API for the service. The
    endpoint is asked once, whether it has profiles; errors are those of `Api.ask`.
    """
    named = host or (None if kube_context else os.environ.get(ENDPOINT))
    address = named or (None if kube_context else _pods_own())
    known = None
    if address is None:
        transport = _proxied(kube_context)
    else:
        client = _client(address, token_file, ca_cert, verify_ssl)
        transport, known = client._run_api.api_client, client.get_user_namespace()
    settings = transport.configuration
    settings.retries = Retry(
        2,
        connect=0,
        read=0,
        redirect=False,
        status_forcelist=(502, 503, 504),
        backoff_factor=0.3,
        raise_on_status=False,
    )
    transport.rest_client = RESTClientObject(settings)
    ui = os.environ.get(UI) or named or ""
    api = Api(f"the Kubeflow endpoint {address or settings.host}", ui.rstrip("/"), None, transport)
    return _with_profile(api, namespace or os.environ.get(NAMESPACE) or known)


def _client(address: str, token_file: str | Path | None, ca_cert: str | Path | None, verify_ssl: bool | None) -> Any:
    if urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"Kubeflow endpoint {address!r}: expected http://HOST:PORT or https://HOST/PATH")
    if verify_ssl is None and os.environ.get(VERIFY_SSL, "").lower() in ("0", "false", "no"):
        verify_ssl = False
    token, credentials = _who_asks(token_file)
    certificate = _file(ca_cert or os.environ.get(CA_CERT), "CA certificate")
    with warnings.catch_warnings():
        # It warns about servers older than any that is supported here.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return _Client(
                host=address,
                existing_token=token,
                credentials=credentials,
                cookies=os.environ.get(COOKIES) or None,
                ssl_ca_cert=certificate,
                verify_ssl=verify_ssl,
            )
        except (GoogleAuthError, OSError, ValueError) as error:
            raise ConfigError(f"cannot open the Kubeflow endpoint {address}: {error}") from error


def _who_asks(token_file: str | Path | None) -> tuple[str | None, Any]:
    """Return a token, or credentials that read one at each request, or neither."""
    named = _file(token_file or os.environ.get(TOKEN_FILE), "token")
    if named:
        try:
            return Path(named).read_text(encoding="utf-8").strip(), None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the token in {named}: {error}") from error
    if os.environ.get(TOKEN):
        return os.environ[TOKEN].strip(), None
    projected = _file(os.environ.get(SA_TOKEN), "service account's token")
    if projected is None and PROJECTED_TOKEN.is_file():
        projected = str(PROJECTED_TOKEN)
    return None, ServiceAccountTokenVolumeCredentials(projected) if projected else None


def _file(path: str | Path | None, what: str) -> str | None:
    if path and not Path(path).is_file():
        raise ConfigError(f"the {what} is to be read from {path}, and there is no such file")
    return str(path) if path else None


def _pods_own() -> str | None:
    if not (SERVICE_ACCOUNT / "namespace").is_file():
        return None
    return f"http://ml-pipeline.{_server_namespace()}.svc.cluster.local:8888"


def _proxied(context: str | None) -> Any:
    """Return the way through the cluster's API to the service, with the kubeconfig's account."""
    cluster = kubernetes.client.Configuration()
    # The client reads the variable once, when it is imported.
    file = os.environ.get("KUBECONFIG") or None
    try:
        kubernetes.config.load_kube_config(file, context, client_configuration=cluster)
    except (
        # What is no YAML, or has another shape than a kubeconfig, fails in any of these ways.
        kubernetes.config.ConfigException,
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
    ) as error:
        asked = (
            f"the kubeconfig's context {context!r} cannot be used" if context else "no Kubeflow endpoint is configured"
        )
        raise ConfigError(
            f"{asked}: pass host=, or set {ENDPOINT} (http://HOST:PORT; --endpoint), or give a kubeconfig whose "
            f"account may use the proxy of the service ml-pipeline ({error})"
        ) from error
    settings = kfp_server_api.Configuration()
    for name in ("ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "api_key", "api_key_prefix"):
        setattr(settings, name, getattr(cluster, name))
    service = f"api/v1/namespaces/{_server_namespace()}/services/ml-pipeline:http/proxy"
    settings.host = f"{cluster.host.rstrip('/')}/{service}"
    renew = cluster.refresh_api_key_hook
    if renew is not None:
        # It writes the cluster's address, too, and so must not be given these settings.
        settings.refresh_api_key_hook = lambda _: renew(cluster)
    return kfp_server_api.ApiClient(settings)


def _server_namespace() -> str:
    return os.environ.get(SERVER_NAMESPACE) or "kubeflow"


def _with_profile(api: Api, namespace: str | None) -> Api:
    if not api.ask("say whether it has profiles", "GET", "/healthz").get("multi_user"):
        if namespace:
            logger.info("%s has no profiles: the namespace %s is not used", api.place, namespace)
        return api
    own = SERVICE_ACCOUNT / "namespace"
    if not namespace and own.is_file():
        namespace = own.read_text(encoding="utf-8").strip()
    if not namespace:
        raise ConfigError(
            f"{api.place} has profiles: say whose runs these are with --namespace, or set {NAMESPACE} to the profile's "
            "namespace"
        )
    return dataclasses.replace(api, namespace=namespace)
