"""Makes the pictures and explorers of the site: a hook of mkdocs. They are not committed.

A page has ``<!-- picture: FILE.svg CAPTION -->`` where a picture belongs, and ``<!-- explorer: FILE.html TITLE -->``
where a plan moves. On a code host nothing shows there.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from blocks import predicted, schedules
from blocks.explorers import explorers

import distgemm
from distgemm.schedulers import schedule_mesh_rank
from distgemm.viz.figures import draw_schedule, draw_timeline

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

EXPLORER = re.compile(r"<!-- explorer: (\S+) (.+?) -->")
FRAME = r"""<iframe class="explorer" src="\1" title="\2" loading="lazy"></iframe>

[\2, in a window of its own](\1)"""
PICTURE = re.compile(r"<!-- picture: (\S+) (.+?) -->")


def pictures() -> dict[str, Callable[[Path], None]]:
    """What draws each picture, by its place in the site."""
    found: dict[str, Callable[[Path], None]] = {}
    for layer, chunks in (("fc1", 1), ("fc2", 2)):
        problem = predicted.layer_problem(layer, "70B", 8192)
        timeline = predicted.timeline(problem, predicted.RECOMMENDED[layer][0], chunks)
        found[f"{layer}.svg"] = partial(draw_timeline, timeline)
    for name in distgemm.list_schedules():
        scheduler = distgemm.get_schedule(name, mesh=schedules.MESHES[schedule_mesh_rank(name)])
        found[f"schedules/{name}.svg"] = partial(draw_schedule, scheduler)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures and explorers to the site."""
    from mkdocs.structure.files import File

    with tempfile.TemporaryDirectory() as folder:
        for place, make in {**pictures(), **explorers()}.items():
            path = Path(folder) / Path(place).name
            make(path)
            files.append(File.generated(config, place, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the pictures and explorers of a page, with links to them."""
    return EXPLORER.sub(FRAME, PICTURE.sub(r"[![\2](\1)](\1)", markdown))
