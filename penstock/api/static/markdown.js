// Markdown as elements. A model's text only ever becomes text nodes, and attributes of links: HTML in it stays text, no
// picture is loaded, and links lead to addresses of the web and of mail alone.

import { blocksOf } from "./blocks.js";
import { copyButton, make } from "./dom.js";
import { highlighted } from "./highlight.js";
import { spansOf } from "./spans.js";

/** Emphasis, links and pictures within each other. */
const DEEPEST = 32;
/** Behind it the text is shown as it is: elements take time and memory. */
const MAX_CHARACTERS = 500_000;
/** The last level that HTML has. Those before a reply's are the page's own. */
const DEEPEST_HEADING = 6;
const PROTOCOL = /^(?:https?:\/\/|mailto:|www\.)/i;

export function markdown(text) {
  const result = document.createDocumentFragment();
  for (const { node } of shown(text)) result.append(node);
  return result;
}

/** The outermost blocks of a text: their elements, and where they start. */
function* shown(text) {
  const definitions = new Map();
  const { blocks, rest } = outermost(text, 0, definitions);
  for (const block of blocks) yield { node: elementOf(block, (key) => definitions.get(key)), start: block.start };
  if (rest) yield { node: elementOf(rest), start: rest.start };
}

/**
 * The outermost blocks of a text behind `from`, the start of one, which fill the definitions of links; and the `rest`, a block
 * of text that is too long to be formatted, or null. `earlier`: the blocks before.
 */
export function outermost(text, from, definitions, earlier = []) {
  const cut = text.length > MAX_CHARACTERS ? text.lastIndexOf("\n", MAX_CHARACTERS) + 1 || MAX_CHARACTERS : text.length;
  const blocks = from < cut ? blocksOf(text.slice(0, cut), from, definitions) : [];
  nest(earlier, blocks);
  const start = Math.max(from, cut);
  return { blocks, rest: start < text.length ? { kind: "rest", text: text.slice(start), start } : null };
}

/** Gives headings their `depth` below others, from 1: models skip levels. Those in quotes and lists are below the last one outside. */
function nest(earlier, blocks) {
  const above = [];
  const enter = ({ level }) => {
    while (above.at(-1) >= level) above.pop();
    return above.push(level);
  };
  const inside = (block) => {
    if (block.kind === "heading") block.depth = above.length + 1;
    else block.blocks?.forEach(inside);
  };
  for (const block of earlier) if (block.kind === "heading") enter(block);
  for (const block of blocks) {
    if (block.kind === "heading") block.depth = enter(block);
    else inside(block);
  }
}

/**
 * The element of a block, of an item (`tight`: as its list is), or of a table's row ({kind: "row", cells, sides}).
 * `linkOf(name)`: the definition of a link, or nothing.
 */
export function elementOf(block, linkOf, tight = false) {
  const inside = (tag, attributes, text) => inline(make(tag, attributes), text, linkOf);
  switch (block.kind) {
    case "heading": return inside("h3", { class: `level-${block.level}`, "aria-level": Math.min(DEEPEST_HEADING, 2 + block.depth) }, block.text);
    case "rule": return make("hr");
    case "code": return codeBlock(block.text, block.language.split(/\s/)[0]);
    case "quote": return fill(make("blockquote"), block.blocks.map((each) => elementOf(each, linkOf)));
    case "list": return fill(block.ordered ? make("ol", { start: block.first }) : make("ul"), block.blocks.map((each) => elementOf(each, linkOf, block.tight)));
    case "item": return item(block, linkOf, tight);
    case "table": return table(block, inside, (cells) => elementOf({ kind: "row", cells, sides: block.sides }, linkOf));
    case "row": return row("td", block, inside);
    case "paragraph": return inside(tight ? "span" : "p", { class: "plain" }, block.text);
    default: return make("p", { class: "plain", text: block.text });
  }
}

/** Appends nodes, as many as there are: arguments of a call are limited. */
function fill(node, nodes) {
  for (const each of nodes) node.append(each);
  return node;
}

function item({ blocks: [lead, ...further] }, linkOf, tight) {
  const node = make("li");
  if (!lead) return node;
  const [task, mark] = (lead.kind === "paragraph" && /^\[([ xX])\][ \t]+(?=\S)/.exec(lead.text)) || [""];
  const text = lead.text?.slice(task.length);
  if (task) node.append(make("input", { type: "checkbox", disabled: true, checked: mark !== " ", "aria-label": mark === " " ? "To do" : "Done" }), " ");
  return fill(node, [{ ...lead, text }, ...further].map((each) => elementOf(each, linkOf, tight && each.kind === "paragraph")));
}

function table({ sides, head, rows }, inside, rowOf) {
  const body = fill(make("tbody"), rows.map(rowOf));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, make("table", {}, make("thead", {}, row("th", { cells: head, sides }, inside)), body));
}

const row = (tag, { cells, sides }, inside) => fill(make("tr"), cells.map((text, column) => inside(tag, { class: sides[column] }, text)));

function codeBlock(text, language) {
  const code = fill(make("code"), highlighted(text, language));
  const head = make("div", { class: "code-head" }, make("span", { text: language || "code" }), copyButton(() => code.textContent));
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, code));
}

/** Appends a text's parts to a node, which is returned. */
function inline(node, text, linkOf) {
  const inner = [node];
  let links = 0;
  for (const part of spansOf(text, linkOf)) {
    const top = inner.at(-1);
    if (part.text !== undefined) top.append(part.text);
    else if (part.code !== undefined) top.append(make("code", { text: part.code }));
    else if (part.bare) top.append(links ? part.bare : linked(part.bare, addressOf(part.bare), "", part.bare));
    else if (part.open === "br") top.append(make("br"));
    else if (part.open) {
      const link = part.open === "a" || part.open === "img";
      const made = inner.length > DEEPEST ? top : link ? linked(part.target, links ? null : addressOf(part.target), part.title, null, part.open === "img") : make(part.open);
      links += link ? 1 : 0;
      if (made !== top) top.append(made);
      inner.push(made);
    } else {
      inner.pop();
      links -= part.close === "a" || part.close === "img" ? 1 : 0;
    }
  }
  return node;
}

/** A link, or a text with its target in a title if it must not lead there. A picture is a link to it. */
function linked(target, address, title, text, picture = false) {
  const about = { class: picture ? "picture" : "target", title: title ? `${target}\n${title}` : target, text };
  return address ? make("a", { ...about, href: address, target: "_blank", rel: "noopener noreferrer" }) : make("span", about);
}

/** The address that a target leads to, null for one that is not of the web or mail, or not whole. */
function addressOf(target) {
  const [start] = PROTOCOL.exec(target) ?? [];
  if (!start) return null;
  try {
    return new URL(start.toLowerCase() === "www." ? ["https:", "", target].join("/") : target).href;
  } catch {
    return null;
  }
}
