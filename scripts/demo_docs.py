"""Reads a page of Python's HTML documentation (as Sphinx writes it) into plain paragraphs.

Inline markup is dropped, code keeps its lines and is indented by four spaces, tables, version notes and
cross-reference boxes are left out.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

DOCUMENT_CHARS = 6000
"""Sections are gathered into documents of about this many characters."""

VOID_TAGS = {"br", "img", "hr", "input", "meta", "link", "col", "wbr"}
SKIPPED_TAGS = {"table", "script", "style", "nav", "sup", "svg", "math"}
# fmt: off
SKIPPED_CLASSES = {
    "headerlink", "viewcode-link", "section-number", "toctree-wrapper", "versionadded", "versionchanged",
    "deprecated", "deprecated-removed", "seealso", "audit-hook", "availability", "productionlist",
    "contents", "admonition-title", "topic", "reference-source", "impl-detail", "wasm-notavail",
    "field-list", "footnote-reference", "brackets",
}
# fmt: on
TEXT_ROLES = ("paragraph", "code", "heading", "signature", "term")
"""Roles of the elements that hold running text."""

TYPOGRAPHY = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "→": "->"}
    | {"—": "-", "–": "-", "\u00a0": " ", "¶": ""}
)
"""Typographic marks and what they become: a small vocabulary is better spent on words."""


@dataclass
class Entry:
    """A documented function, class, module or glossary term."""

    name: str
    kind: str
    signature: str
    paragraphs: list[str] = field(default_factory=list)


@dataclass
class Section:
    """A heading and the paragraphs under it; `opening` are those that belong to no entry."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    opening: list[str] = field(default_factory=list)


@dataclass
class Page:
    """One page: its sections in order and the entries found in them."""

    name: str
    sections: list[Section] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def documents(self) -> list[str]:
        """Plain texts: whole sections, gathered up to about `DOCUMENT_CHARS`."""
        texts: list[str] = []
        for section in self.sections:
            text = "\n\n".join([section.title, *section.paragraphs])
            if not section.paragraphs:
                continue
            if texts and len(texts[-1]) + len(text) < DOCUMENT_CHARS:
                texts[-1] += "\n\n\n" + text
            else:
                texts.append(text)
        return texts

    def openings(self) -> list[tuple[str, list[str]]]:
        """(title, first paragraphs) of the sections whose title says what they are about."""
        folder = self.name.partition("/")[0]
        if folder not in ("tutorial", "reference", "howto", "faq"):
            return []
        return [(section.title, section.opening) for section in self.sections if len(section.title) > 6]


def clean(text: str) -> str:
    """One line of plain text: typographic marks as ASCII, white space folded."""
    return " ".join(text.translate(TYPOGRAPHY).split())


def plain_paragraphs(text: str) -> list[str]:
    """Paragraphs of a docstring, dedented; prose becomes one line each, anything indented keeps its lines."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n")):
        lines = block.translate(TYPOGRAPHY).rstrip().splitlines()
        prose = lines and not any(line[:1] in " \t>*-+|=#.:" for line in lines) and len(lines[0]) > 40
        short = len(lines) == 1
        if lines:
            paragraphs.append(clean(block) if prose or (short and lines[0][:1] != " ") else "\n".join(lines))
    return paragraphs


def read_page(path: Path, name: str) -> Page:
    """Reads one HTML file."""
    reader = _Reader(name)
    reader.feed(path.read_text("utf-8"))
    reader.close()
    return reader.page


class _Reader(HTMLParser):
    """Walks the tags and fills `page`.

    `stack` holds (tag, role) of the open elements. `pending` are the signatures read since the last
    description ended, `owners` the entry of each open description (None where it describes no entry).
    """

    def __init__(self, name: str) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page(name)
        self.stack: list[tuple[str, str]] = []
        self.skipping = 0
        self.in_body = False
        self.buffer: list[str] = []
        self.prefix = ""
        self.object_kinds: list[str] = []
        self.pending: list[Entry] = []
        self.owners: list[Entry | None] = []
        self.anchor = ""

    def _role(self, tag: str, attributes: dict[str, str]) -> str:
        classes = attributes.get("class", "").split()
        if tag == "dl":
            known = "glossary" in classes or "py" in classes
            self.object_kinds.append("term" if "glossary" in classes else classes[-1] if known else "")
        if tag in SKIPPED_TAGS or SKIPPED_CLASSES.intersection(classes):
            return "skip"
        if tag == "div" and attributes.get("role") == "main":
            return "body"
        if tag == "dt":
            return "signature" if "sig" in classes else "term"
        return {"p": "paragraph", "pre": "code", "li": "item", "dd": "description"}.get(
            tag, "heading" if re.fullmatch("h[1-6]", tag) else ""
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID_TAGS:
            return
        attributes = {key: value or "" for key, value in attrs}
        role = self._role(tag, attributes)
        self.stack.append((tag, role))
        if role == "skip":
            self.skipping += 1
        elif role == "body":
            self.in_body = True
        elif role in TEXT_ROLES:
            self._flush()
            self.anchor = attributes.get("id", "")
        elif role == "item" and self.in_body and not self.skipping:
            self._flush()
            self.prefix = "- "
        elif role == "description":
            self._flush()
            outer = self.owners[-1] if self.owners else None
            self.owners.append(self.pending[0] if self.pending else outer)
            self.pending = []

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID_TAGS or not any(tag == open_tag for open_tag, _ in self.stack):
            return
        while self.stack:
            open_tag, role = self.stack.pop()
            self._leave(open_tag, role)
            if open_tag == tag:
                return

    def _leave(self, tag: str, role: str) -> None:
        if role == "skip":
            self.skipping -= 1
        elif role == "body":
            self._flush()
            self.in_body = False
        elif role in TEXT_ROLES:
            self._flush(role)
        elif role == "description":
            self._flush()
            self.owners.pop()
        if tag == "dl":
            self.object_kinds.pop()
            self.pending = []

    def handle_data(self, data: str) -> None:
        if self.in_body and not self.skipping:
            self.buffer.append(data)

    def _flush(self, role: str = "paragraph") -> None:
        raw = "".join(self.buffer)
        self.buffer = []
        text = clean(raw)
        if not text or self.skipping:
            return
        if role == "heading":
            self._open_section(text)
        elif role in ("signature", "term"):
            self._open_entry(text, role)
        elif role == "code" and "::=" not in raw:
            self._add(textwrap.indent(textwrap.dedent(raw.translate(TYPOGRAPHY)).strip("\n"), "    "))
        elif role != "code" and not text.startswith("Source code:"):
            self._add(self.prefix + text)
            self.prefix = ""

    def _open_section(self, text: str) -> None:
        module = re.match(r"([\w.]+) - ", text)
        self.page.sections.append(Section(text))
        self.owners = []
        if module and self.page.name.startswith("library/"):
            self.page.entries.append(Entry(module[1], "module", ""))
            self.owners = [self.page.entries[-1]]

    def _open_entry(self, text: str, role: str) -> None:
        kind = self.object_kinds[-1] if self.object_kinds else ""
        name = text if role == "term" else self.anchor
        if kind and name:
            entry = Entry(name, kind, "" if role == "term" else text)
            self.pending.append(entry)
            if len(self.pending) == 1:
                self.page.entries.append(entry)
        self._add(text, entry_title=True)

    def _add(self, text: str, entry_title: bool = False) -> None:
        if not self.page.sections:
            self.page.sections.append(Section(self.page.name))
        section = self.page.sections[-1]
        section.paragraphs.append(text)
        owner = self.owners[-1] if self.owners else None
        if entry_title:
            return
        if owner is not None:
            owner.paragraphs.append(text)
        if owner is None or owner.kind == "module":
            section.opening.append(text)
