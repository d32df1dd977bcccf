"""Markdown of replies in a real browser: whole, and as it grows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.page.visit import Visit, delta

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.integration.server import Server

CHAT = "/v1/chat/completions"

SHOWN = {
    "1. one\n   - two\n     goes on\n3. three": (
        "<ol start=1><li>one<ul><li>two\ngoes on</ul><li>three</ol>"
    ),
    "- run:\n  ```python\n  def f():\n      return 1\n  ```\n- then": (
        "<ul><li>run:<pre>def f():\n    return 1</pre><li>then</ul>"
    ),
    "1. run\n  ```sh\n  ls\n  ```\n2. then": "<ol start=1><li>run<pre>ls</pre><li>then</ol>",
    "1. run\n```\nls\n```\n2. then": "<ol start=1><li>run</ol><pre>ls</pre><ol start=2><li>then</ol>",
    "10. a\n\n    second\n\n    third\n11. b": (
        "<ol start=10><li><p>a</p><p>second</p><p>third</p><li><p>b</p></ol>"
    ),
    "10. a\n  - b\n  - c\n\n- d": "<ol start=10><li>a<ul><li>b<li>c</ul></ol><ul><li>d</ul>",
    "- [ ] a\n- [x] **b**\n- [y] c": "<ul><li>[] a<li>[x] <strong>b</strong><li>[y] c</ul>",
    "- a\n    - b\n        - c\n- d\nlazy": "<ul><li>a<ul><li>b<ul><li>c</ul></ul><li>d\nlazy</ul>",
    "* a\n+ b\n- - -\nx": "<ul><li>a</ul><ul><li>b</ul><hr><p>x</p>",
    "- ```\n  a\n\n      b\n  ```\n\n\n- c": "<ul><li><pre>a\n\n    b</pre><li><p>c</p></ul>",
    "```make\nall:\n\tcc\n```": "<pre>all:\n\tcc</pre>",
    "- ```make\n  all:\n  \tcc\n  ```": "<ul><li><pre>all:\n\tcc</pre></ul>",
    "````md\n```\nx\n```\n````\n~~~\n```\n~~~": "<pre>```\nx\n```</pre><pre>```</pre>",
    "text\n    more\n\n    code\n\n      deeper": "<p>text\nmore</p><pre>code\n\n  deeper</pre>",
    "> a\n> - b\nlazy\n\n> > c": (
        "<blockquote><p>a</p><ul><li>b\nlazy</ul></blockquote>"
        "<blockquote><blockquote><p>c</p></blockquote></blockquote>"
    ),
    "x\n| a | `b` |\n|---|:-:|\n| 1 | 2 \\| 3 |\n| 4 |\n\ny": (
        "<p>x</p><table><tr><th>a<th>[b]<tr><td>1<td>2 | 3<tr><td>4</table><p>y</p>"
    ),
    "a | b\n--- | --- | ---": "<p>a | b\n--- | --- | ---</p>",
    "### a ##\n#b\n# c#": "<h3>a</h3><p>#b</p><h3>c#</h3>",
    "In\n1986. A year\n1) one": "<p>In\n1986. A year</p><ol start=1><li>one</ol>",
    "***a*** **b `*c*` d** _e_ f_g_h": (
        "<p><em><strong>a</strong></em> <strong>b [*c*] d</strong> <em>e</em> f_g_h</p>"
    ),
    "2*3*4 \\*i\\* ~~j~~ **k": "<p>2*3*4 *i* <del>j</del> **k</p>",
    "`` a ` b `` &lt; <b>c</b> `&lt;` ` d": "<p>[a ` b] &lt; &lt;b&gt;c&lt;/b&gt; [&amp;lt;] ` d</p>",
    "[l](javascript:x) [m](JaVaScRiPt:x) [n](/v1/models) [o](data:text/html,x) [p](//x.y)": (
        "<p>l{javascript:x} m{JaVaScRiPt:x} n{/v1/models} o{data:text/html,x} p{//x.y}</p>"
    ),
    '[l *m*](https://x.y/z?a=1&b "t") ![i](http://x/y) <mailto:a@b.c> a@b.c': (
        "<p><a https://x.y/z?a=1&amp;b>l <em>m</em></a> <a http://x/y>i</a>"
        " <a mailto:a@b.c>mailto:a@b.c</a> a@b.c</p>"
    ),
    "(see https://x.y/a_b_(c), www.x.y.) `http://x`, ahttp://x **http://b.c**": (
        "<p>(see <a https://x.y/a_b_(c)>https://x.y/a_b_(c)</a>, <a https://www.x.y/>www.x.y</a>.)"
        " [http://x], ahttp://x <strong><a http://b.c/>http://b.c</a></strong></p>"
    ),
    "[a] [b][] [c][A]\n\n[A]: http://x.y/ 't'\n[b]: <http://z/>": (
        "<p><a http://x.y/>a</a> <a http://z/>b</a> <a http://x.y/>c</a></p>"
    ),
    "$a_1*b_1*c$ \\(x_1 * y_1\\) it's $5 *and* $6 \\[ \\frac{a}{b} \\]": (
        "<p>$a_1*b_1*c$ \\(x_1 * y_1\\) it's $5 <em>and</em> $6 \\[ \\frac{a}{b} \\]</p>"
    ),
    "so\n$$\na\n= b\n- c\n$$\n\\[\n1. x\n\\]\n- y": (
        "<p>so</p><p>$$\na\n= b\n- c\n$$</p><p>\\[\n1. x\n\\]</p><ul><li>y</ul>"
    ),
    "a  \nb\\\nc\n\n<a href='x_y_z'>*d*</a>": (
        "<p>a<br>b<br>c</p><p>&lt;a href='x_y_z'&gt;<em>d</em>&lt;/a&gt;</p>"
    ),
    "~a~ ~~~b~~~c &copy;&#x41;&#0;&nope;": "<p><del>a</del> ~~~b~~~c ©A\ufffd&amp;nope;</p>",
}
"""Texts and their elements, in short: code blocks are <pre>, other code is in [brackets], the target of what
looks like a link and is none in {braces}; what says nothing about the structure is left out."""

HARNESS = """
const { markdown } = await import(new URL("page/markdown.js", document.baseURI));
const { LiveMarkdown } = await import(new URL("page/live_markdown.js", document.baseURI));
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const PLAIN = ["SPAN", "DIV", "THEAD", "TBODY"];
const OPEN = ["LI", "TR", "TH", "TD", "HR", "BR"];
window.short = (node) => {
  if (node.nodeType === Node.TEXT_NODE) return escaped(node.data);
  if (node.className === "code-block") return `<pre>${escaped(node.querySelector("code").textContent)}</pre>`;
  const inside = [...node.childNodes].map(short).join("");
  if (node.tagName === "INPUT") return node.checked ? "[x]" : "[]";
  if (node.className === "target" && node.tagName === "SPAN") return `${inside}{${escaped(node.title)}}`;
  if (node.tagName === "A") {
    const safe = node.target === "_blank" && node.rel === "noopener noreferrer" && node.title;
    if (!safe) return "an unsafe link";
    return `<a ${escaped(node.href)}>${inside}</a>`;
  }
  if (!node.tagName || PLAIN.includes(node.tagName)) return inside;
  if (node.tagName === "CODE") return `[${inside}]`;
  const name = node.tagName.toLowerCase();
  const start = node.tagName === "OL" ? `${name} start=${node.start}` : name;
  return `<${start}>${inside}` + (OPEN.includes(node.tagName) ? "" : `</${name}>`);
};
window.LiveMarkdown = LiveMarkdown;
window.whole = (text) => short(markdown(text));
window.grown = (pieces) => {
  const body = document.createElement("div");
  const live = new LiveMarkdown(body);
  return pieces.map((_, last) => {
    const text = pieces.slice(0, last + 1).join("");
    live.show(text);
    return body.innerHTML === grow(document.createElement('div'), text).innerHTML ? null : text;
  }).find((wrong) => wrong !== null) ?? null;
};
window.grow = (node, text) => { node.append(markdown(text)); return node; };
"""


@pytest.fixture
def harness(visit: Visit) -> Visit:
    visit.wait_ready()
    visit.page.evaluate(f"(async () => {{ {HARNESS} }})()")
    return visit


def test_blocks_and_spans(harness: Visit) -> None:
    shown = {text: harness.page.evaluate("whole", text) for text in SHOWN}
    assert shown == SHOWN


def test_a_text_that_grows_is_shown_as_the_whole(harness: Visit) -> None:
    """Cut at every place, and in pieces by chance."""
    chance = random.Random(1)
    for _ in range(30):
        text = "\n".join(chance.choices([*SHOWN, "", "a|b", "-|-", "- ", "> x", "```", "    code"], k=6))
        cuts = sorted(chance.sample(range(len(text)), min(20, len(text) - 1)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert harness.page.evaluate("grown", pieces) is None
    for text in SHOWN:
        assert harness.page.evaluate("grown", list(text)) is None


GROWING = {
    "list": ("", "- item **{}** `code`\n"),
    "loose list": ("", "1. item {}\n\n   more\n\n"),
    "list in a list": ("- [x] outer\n", "  - item {}\n"),
    "list in a quote": ("", "> - item {}\n"),
    "table": ("|a|b|\n|-|-|\n", "| **{}** | `code` |\n"),
    "paragraphs": ("", "item {}\n\n"),
}


@pytest.mark.parametrize("name", GROWING)
def test_what_is_made_again_does_not_grow_with_the_text(harness: Visit, name: str) -> None:
    """A long block has another item at its end: elements are made for the last ones alone."""
    start, item = GROWING[name]
    text = start + "".join(item.format(number) for number in range(500))
    made, same = harness.page.evaluate(
        """([text, more]) => {
          const node = document.createElement("div");
          const live = new LiveMarkdown(node);
          live.show(text);
          const real = document.createElement;
          let made = 0;
          document.createElement = (tag) => { made += 1; return real.call(document, tag); };
          live.show(text + more);
          document.createElement = real;
          return [made, node.innerHTML === grow(real.call(document, "div"), text + more).innerHTML];
        }""",
        [text, item.format("last")],
    )
    assert same
    assert 0 < made < 30


def test_headings_have_levels_without_gaps(harness: Visit) -> None:
    text = "### a\n# b\n#### c\n- ###### d\n## e\n"
    levels = harness.page.evaluate(
        """(text) => [...grow(document.createElement("div"), text).querySelectorAll("h3")]
          .map((node) => node.textContent + node.getAttribute("aria-level"))""",
        text,
    )
    assert levels == ["a3", "b3", "c4", "d5", "e4"]
    assert harness.page.evaluate("grown", list(text)) is None


LONG: dict[str, str] = {
    "backticks": "`" * 190_000,
    "stars": "*a " * 60_000,
    "bold": "**a" * 60_000,
    "open and closed": "*a **b " * 13_000 + "a** b*" * 13_000,
    "quotes": ">" * 190_000,
    "bullets": "- " * 95_000 + "x",
    "links": "[a](http://b.c " * 20_000,
    "brackets": "[" * 10_000 + "]" * 10_000 + "(",
    "definitions": "[a]: /b\n" * 10_000 + "\n" + "[a] " * 10_000,
    "nested": "".join(" " * (2 * n % 200) + "- x\n" for n in range(1800)),
    "a wide table": "|a" * 20_000 + "\n" + "|-" * 20_000 + "\n" + "|\n" * 40_000,
    "fences": "- ```x\n" * 27_000,
    "spaces": "# " + " " * 190_000 + "#x",
    "longer than is formatted": "- **a**\n" * 100_000,
}


@pytest.mark.parametrize("name", LONG)
def test_the_depth_and_the_number_of_elements_are_bounded(harness: Visit, name: str) -> None:
    """A text of any kind has at most a few elements for each of its characters; the browser shows it."""
    text = LONG[name]
    count, depth, same = harness.page.evaluate(
        """(text) => {
          const all = grow(document.createElement("div"), text);
          const deep = (node) => 1 + Math.max(0, ...[...node.children].slice(0, 50).map(deep));
          return [all.querySelectorAll("*").length, deep(all), all.textContent.length];
        }""",
        text,
    )
    assert count < 3 * len(text)
    assert depth < 120
    assert same > 0


def test_what_a_reader_does_outlives_the_next_tokens(browser: Browser, server: Server) -> None:
    """A selection, the place in the log and in a code block, while a reply streams and at its end."""
    from tests.page.visit import KEY

    pieces = [f"word{n} **bold{n}** " for n in range(20)]
    with Visit(browser, f"{server.url}/llm/", key=KEY) as visit:
        visit.wait_ready()
        visit.page.evaluate(STREAM)
        visit.ask("hello")
        visit.page.evaluate("push", [delta(content="\n\n".join(f"line {n}" for n in range(100)) + "\n\n")])
        visit.page.evaluate("push", [delta(content=pieces[0]), delta(reasoning="why")])
        visit.wait_for(".body p strong")
        visit.page.evaluate(
            """() => {
              const range = document.createRange();
              range.selectNodeContents(document.querySelector(".assistant .body p:last-child"));
              getSelection().removeAllRanges();
              getSelection().addRange(range);
              document.getElementById("log").scrollTop = 40;
            }"""
        )
        visit.page.wait_for_function("new Promise((done) => requestAnimationFrame(() => done(true)))")
        selected = visit.page.evaluate("getSelection().toString()")
        assert "bold0" in selected
        for piece in pieces[1:]:
            visit.page.evaluate("push", [delta(content=piece)])
        visit.wait_for(".body", "bold19")
        assert visit.page.evaluate("getSelection().toString()").startswith(selected.rstrip())
        visit.page.evaluate("finish()")
        visit.wait_for_end()
        assert visit.page.evaluate("getSelection().toString()").startswith(selected.rstrip())
        assert visit.page.evaluate("document.getElementById('log').scrollTop") == 40


STREAM = """() => {
  const real = window.fetch;
  let control;
  window.fetch = (url, options) => {
    if (!String(url).includes("/chat/completions")) return real(url, options);
    const body = new ReadableStream({ start: (it) => { control = it; } });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
  const send = (data) => control.enqueue(new TextEncoder().encode(`data: ${data}\n\n`));
  window.push = (events) => events.forEach((event) => send(JSON.stringify(event)));
  window.finish = () => { send("[DONE]"); control.close(); };
}"""
"""Replies of chats consist of the events that a test pushes."""


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"error": {"message": "The engine was lost.", "code": 500}}, "The engine was lost."),
        ({"error": "It is lost."}, "It is lost."),
        ({"error": {"code": 1}}, '{"code":1}'),
    ],
)
def test_an_error_within_a_stream_has_no_status_of_the_reply(visit: Visit, event: object, shown: str) -> None:
    visit.wait_ready()
    visit.stream(CHAT, delta(content="so far"), event)
    visit.ask("hello")
    assert visit.wait_for(".problem.error").inner_text() == shown
