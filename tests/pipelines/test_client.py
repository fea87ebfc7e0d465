"""Reaching an endpoint: which one, who asks, whose runs, and what is said where it does not answer as it should."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from pipelines import client
from pipelines.api import Api, ConflictError, MissingError
from pipelines.client import open_api
from ratchet.errors import ClusterError, ConfigError, NotAllowedError
from tests.kfp_endpoint import KfpServer, forget_endpoints, kfp_server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_endpoints(monkeypatch, tmp_path)
    monkeypatch.setattr(client.kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))


def _runs(api: Api) -> list[str]:
    return [str(one["run_id"]) for one in api.pages("list its runs", "/runs", "runs", {"namespace": api.namespace})]


# -- where -----------------------------------------------------------------------------------------------------------


def test_the_address_is_the_argument_or_the_variable(server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_api(host=server.url).ui == server.url
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", f"{server.url}/")
    assert open_api().page("runs/details/r-1") == f"{server.url}/#/runs/details/r-1"
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.example/pipeline")
    assert open_api().page("runs/details/r-1") == "https://kubeflow.example/pipeline/#/runs/details/r-1"


def test_opening_asks_once_and_writes_nothing(server: KfpServer, tmp_path: Path) -> None:
    open_api(host=server.url)
    assert [(method, path) for method, path, _ in server.requests] == [("GET", "/apis/v2beta1/healthz")]
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'kubeflow\.example:8080': expected http://HOST:PORT or https://HOST/PATH"):
        open_api(host="kubeflow.example:8080")


def test_no_address_at_all_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"no Kubeflow endpoint is configured: pass host=, or set KF_PIPELINES_ENDPOINT"
    ):
        open_api()


def test_in_a_pod_the_service_is_the_clusters_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("alice\n")
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KF_PIPELINES_SERVER_NAMESPACE", "nowhere")
    with pytest.raises(ConfigError, match=r"cannot reach .* http://ml-pipeline\.nowhere\.svc\.cluster\.local:8888"):
        open_api()


def _kubeconfig(path: Path, url: str, context: str) -> None:
    account = {"name": "me", "user": {"token": "of-the-kubeconfig"}}
    cluster = {"name": "c", "cluster": {"server": url}}
    chosen = {"name": context, "context": {"cluster": "c", "user": "me"}}
    path.write_text(yaml.safe_dump({"users": [account], "clusters": [cluster], "contexts": [chosen]}))


def test_a_kubeconfigs_context_goes_through_the_clusters_proxy_before_the_variable(
    server: KfpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.prefix = "/api/v1/namespaces/kubeflow/services/ml-pipeline:http/proxy"
    _kubeconfig(tmp_path / "config", server.url, "lab")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "of-somebody-else")
    api = open_api(kube_context="lab")
    assert _runs(api) == []
    assert api.page("runs/details/r-1") == ""
    assert {one["authorization"] for one in server.headers} == {"Bearer of-the-kubeconfig"}
    with pytest.raises(ConfigError, match="the kubeconfig's context 'home' cannot be used: "):
        open_api(kube_context="home")


@pytest.mark.parametrize(
    "text",
    [
        "clusters: [",
        "just words",
        "[1, 2]",
        "5",
        "current-context: lab\ncontexts: 7",
        "current-context: lab\ncontexts: [{name: lab}]",
        "current-context: lab\ncontexts: [{name: lab, context: words}]",
        "current-context: lab\ncontexts: [{name: lab, context: {cluster: c, user: me}}]\nclusters: [{name: c}]",
    ],
)
def test_a_kubeconfig_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="no Kubeflow endpoint is configured: pass host="):
        open_api()


# -- who -------------------------------------------------------------------------------------------------------------


def test_a_token_comes_from_a_file_or_the_environment_and_is_sent_with_every_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with kfp_server(token="s3cret") as server:
        _runs(open_api(host=server.url, token_file=tmp_path / "token"))
        monkeypatch.setenv("KF_PIPELINES_TOKEN", "s3cret")
        _runs(open_api(host=server.url))
        monkeypatch.setenv("KF_PIPELINES_TOKEN", "another")
        monkeypatch.setenv("KF_PIPELINES_TOKEN_FILE", str(tmp_path / "token"))
        _runs(open_api(host=server.url))
        assert len(server.requests) == 6
        assert {one["authorization"] for one in server.headers} == {"Bearer s3cret"}


def test_a_token_that_is_no_text_is_said(server: KfpServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read the token in .*token: 'utf-8' codec"):
        open_api(host=server.url, token_file=tmp_path / "token")


def test_a_pods_projected_token_is_read_again_for_every_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: KfpServer
) -> None:
    token = tmp_path / "projected"
    token.write_text("first")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(token))
    api = open_api(host=server.url)
    token.write_text("second")
    _runs(api)
    assert [one["authorization"] for one in server.headers] == ["Bearer first", "Bearer second"]


def test_cookies_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KF_PIPELINES_COOKIES", "authservice_session=abc")
    with kfp_server(cookie="authservice_session=abc") as server:
        assert _runs(open_api(host=server.url)) == []


@pytest.mark.parametrize(("option", "what"), [("token_file", "token"), ("ca_cert", "CA certificate")])
def test_a_file_that_is_not_there_is_named(server: KfpServer, option: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"the {what} is to be read from nowhere, and there is no such file"):
        open_api(host=server.url, **{option: "nowhere"})


def test_without_the_right_token_it_is_said_who_asked_and_what_to_check(server: KfpServer) -> None:
    server.token = "s3cret"
    with pytest.raises(
        NotAllowedError, match=r"say whether it has profiles and refused \(401\): Unauth.*KF_PIPELINES_TOKEN"
    ):
        open_api(host=server.url)


# -- whose -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def profiles() -> Iterator[KfpServer]:
    with kfp_server(has_profiles=True) as served:
        yield served


def test_with_profiles_a_namespace_must_be_said(profiles: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"has profiles: say whose runs these are with --namespace, or set KF_PIPELINES"
    ):
        open_api(host=profiles.url)
    assert open_api(host=profiles.url, namespace="alice").namespace == "alice"
    monkeypatch.setenv("KF_PIPELINES_NAMESPACE", "bob")
    assert _runs(open_api(host=profiles.url)) == []
    assert profiles.requests[-1][1] == "/apis/v2beta1/runs?namespace=bob&page_size=100"


def test_with_profiles_a_pods_namespace_is_its_own(
    profiles: KfpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "namespace").write_text("carol\n")
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path)
    assert open_api(host=profiles.url).namespace == "carol"


def test_without_profiles_a_namespace_is_not_used(server: KfpServer) -> None:
    assert open_api(host=server.url, namespace="alice").namespace is None


# -- answers ---------------------------------------------------------------------------------------------------------


def test_nobody_there_is_said_at_once(server: KfpServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot reach the Kubeflow endpoint http://127\.0\.0\.1:9 to say whether"):
        open_api(host="http://127.0.0.1:9")


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.api.TIMEOUT", (0.2, 0.2))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot reach .* Read timed out"):
            open_api(host=address)


def test_a_way_to_a_login_page_is_recognised(server: KfpServer) -> None:
    server.answers["/healthz"] = (302, {"Location": "/dex/auth"}, b"<a href='/dex/auth'>Found</a>")
    with pytest.raises(
        NotAllowedError, match=r"sent elsewhere \(302.*login page.*Pass KF_PIPELINES_TOKEN or KF_PIPELINES_COOK"
    ):
        open_api(host=server.url)


def test_a_page_instead_of_an_answer_is_recognised(server: KfpServer) -> None:
    server.answers["/healthz"] = (200, {"Content-Type": "text/html"}, b"<html>Please log in</html>")
    with pytest.raises(
        ClusterError, match=r"something other than JSON: '<html>Please log in</html>'; it is no Kubeflow"
    ):
        open_api(host=server.url)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, NotAllowedError), (404, MissingError), (409, ConflictError), (400, ClusterError), (500, ClusterError)],
)
def test_a_refusal_says_what_was_asked_and_what_the_server_said(
    server: KfpServer, status: int, kind: type[Exception]
) -> None:
    api = open_api(host=server.url)
    server.answers["/runs/r-9"] = (status, {}, b'{"error": "no", "message": "run r-9 is not yours"}')
    with pytest.raises(kind, match=rf"^the Kubeflow endpoint {server.url} was asked to show r-9.*run r-9 is not yours"):
        api.ask("show r-9", "GET", "/runs/r-9")


def test_a_gateway_that_hiccups_is_asked_again_by_readers_only(server: KfpServer) -> None:
    api = open_api(host=server.url)
    server.answers["/runs"] = (503, {}, b"upstream connect error")
    for method, times in (("GET", 3), ("POST", 1)):
        server.requests.clear()
        with pytest.raises(ClusterError, match=r"failed \(503\): upstream connect error"):
            api.ask("do something", method, "/runs", body={})
        assert len(server.requests) == times


def test_listings_are_read_to_their_end(server: KfpServer) -> None:
    server.page = 2
    expected = [server.add_run() for _ in range(5)]
    assert _runs(open_api(host=server.url)) == expected
    assert len(server.asked("GET", "/runs")) == 3


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1, signed by itself, with its key in the same file."""
    x509 = pytest.importorskip("cryptography.x509")
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(built.public_bytes(serialization.Encoding.PEM) + private)
    return path


@pytest.fixture
def tls_url(certificate: Path) -> Iterator[str]:
    """The address of something that answers {} to three requests over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        answer = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        )
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listening.accept()
                with contextlib.suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as secure:
                    secure.recv(65536)
                    secure.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()


def test_a_certificate_is_checked_against_the_authority_that_is_named(
    tls_url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*name the server's authority with --ca-cert"):
        open_api(host=tls_url)
    assert open_api(host=tls_url, ca_cert=certificate).place.endswith(tls_url)
    monkeypatch.setenv("KF_PIPELINES_SSL_CA_CERT", str(certificate))
    assert open_api(host=tls_url).namespace is None


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_certificate_need_not_be_checked(tls_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_api(host=tls_url, verify_ssl=False).namespace is None
    monkeypatch.setenv("KF_PIPELINES_VERIFY_SSL", "false")
    assert open_api(host=tls_url).namespace is None
