"""The documentation's site builds without warnings and without network, and names everything public."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kafka_marshal
import kafka_marshal.metrics

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "api"


def named_in_the_reference() -> set[str]:
    return {
        name
        for page in REFERENCE.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_the_reference_has_all_that_the_package_offers() -> None:
    wanted = {f"kafka_marshal.{name}" for name in kafka_marshal.__all__} - {"kafka_marshal.__version__"}
    named = named_in_the_reference()
    elsewhere = {each for module in (kafka_marshal.errors, kafka_marshal.metrics) for each in module.__all__}
    assert wanted - named - {f"kafka_marshal.{name}" for name in elsewhere} == set()


@pytest.mark.parametrize("name", sorted(named_in_the_reference()))
def test_what_the_reference_names_is_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last)


def test_each_page_is_in_the_menu() -> None:
    menu = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - menu == set()
    assert menu - pages == {"index.md", *(page.name for page in ROOT.glob("*.md") if page.name != "README.md")}


@pytest.mark.campaign
def test_the_site_builds_without_a_warning() -> None:
    """With proxies that don't answer, so that nothing can be downloaded."""
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, str(ROOT / "docs" / "build_site.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    site = ROOT / "out" / "site"
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?https?:""")
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []
    assert (site / "pictures" / "lease.svg").exists()
