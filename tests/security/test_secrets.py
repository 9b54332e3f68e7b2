"""No log line, error, page, report or process's command line contains a password, key or token.

Each setting with a secret gets a recognizable one. Pages of another server are one more line of SERVERS.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import stat
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flights.publish import Scene
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.admin import Admin
from kafka_marshal.errors import MarshalError
from kafka_marshal.pipeline.audit.kafka import KafkaSource
from kafka_marshal.pipeline.session import kafka_options
from kafka_marshal.pipeline.source import SourceOptions
from kafka_marshal.secret import HIDDEN, hide, is_secret, scrub, values_of
from kafka_marshal.sinks import PostgresSink
from kafka_marshal.testing.layout import BrokerLayout
from tests.cli.harness import Command, start
from tests.client.conftest import wait_until

#: Part of all secrets here, and of nothing else.
MARK = "hunter2"

NOBODY = "127.0.0.1:1"

#: Settings with secrets that librdkafka accepts together, with any protocol.
PLANTED: dict[str, object] = {
    "sasl.username": "ann",
    "sasl.password": f"{MARK} sasl 'quoted' \"twice\"",
    "ssl.key.password": f"{MARK}-key",
    "ssl.keystore.password": f"{MARK}-store",
    "sasl.oauthbearer.client.secret": f"{MARK}-client",
    "sasl.oauthbearer.config": f"principal=ann extension_key={MARK}",
    "sasl.oauthbearer.assertion.private.key.passphrase": f"{MARK}-phrase",
    "sasl.oauthbearer.token.endpoint.url": f"http://ann:{MARK}-user@127.0.0.1:1/token?key={MARK}-query",
}

OIDC = {
    **PLANTED,
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanisms": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.client.id": "ann",
}

BAD_KEY = f"-----BEGIN PRIVATE KEY-----\n{MARK}\n-----END PRIVATE KEY-----\n"


class Printed:
    """Everything printed, logged and raised."""

    def __init__(self) -> None:
        self._texts: list[tuple[str, str]] = []
        self.lines = io.StringIO()

    def add(self, where: str, text: object) -> None:
        self._texts.append((where, text if isinstance(text, str) else repr(text)))

    def raised(self, where: str, call: Callable[[], object]) -> None:
        """Check that the call fails, and record its error in all printed forms."""
        with pytest.raises(Exception) as caught:
            call()
        self.add(where, str(caught.value))
        self.add(where, caught.value)
        self.add(where, "".join(traceback.format_exception(caught.value)))

    def logged(self) -> str:
        """Lines of all loggers, at DEBUG."""
        return self.lines.getvalue()

    def check(self) -> None:
        assert self._texts
        assert [(where, text) for where, text in self._texts if MARK in text] == []


@pytest.fixture
def printed() -> Iterator[Printed]:
    """Record all log lines, at DEBUG."""
    found = Printed()
    handler = logging.StreamHandler(found.lines)
    root, ours = logging.getLogger(), logging.getLogger("kafka_marshal")
    before = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    yield found
    root.removeHandler(handler)
    root.setLevel(before[0])
    ours.setLevel(before[1])
    found.add("log", found.logged())
    found.check()


def test_arguments_in_the_wrong_place(printed: Printed) -> None:
    member: dict[str, Any] = {"group_id": "g"}
    pairs = list(PLANTED.items())
    text = "\n".join(f"{name}={value}" for name, value in PLANTED.items())
    for wrong in (pairs, text, tuple(pairs), [PLANTED]):
        printed.raised("config", lambda wrong=wrong: Marshal(NOBODY, config=wrong, **member))  # type: ignore[misc]
        printed.raised("bootstrap", lambda wrong=wrong: Marshal(wrong, **member))  # type: ignore[misc]
        printed.raised("admin", lambda wrong=wrong: Admin(NOBODY, config=wrong))  # type: ignore[misc]
    printed.raised("bootstrap", lambda: Marshal(PLANTED, **member))  # type: ignore[arg-type]
    for address in (f"ann:{MARK}@127.0.0.1:9092", f"SASL_SSL://ann:{MARK}@127.0.0.1:9092"):
        printed.raised("bootstrap", lambda address=address: Marshal(address, **member))  # type: ignore[misc]
    printed.raised("group_id", lambda: Marshal(NOBODY, group_id=PLANTED))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sasl.pasword": MARK},
        {"ssl.key.pem": BAD_KEY, "security.protocol": "ssl"},
        {"sasl.password": [MARK]},
        {"sasl.password": {"secret": MARK}},
        {"security.protocol": "no such"},
        {"acks": "1"},
        {"sasl.jaas.config": f'org.apache.Login required password="{MARK}";'},
        {"oauth_cb": f"{MARK}"},
    ],
    ids=["typo", "key", "list", "mapping", "protocol", "fixed", "jaas", "function"],
)
def test_configurations_that_are_refused(printed: Printed, wrong: dict[str, object]) -> None:
    config = {**PLANTED, **wrong}
    made: list[KafkaCluster] = []

    def make() -> None:
        made.append(KafkaCluster(NOBODY, config))
        made[0].topics(0.3)

    printed.raised("cluster", make)
    for cluster in made:
        cluster.close()


@pytest.mark.parametrize("config", [PLANTED, OIDC], ids=["plain", "oidc"])
def test_what_librdkafka_says_when_it_says_all(printed: Printed, config: dict[str, object]) -> None:
    # A separate logger: ours drops lines that it has just passed on.
    cluster = KafkaCluster(NOBODY, {**config, "debug": "all", "logger": logging.getLogger("theirs")})
    printed.raised("topics", lambda: cluster.topics(0.7))
    tail = cluster.tail("t", {0: 0})
    tail.read(0.2)
    reader = cluster.data_reader("g", {})
    appender = cluster.appender("t", delivery_timeout_ms=300)
    producer = cluster.producer({}, delivery_timeout_ms=300)
    appender.append(0, b"v", lambda ack: printed.add("ack", ack))
    producer.send("t", b"v", None, (), lambda error: printed.add("sent", error))
    appender.flush(2)
    producer.flush(2)
    printed.add("repr", [cluster, tail, reader, appender, producer])
    for each in (tail, reader, appender, producer, cluster):
        each.close()
    said = printed.logged()
    assert "sasl.password = [redacted]" in said, "what is looked at is what librdkafka dumps"
    if config is OIDC:
        assert f"{HIDDEN}@127.0.0.1:1/token?{HIDDEN}" in said


def test_reprs_of_what_has_a_configuration(printed: Printed) -> None:
    texts = {name: str(value) for name, value in PLANTED.items()}
    options = {"bootstrap_servers": NOBODY, "group_id": "g", "topics": "t"}
    printed.add("options", SourceOptions.parse({**options, **{f"kafka.{name}": texts[name] for name in texts}}))
    printed.add("source", KafkaSource(NOBODY, PLANTED, "__marshal"))
    printed.add("scene", Scene.on_own_kafka(NOBODY, PLANTED))
    printed.add("admin", Admin(NOBODY, config=PLANTED))
    for config in ({"security.protocol": "SASL_SSL"}, {"ssl.key.pem": BAD_KEY}, {"ssl.crl.location": "x"}):
        printed.raised("java", lambda config=config: kafka_options(NOBODY, {**PLANTED, **config}))  # type: ignore[misc]


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://ann:{MARK}@127.0.0.1:1/db",
        f"postgresql://ann:pa@{MARK}@127.0.0.1:1/db",
        f"postgresql://ann:pa/{MARK}@127.0.0.1:1/db",
        f"postgresql://ann:pa?{MARK}@127.0.0.1:1/db",
        f"postgresql://ann:%zz{MARK}@127.0.0.1:1/db",
        f"postgresql://ann:x@127.0.0.1:1/db?sslpassword={MARK}&bogus={MARK}",
        f"postgres//ann:{MARK}@127.0.0.1/db",
        f"host=127.0.0.1 port=1 password={MARK}",
        f"host=127.0.0.1 port=1 password=a {MARK}",
        f"host=127.0.0.1 port=1 password='{MARK}",
        f"host=127.0.0.1 port={MARK}",
    ],
)
def test_dsns_of_sinks(printed: Printed, dsn: str) -> None:
    sink = PostgresSink(dsn)

    def write() -> None:
        with sink.transaction("g", [("t", 0, 1, 1)]):
            pass

    printed.raised("sink", write)
    printed.add("repr", sink)
    assert pickle.loads(pickle.dumps(sink))._dsn == dsn, "executors get it"
    printed.raised("dsn", lambda: PostgresSink({"password": MARK}))  # type: ignore[arg-type]


def test_the_command(printed: Printed, command: Command, tmp_path: Path, kafka_bootstrap: str) -> None:
    """A failing login, wrong settings, invalid lines; each with --debug."""
    path = tmp_path / "client.properties"
    for more in (
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc"},
        {"sasl.pasword": MARK},
        {"debug": "all", "security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN"},
        {f"sasl.password {MARK}\n#": ""},
    ):
        config = {**PLANTED, "sasl.oauthbearer.client.id": "ann", **more}
        path.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
        for args in (("status",), ("init",)):
            ran = command(*args, "--bootstrap", kafka_bootstrap, "--config", path, "--debug", "--timeout", "0.5")
            assert ran.status in (2, 3), ran.err
            printed.add(f"{args[0]} {more}", ran.out + ran.err)


@contextmanager
def metrics_server(marshal: Marshal, _: tuple[str, ...]) -> Iterator[str]:
    """Its address."""
    yield marshal.serve(0).url


@contextmanager
def ui_server(_: Marshal, reach: tuple[str, ...]) -> Iterator[str]:
    """The command's page; its address without the last slash."""
    quiet = [option for option in reach if option != "--debug"]  # or unread output fills its pipe
    with start("ui", "--port", "0", "--json", *quiet) as running:
        assert running.stdout is not None
        yield str(json.loads(running.stdout.readline())["url"]).rstrip("/")


#: All HTTP servers, made from a member and the command's options for the same log, and their paths.
SERVERS: list[tuple[Callable[[Marshal, tuple[str, ...]], AbstractContextManager[str]], tuple[str, ...]]] = [
    (metrics_server, ("/metrics", "/livez", "/readyz", "/lag", "/nowhere")),
    (ui_server, ("/", "/api/log", "/api/state?group=g", "/api/jobs", "/api/nowhere")),
]


def page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return f"{answer.headers}{answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.headers}{error.read().decode()}"


def test_a_member_at_work(printed: Printed, command: Command, tmp_path: Path, coordination_topic: Any) -> None:
    """Its pages, metrics and log, its records in Kafka, and the command lines of its processes."""
    bootstrap, topic = coordination_topic.bootstrap, coordination_topic.name
    config = {**PLANTED, "debug": "all"}
    with Marshal(
        bootstrap, group_id="g", client_id="a", topic=topic, config=config, heartbeat_interval=0.6, watchdog=True
    ) as marshal:
        lease = marshal.claim("t", 0, timeout=10)
        assert marshal.watchdog is not None
        watchdog = marshal.watchdog
        wait_until(lambda: watchdog.is_ready, what="the watchdog")
        printed.add("reprs", [marshal, lease, marshal.world, marshal.health(), marshal.metrics(), watchdog])
        printed.add("texts", f"{marshal.health()} {marshal.metrics()} {marshal.instance_id}")
        for pid in (os.getpid(), watchdog.pid):
            for name in ("cmdline", "environ"):
                printed.add(f"{name} of {pid}", Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace"))
        file = tmp_path / "client.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
        reach = ("--bootstrap", bootstrap, "--config", str(file), "--topic", topic, "--debug")
        for server, paths in SERVERS:
            with server(marshal, reach) as url:
                for path in paths:
                    printed.add(path, page(url + path))
        for args in (("status",), ("status", "--json"), ("log",), ("dump",), ("group", "g"), ("check",)):
            ran = command(*args, *reach)
            assert ran.status in (0, 1), ran.err
            printed.add(str(args), ran.out + ran.err)


def test_files_with_passwords_are_for_their_owner_alone(tmp_path: Path) -> None:
    """A local broker's users, in a kept folder that may be readable."""
    layout = BrokerLayout(tmp_path / "broker-1", 1, 1, 1, 2, 3)
    for _ in range(2):  # the second time the file exists
        layout.write([layout], {"listener.name.client.plain.sasl.jaas.config": f'password="{MARK}"'})
        assert MARK in layout.properties_file.read_text()
        assert stat.S_IMODE(layout.properties_file.stat().st_mode) == 0o600


# -- redaction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PLANTED if "user" not in name and "url" not in name])
def test_settings_with_secrets_are_known_by_name(name: str) -> None:
    assert is_secret(name)
    assert is_secret(f"the option 'kafka.{name.upper()}'")


@pytest.mark.parametrize("name", ["sasl.username", "ssl.ca.location", "sasl.oauthbearer.token.endpoint.url", "topic"])
def test_others_are_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        repr(PLANTED),
        repr(list(PLANTED.items())),
        "\n".join(f"{name}={value}" for name, value in PLANTED.items() if "sasl.password" not in name),
        f'Login required username="ann" password="{MARK} \\" {MARK}";',
        f"postgresql://ann:{MARK}@db/x",
        f"http://db/x?key={MARK}",
    ],
)
def test_what_a_text_itself_calls_a_secret_is_hidden(text: str) -> None:
    assert MARK not in scrub(text).replace(f"extension_key={MARK}", "")
    assert HIDDEN in scrub(text)


def test_plain_texts_stay_as_they_are() -> None:
    for text in ("orders [3] at http://localhost:9092/x: no answer", "'t', 3, b'v'", "a@b, c:d"):
        assert scrub(text) == text


def test_a_long_word_is_read_once() -> None:
    """Not from each of its letters, which took minutes."""
    for letter in "x-":
        assert scrub(letter * 50_000) == letter * 50_000


def test_values_are_hidden_wherever_they_stand() -> None:
    values = values_of(OIDC)
    assert all(MARK in value for value in values)
    assert (
        hide(f"asked {OIDC['sasl.oauthbearer.token.endpoint.url']} with {OIDC['sasl.password']!r}", values).count(
            HIDDEN
        )
        == 3
    )
    for plain in ("ab", "kafka", "marshal"):
        assert values_of({"sasl.password": plain}) == (), "hidden in our own words, it would be told"
    with pytest.raises(MarshalError, match=r"\[hidden\]"):
        Marshal(NOBODY, group_id="g", config=[("sasl.password", MARK)])  # type: ignore[arg-type]
