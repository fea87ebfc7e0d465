"""The proxy does to a real server's requests what its rules say, and nothing to the others."""

import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.chaos.s3_proxy import Proxy, proxy_to
from tests.chaos.s3_requests import Fault, Rule
from tests.conftest import BUCKET

DATA = bytes(range(256)) * 300


@pytest.fixture
def proxy(s3_server: Any) -> Iterator[Proxy]:
    with proxy_to(s3_server) as running:
        yield running


@pytest.fixture
def client(s3_server: Any, proxy: Proxy) -> Any:
    """A client that asks once, and checks nothing that it is not told to."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=proxy.endpoint,
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
        region_name=s3_server.region,
        config=Config(
            retries={"total_max_attempts": 1}, read_timeout=0.3, response_checksum_validation="when_required"
        ),
    )


def stored(s3_server: Any, key: str) -> bytes | None:
    """What the server itself has under the key."""
    direct = s3_server.client()
    try:
        return bytes(direct.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    except direct.exceptions.NoSuchKey:
        return None


def test_undisturbed_every_byte_passes_and_every_request_is_written_down(client: Any, proxy: Proxy) -> None:
    client.put_object(Bucket=BUCKET, Key="proxy/a b+c", Body=DATA)
    assert client.get_object(Bucket=BUCKET, Key="proxy/a b+c")["Body"].read() == DATA
    part = client.get_object(Bucket=BUCKET, Key="proxy/a b+c", Range="bytes=5-9")["Body"].read()
    assert part == DATA[5:10]
    assert client.head_object(Bucket=BUCKET, Key="proxy/a b+c")["ContentLength"] == len(DATA)
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="proxy/")["Contents"]
    assert [item["Key"] for item in listed] == ["proxy/a b+c"]
    client.delete_object(Bucket=BUCKET, Key="proxy/a b+c")
    seen = [(one.method, one.target.partition("&")[0], one.length) for one in proxy.requests]
    key = "proxy/a b+c"
    assert seen == [
        ("PUT", key, len(DATA)),
        ("GET", key, 0),
        ("GET", key, 0),
        ("HEAD", key, 0),
        ("GET", "?list-type=2", 0),
        ("DELETE", key, 0),
    ]
    assert [one.answered for one in proxy.requests[:4]] == [0, len(DATA), 5, 0]


@pytest.mark.parametrize(
    ("fault", "is_after", "is_stored"),
    [
        ("500", False, False),
        ("500", True, True),
        ("503 SlowDown", False, False),
        ("timeout", False, False),
        ("timeout", True, True),
        ("reset", False, False),
        ("reset", True, True),
        ("reset mid-request", False, False),
        ("request truncated", False, False),
        ("request flipped", False, False),
        ("outage", False, False),
    ],
)
def test_a_put_fails_and_the_server_has_the_object_or_not(
    client: Any, proxy: Proxy, s3_server: Any, fault: Fault, is_after: bool, is_stored: bool
) -> None:
    key = f"proxy/{fault}/{is_after}"
    proxy.rules = [Rule(fault=fault, method="PUT", target="^proxy/", is_after=is_after)]
    with pytest.raises((BotoCoreError, ClientError)):
        client.put_object(Bucket=BUCKET, Key=key, Body=DATA)
    assert proxy.rules[0].done == 1
    assert stored(s3_server, key) == (DATA if is_stored else None)
    proxy.outage(0)
    # The rule is used up.
    client.put_object(Bucket=BUCKET, Key=key, Body=DATA)
    assert stored(s3_server, key) == DATA


def test_answers_are_cut_turned_and_delayed(client: Any, proxy: Proxy) -> None:
    client.put_object(Bucket=BUCKET, Key="proxy/read", Body=DATA)

    def read(fault: Fault) -> bytes:
        proxy.rules = [Rule(fault=fault, method="GET", seconds=0.2)]
        return bytes(client.get_object(Bucket=BUCKET, Key="proxy/read")["Body"].read())

    turned = [
        place for place, (one, other) in enumerate(zip(DATA, read("answer flipped"), strict=True)) if one != other
    ]
    assert turned == [len(DATA) // 2]
    with pytest.raises(BotoCoreError, match="IncompleteRead"):
        read("answer truncated")
    # This is the trap: without a length, nothing at all passes for the whole answer.
    assert read("answer headless") == b""
    started = time.monotonic()
    assert read("latency") == DATA
    assert time.monotonic() - started >= 0.2


def test_only_the_requests_that_a_rule_names_are_harmed(client: Any, proxy: Proxy) -> None:
    rule = Rule(fault="500", method="PUT", target="/named$", nth=2, times=2)
    proxy.rules = [rule]
    failed = []
    for number in range(5):
        client.put_object(Bucket=BUCKET, Key="proxy/other", Body=b"1")
        try:
            client.put_object(Bucket=BUCKET, Key="proxy/named", Body=b"1")
        except ClientError:
            failed.append(number)
    assert failed == [1, 2]
    assert (rule.seen, rule.done) == (5, 2)


def test_a_server_without_create_only_puts_replaces_what_is_there(client: Any, proxy: Proxy, s3_server: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="proxy/create", Body=b"1")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key="proxy/create", Body=b"2", IfNoneMatch="*")
    proxy.rules = [Rule(fault="create-only ignored")]
    client.put_object(Bucket=BUCKET, Key="proxy/create", Body=b"2", IfNoneMatch="*")
    assert stored(s3_server, "proxy/create") == b"2"


def test_an_outage_refuses_everything_until_it_is_over(client: Any, proxy: Proxy) -> None:
    proxy.outage(0.3)
    started, failures = time.monotonic(), 0
    while True:
        try:
            client.list_objects_v2(Bucket=BUCKET, Prefix="proxy/nothing")
            break
        except BotoCoreError:
            failures += 1
    assert time.monotonic() - started >= 0.25
    assert proxy.refused == failures > 1
