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
 * of text that is too long to be formatted, or null.
 */
export function outermost(text, from, definitions) {
  const cut = text.length > MAX_CHARACTERS ? text.lastIndexOf("\n", MAX_CHARACTERS) + 1 || MAX_CHARACTERS : text.length;
  const blocks = from < cut ? blocksOf(text.slice(0, cut), from, definitions) : [];
  const start = Math.max(from, cut);
  return { blocks, rest: start < text.length ? { kind: "rest", text: text.slice(start), start } : null };
}

/** The element of a block. `linkOf(name)`: the definition of a link, or nothing. */
export function elementOf(block, linkOf) {
  const inside = (tag, attributes, text) => inline(make(tag, attributes), text, linkOf);
  switch (block.kind) {
    case "heading": return inside("h3", { class: `level-${block.level}` }, block.text); // models skip levels
    case "rule": return make("hr");
    case "code": return codeBlock(block.text, block.language.split(/\s/)[0]);
    case "quote": return fill(make("blockquote"), block.blocks.map((each) => elementOf(each, linkOf)));
    case "list": return list(block, linkOf);
    case "table": return table(block, inside);
    case "paragraph": return inside("p", { class: "plain" }, block.text);
    default: return make("p", { class: "plain", text: block.text });
  }
}

/** Appends nodes, as many as there are: arguments of a call are limited. */
function fill(node, nodes) {
  for (const each of nodes) node.append(each);
  return node;
}

function list({ ordered, first, tight, blocks }, linkOf) {
  const items = blocks.map((item) => {
    const [lead, ...further] = item.blocks;
    const node = make("li");
    if (!lead) return node;
    const [task, mark] = (lead.kind === "paragraph" && /^\[([ xX])\][ \t]+(?=\S)/.exec(lead.text)) || [""];
    const text = lead.text?.slice(task.length);
    if (task) node.append(make("input", { type: "checkbox", disabled: true, checked: mark !== " ", "aria-label": mark === " " ? "To do" : "Done" }), " ");
    for (const each of [{ ...lead, text }, ...further]) {
      if (tight && each.kind === "paragraph") node.append(inline(make("span", { class: "plain" }), each.text, linkOf));
      else node.append(elementOf(each, linkOf));
    }
    return node;
  });
  return fill(ordered ? make("ol", { start: first }) : make("ul"), items);
}

function table({ sides, head, rows }, inside) {
  const row = (tag, cells) => fill(make("tr"), cells.map((text, column) => inside(tag, { class: sides[column] }, text)));
  const body = fill(make("tbody"), rows.map((cells) => row("td", cells)));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, make("table", {}, make("thead", {}, row("th", head)), body));
}

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
