"""Links between pages lead somewhere, to a heading, too; README has few; CI runs what a developer runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kafka_marshal.instance import RELEASE
from rationalizer.levels import SUPPORTED_LEVEL
from tests.test_house_rules import MODULES, our_files, setup_cfg

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "docs", "examples")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
LINK = re.compile(r"\]\(([^()\s]+)\)")


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Valid anchors: headings as GitHub and the site name them, and explicit anchors of the page."""
    text = without_code(page)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return {*plain, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page)):
        if link.startswith(("https:", "http:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_nested_lists_are_indented_by_four(page: Path) -> None:
    """With two spaces the site shows one flat list."""
    assert re.findall(r"^ {1,3}[-*] .*$", without_code(page), re.M) == []


def shown_by_commands(page: Path) -> str:
    """What the blocks of a page show that a terminal printed."""
    return "\n".join(re.findall(r"^```(?:console)?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_levels_and_releases_are_those_of_this_release(page: Path) -> None:
    shown = shown_by_commands(page)
    # As init prints the level, and status --members the release, between the PID and a time.
    assert set(re.findall(r"number at \d+; level (\d+)", shown)) <= {str(SUPPORTED_LEVEL)}
    assert set(re.findall(r"^\S+ .*\d  +(\d+\.\d+\.\d+)  ", shown, re.M)) <= {RELEASE}


def test_readme_names_each_extra_and_installs_what_its_commands_need() -> None:
    config = setup_cfg()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = set(config["options.extras_require"]) - {"dev", "docs"}
    assert set(re.findall(r"`\[([a-z]+)\]`", readme)) == extras
    assert "`pip install 'kafka-marshal[cli]'`" in readme


def test_the_pages_that_the_code_names_are_there() -> None:
    named = {
        name
        for path in MODULES.values()
        for name in re.findall(r"docs/(?:protocol/)?[a-z0-9-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_readme_has_at_most_twenty_links() -> None:
    assert 5 < len(LINK.findall(without_code(ROOT / "README.md"))) <= 20


def test_ci_runs_what_a_developer_runs() -> None:
    forms = sorted((ROOT / ".github").rglob("*.yml"))
    read = {form.name: yaml.safe_load(form.read_text(encoding="utf-8")) for form in forms}
    [job] = read["ci.yml"]["jobs"].values()
    assert any(step.get("run", "").endswith(".ci/run") for step in job["steps"])
    assert job["timeout-minutes"] == 30
    assert {"bug.yml", "feature.yml"} < set(read)


#: Names of code in ARCHITECTURE.md that are no modules.
NO_MODULES = {"__marshal", "done", "revoke_timeout", "take"}


def test_the_modules_that_architecture_names_are_there() -> None:
    parts = {part.partition(".")[0] for path in our_files(ROOT) for part in path.relative_to(ROOT).parts}
    text = without_code(ROOT / "ARCHITECTURE.md")
    named = set(re.findall(r"`([a-z_][a-z_/]*)(?:\.py)?`", text))
    assert 40 < len(re.findall(r"`[^`\n]+`", text)) <= 120, "a way of ten minutes, not an index"
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= 2_000
    assert {name for name in named - NO_MODULES if not set(name.strip("/").split("/")) <= parts} == set()
