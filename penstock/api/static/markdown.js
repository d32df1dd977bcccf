// A small part of Markdown as elements: code, headings, lists, bold, italics. Everything else stays text, links too:
// what a model writes must not lead anywhere, and never becomes markup.

import { copyButton, make } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBERED = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const INDENTED = /^ {4}/;
const INLINE = /(`+)([^`]+)\1|\*\*([^*]+)\*\*|\*([^*\s](?:[^*\n]*[^*\s])?)\*(?!\w)/g;
/** Beyond it a text is shown as it is: building elements takes time. */
const MOST_CHARACTERS = 200_000;

export function markdown(text) {
  const result = document.createDocumentFragment();
  if (text.length > MOST_CHARACTERS) {
    result.append(make("p", { class: "plain", text }));
    return result;
  }
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const [block, next] = blockAt(lines, at);
    if (block) result.append(block);
    at = next;
  }
  return result;
}

/** The block that begins in a line, and the line behind it. */
function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at + 1, fence[1], fence[2]);
  const heading = HEADING.exec(line);
  if (heading) return [inline(make(`h${Math.min(6, heading[1].length + 2)}`), heading[2]), at + 1];
  if (BULLET.test(line)) return list("ul", BULLET, 1, lines, at);
  if (NUMBERED.test(line)) return list("ol", NUMBERED, 2, lines, at);
  if (INDENTED.test(line)) return indented(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end += 1;
  return [inline(make("p", { class: "plain" }), lines.slice(at, end).join("\n")), end];
}

const startsBlock = (line) => [FENCE, HEADING, BULLET, NUMBERED].some((pattern) => pattern.test(line));

function code(lines, first, fence, language) {
  let end = first;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end += 1;
  return [codeBlock(lines.slice(first, end).join("\n"), language), end + 1];
}

function indented(lines, first) {
  let end = first;
  while (end < lines.length && (INDENTED.test(lines[end]) || !lines[end].trim())) end += 1;
  return [codeBlock(lines.slice(first, end).map((line) => line.slice(4)).join("\n").trimEnd(), ""), end];
}

function codeBlock(text, language) {
  const head = make("div", { class: "code-head" }, make("span", { text: language || "code" }), copyButton(() => text));
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, make("code", { text })));
}

function list(tag, pattern, group, lines, at) {
  const node = make(tag, tag === "ol" ? { start: Number(pattern.exec(lines[at])[1]) } : {});
  let next = at;
  for (let found; next < lines.length && (found = pattern.exec(lines[next])); next += 1) {
    node.append(inline(make("li"), found[group]));
  }
  return [node, next];
}

function inline(node, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    node.append(text.slice(at, found.index));
    if (found[2] !== undefined) node.append(make("code", { text: found[2] }));
    else if (found[3] !== undefined) node.append(make("strong", { text: found[3] }));
    else node.append(make("em", { text: found[4] }));
    at = found.index + found[0].length;
  }
  node.append(text.slice(at));
  return node;
}
