"""What the pages say of the code that a reader may look up: passes, options of a step, and where links lead."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from stepgraph.config import command_line
from stepgraph.config.commands import COMMANDS, MORE
from stepgraph.config.presets import PRESETS
from stepgraph.options import StepOptions, choices
from stepgraph.passes import PASSES
from stepgraph.passes.order import ORDER

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")])


def text_of(page):
    """The page without what stands in blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """What a link into the page may name: a heading in small letters, without marks, a dash for each space."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def rows(page, width):
    """The cells of each row of the page's tables that has so many."""
    lines = (line for line in text_of(page).splitlines() if line.startswith("| "))
    found = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [cells for cells in found if len(cells) == width]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


#: Options of torchrun and accelerate, and one that a page says was removed.
ELSEWHERE = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--use_fsdp", "--fsdp_version"}
ELSEWHERE |= {"--against"}


def test_the_options_that_pages_name_exist():
    records = [kind() for _, kinds in COMMANDS.values() for kind in kinds]
    records += [PRESETS[name]() for name in ("llama3-debug", "deepseek-v3-debug")]
    known = set(command_line._flags(option for record in records for option in command_line.options_of(record)))
    known |= {"--help", "--help-all", *(name for names in MORE.values() for name in names)} | ELSEWHERE
    for page in PAGES:
        if page.parent.name != "benchmarks":  # whose scripts have options of their own
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_.-]*[a-z0-9]", page.read_text(encoding="utf-8")))
            assert named <= known, (page.name, named - known)


def test_the_table_of_passes_is_their_order():
    told = [cells for cells in rows(ROOT / "docs" / "passes.md", 4) if cells[1] in ("exact", "numerics")]
    assert [name.strip("`") for name, *_ in told] == list(ORDER)
    for name, tier, needs, _ in told:
        found = PASSES[name.strip("`")]
        needed = {"GPU": found.needs_cuda, "ranks": found.needs_process_group}
        assert (tier, needs) == (found.tier, "".join(word for word, so in needed.items() if so))


def test_the_table_of_step_options_has_each_with_its_values():
    table = {name.strip("`"): (option, values) for name, option, values in rows(ROOT / "docs" / "passes.md", 3)}
    for field in fields(StepOptions):
        option, values = table[field.name]
        flag = field.name.replace("_", "-")
        assert option.startswith((f"`--{flag}", f"`--no-{flag}"))
        assert str(field.default) in values.split(";")[0]
        for value in choices(StepOptions).get(field.name, ()):
            assert field.type is bool or f'"{value}"' in values or str(value) in values
