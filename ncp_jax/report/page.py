"""The HTML page: one file without scripts or outside resources, for wide and narrow screens, light and dark.

Its markup is page.html.jinja.
"""

import base64
import dataclasses
from collections.abc import Sequence
from importlib import resources

from ncp_jax.report.runs import ReportError

try:
    import jinja2
except ImportError as error:
    raise ReportError("the report page needs jinja2; pip install 'ncp-jax[report]'") from error


@dataclasses.dataclass(frozen=True)
class Image:
    """A chart, drawn for both schemes (PNG)."""

    title: str
    caption: str
    alt: str
    light: bytes
    dark: bytes


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence, and its charts."""

    heading: str
    text: str
    images: Sequence[Image]

    @property
    def anchor(self) -> str:
        return self.heading.lower().replace(" ", "-")


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run as the page shows it: table cells by heading, notes, the resolved config as text, its colours."""

    name: str
    task: str
    cells: dict[str, str]
    notes: Sequence[str]
    config: str | None
    colours: tuple[str, str]


def render(
    title: str, runs: Sequence[RunView], sections: Sequence[Section], files: Sequence[str],
    changes: Sequence[tuple[str, Sequence[str]]],
) -> str:  # fmt: skip
    """The page as text. Everything that came from a run is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["png"] = lambda data: "data:image/png;base64," + base64.b64encode(data).decode()
    text = resources.files("ncp_jax.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(title=title, runs=runs, sections=sections, files=files, changes=changes)
