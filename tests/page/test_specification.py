"""The page's Markdown by the cases of CommonMark's specification. ``make test-page`` installs
them."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

from tests.page.visit import Visit

SPECIFICATION = Path(__file__).parent / "node/node_modules/commonmark-spec/spec.txt"

HTML = ("HTML blocks", "Raw HTML")
"""Sections that are not judged: HTML in a reply is text."""

DEVIATIONS = {
    25: "of HTML's 2200 names of characters the page knows those that models write",
    297: "a bullet below a number is in its item from two columns on, as models indent",
    356: "5*6*78 is a product",
    602: "addresses are links without brackets too, as on GitHub",
    608: "addresses are links without brackets too, as on GitHub",
    611: "addresses are links without brackets too, as on GitHub",
}

pytestmark = pytest.mark.skipif(
    not SPECIFICATION.exists(), reason="make test-page installs the specification"
)


class Case(NamedTuple):
    number: int
    section: str
    text: str
    html: str

    @property
    def has_html(self) -> bool:
        """Whether its text has tags that the specification passes on."""
        tags = re.findall(r"<[A-Za-z/!?][^>]*>", self.text)
        return self.section in HTML or any(tag in self.html for tag in tags)


def read_cases(text: str) -> list[Case]:
    pattern = r"(?ms)^`{32} example\n(.*?)^\.\n(.*?)^`{32}$|^#{1,6} *([^\n]*)$"
    cases: list[Case] = []
    section = ""
    for found in re.finditer(pattern, text.partition("<!-- END TESTS -->")[0]):
        if found[3] is None:
            shown, html = (part.replace("→", "\t") for part in found.group(1, 2))
            cases.append(Case(len(cases) + 1, section, shown, html))
        else:
            section = found[3]
    return cases


class Canonical(HTMLParser):
    """The specification's HTML and the page's elements in one form, without what the page adds."""

    VOID = frozenset(("br", "hr", "img", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, str]] = []
        """("tag" or "text", its form)."""
        self.ends: list[str | None] = []
        self.images: list[tuple[str, int]] = []
        """Pictures of the page that are open, with the place of their text."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        kind = values.get("class", "")
        hidden = (kind == "code-head" or None in self.ends) and tag not in self.VOID
        if hidden:
            self.ends.append(None)
        elif tag == "img":
            self.parts.append(("tag", picture(values["src"], values.get("title"), values["alt"])))
        elif tag in self.VOID:
            self.parts.append(("tag", f"<{tag}>"))
        elif kind == "picture":
            self.images.append((values["title"], len(self.parts)))
            self.ends.append("picture")
        elif tag == "a" or kind == "target":
            named = values["title"] if kind == "target" else joined(values["href"], values.get("title"))
            self.open(f"<a {unquote(named)}>", "</a>")
        elif tag == "div" or kind.startswith("hl-") or (tag == "span" and kind == "plain"):
            self.open("", "")
        elif tag == "ol":
            self.open(f"<ol {values.get('start', '1')}>", "</ol>")
        else:
            name = "h" if re.fullmatch("h[1-6]", tag) else tag  # the page's headings are below its own
            self.open(f"<{name}>", f"</{name}>")

    def open(self, start: str, end: str) -> None:
        self.parts.append(("tag", start))
        self.ends.append(end)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        end = self.ends.pop()
        if end == "picture":
            named, place = self.images.pop()
            text = "".join(
                part if kind == "text" else re.sub(r"^<img .*\|(.*)>$|^.*$", r"\1", part)
                for kind, part in self.parts[place:]
            )
            target, _, title = named.partition("\n")
            self.parts[place:] = [("tag", picture(target, title, text))]
        elif end:
            self.parts.append(("tag", end))

    def handle_data(self, data: str) -> None:
        if None not in self.ends:
            self.parts.append(("text", data.replace("<", "‹").replace(">", "›")))


def joined(target: str, title: str | None) -> str:
    return f"{target}\n{title}" if title else target


def picture(target: str, title: str | None, text: str) -> str:
    return f"<img {unquote(joined(target, title))}|{text}>"


def canonical(html: str) -> str:
    parser = Canonical()
    parser.feed(html)
    parser.close()
    text = "".join(part for _, part in parser.parts)
    block = r"(?:p|h|ul|ol|ol \d+|li|blockquote|hr|pre)"
    text = re.sub(rf"\s*(</?{block}>)\s*", r"\1", text)
    return re.sub(r"\s*<br>\s*", "<br>", re.sub(r"\n+</code>", "</code>", text)).strip()


def test_the_cases_of_the_specification(visit: Visit) -> None:
    judged = [case for case in read_cases(SPECIFICATION.read_text()) if not case.has_html]
    assert len(judged) > 560
    shown = visit.page.evaluate(
        """async (texts) => {
          const { markdown } = await import(new URL("page/markdown.js", document.baseURI));
          return texts.map((text) => {
            const node = document.createElement("div");
            node.append(markdown(text));
            return node.innerHTML;
          });
        }""",
        [case.text for case in judged],
    )
    pairs = [(case, canonical(case.html), canonical(html)) for case, html in zip(judged, shown, strict=True)]
    wrong = {case.number: (case.text, wanted, got) for case, wanted, got in pairs if wanted != got}
    sections = Counter(case.section for case in judged)
    print(f"{len(judged) - len(wrong)} of {len(judged)} cases of {len(sections)} sections")
    assert set(wrong) == set(DEVIATIONS), [wrong.get(number) for number in set(wrong) - set(DEVIATIONS)]
