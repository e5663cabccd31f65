"""What `make docs` does beside MkDocs.

Decisions are listed, README.md and CONTRIBUTING.md become pages, and links work in the site as in a checkout.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MOVED = {"README.md": "docs/overview.md", "CONTRIBUTING.md": "docs/contributing.md"}
"""Pages of the site that have another place in the checkout."""
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<place>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions, which bring their own titles."""
    (part,) = (part for part in config.nav or [] if "Decisions" in part)
    folder = Path(config.docs_dir)
    part["Decisions"] = [
        page.relative_to(folder).as_posix() for page in sorted(folder.glob("decisions/*.md"))
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside the folder of documents."""
    root = Path(config.config_file_path).parent
    for source, page in MOVED.items():
        content = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, posixpath.relpath(page, "docs"), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links of a checkout to the pages of the site."""
    place = f"docs/{page.file.src_uri}"
    source = next((source for source, moved in MOVED.items() if moved == place), place)
    return with_links_of_site(markdown, source, place)


def with_links_of_site(markdown: str, source: str, place: str) -> str:
    """The text of a page at `source` of a checkout as it is shown at `place`; links to what is no page become words."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        target = MOVED.get(target, target)
        if not target.startswith("docs/"):
            return found["text"]
        relative = posixpath.relpath(target, posixpath.dirname(place))
        return f"[{found['text']}]({relative}{found['place'] or ''})"

    return _LINK.sub(link, markdown)
