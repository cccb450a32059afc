"""The generated pages of docs/reference are current."""

import importlib.util
from types import ModuleType

import click
import msgspec
import pytest

from refold.journal import events
from tests.project.tree import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["generate_events", "generate_cli", "generate_audit"])
def test_the_page_is_what_its_script_writes(name: str) -> None:
    module = script(name)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run `make docs`"


def test_every_event_has_its_section() -> None:
    page = script("generate_events").page()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [
        *(event.__name__ for event in events.EVENT_TYPES),
        "Parts of events",
    ]


def test_a_field_that_nobody_explained_is_named() -> None:
    with pytest.raises(KeyError, match=r"RequestMoved\.shelf has no meaning"):
        script("generate_events").meaning("RequestMoved", "shelf")


def test_no_meaning_outlives_its_field() -> None:
    module = script("generate_events")
    fields = {
        (struct.__name__, field.name)
        for struct in (*events.EVENT_TYPES, *module.NESTED)
        for field in msgspec.structs.fields(struct)
    }
    known = {name for _, name in fields} | {f"{struct}.{name}" for struct, name in fields}
    assert module.MEANINGS.keys() <= known


def test_the_walk_shows_every_verb_but_hidden_ones() -> None:
    group = click.Group("tool", {"seen": click.Command("seen"), "unseen": click.Command("unseen", hidden=True)})
    assert [path for path, _ in script("generate_cli").helps(group, "tool")] == ["tool", "tool seen"]
