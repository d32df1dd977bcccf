// A part of Markdown as elements: code, headings, lists, quotes, tables, rules, bold, italics. Everything else stays
// text, links too: what a model writes must not lead anywhere, and never becomes markup. The time grows with the length
// of the text alone.

import { copyButton, make } from "./dom.js";

const FENCE = /^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const MARKER = /^[ \t]*([-*+]|(\d{1,9})[.)])(?=[ \t]|$)/;
const RULER = /^[\s|:-]*-[\s|:-]*$/;
/** Behind it the text is shown as it is: building elements takes time. */
const MAX_CHARACTERS = 200_000;
/** Lists and quotes within each other. */
const DEEPEST = 16;

export function markdown(text) {
  const result = document.createDocumentFragment();
  for (const { node } of blocks(text)) result.append(node);
  return result;
}

/** The outermost blocks of a text behind `from`, the start of one: their elements, and where they start. */
export function* blocks(text, from = 0) {
  const cut = text.length > MAX_CHARACTERS ? text.lastIndexOf("\n", MAX_CHARACTERS) + 1 || MAX_CHARACTERS : text.length;
  if (from < cut) {
    const lines = text.slice(from, cut).split("\n");
    let line = 0;
    let start = from;
    for (const [node, at] of parse(lines, 0)) {
      for (; line < at; line += 1) start += lines[line].length + 1;
      yield { node, start };
    }
  }
  const rest = Math.max(from, cut);
  if (rest < text.length) yield { node: make("p", { class: "plain", text: text.slice(rest) }), start: rest };
}

/** Blocks and the numbers of their first lines. `tight`: a paragraph at the start is a part of its list item. */
function* parse(lines, depth, tight = false) {
  for (let at = 0; at < lines.length;) {
    const [node, next] = blockAt(lines, at, depth, tight);
    if (node) yield [node, at];
    at = next;
  }
}

/** The block that begins in a line, null for an empty one, and the line behind it. */
function blockAt(lines, at, depth, tight) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (indentOf(line) > 3) return indented(lines, at);
  if (FENCE.test(line)) return fenced(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [inline(make(`h${Math.min(6, heading[1].length + 2)}`), title(heading[2])), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && markerOf(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  const node = make(tight && at === 0 ? "span" : "p", { class: "plain" });
  return [inline(node, lines.slice(at, end).join("\n")), end];
}

/** Whether a paragraph ends before a line: deeper ones, and numbers of four digits, may be its text. */
function interrupts(lines, at) {
  const line = lines[at];
  const marker = markerOf(line);
  if (marker) return line.trim().length > marker.width && marker.width < 5;
  if (indentOf(line) > 3) return false;
  return [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line)) || isTable(lines, at);
}

/** A heading without the signs that may close it. */
function title(text) {
  const bare = text.trimEnd();
  let end = bare.length;
  while (bare[end - 1] === "#") end -= 1;
  return end === 0 || bare[end - 1] === " " ? bare.slice(0, end).trim() : bare;
}

// -- indentation, in columns: a tab goes to the next multiple of 4

function indentOf(line) {
  let column = 0;
  for (const sign of line) {
    if (sign === " ") column += 1;
    else if (sign === "\t") column += 4 - (column % 4);
    else break;
  }
  return column;
}

/** A line without up to `most` columns of its indentation. */
function dedent(line, most) {
  let column = 0;
  let at = 0;
  for (; column < most && (line[at] === " " || line[at] === "\t"); at += 1) column += line[at] === " " ? 1 : 4 - (column % 4);
  return " ".repeat(Math.max(0, column - most)) + line.slice(at);
}

// -- code

const closes = (line, fence) => {
  const bare = line.trim();
  return bare.startsWith(fence) && bare === fence[0].repeat(bare.length);
};

function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  return [codeBlock(lines.slice(at + 1, end).map((line) => dedent(line, indent)).join("\n"), language), end + 1];
}

function indented(lines, at) {
  let end = at + 1;
  while (end < lines.length && (indentOf(lines[end]) > 3 || !lines[end].trim())) end += 1;
  return [codeBlock(lines.slice(at, end).map((line) => dedent(line, 4)).join("\n").trimEnd(), ""), end];
}

function codeBlock(text, language) {
  const code = make("code", { text });
  const head = make("div", { class: "code-head" }, make("span", { text: language || "code" }), copyButton(() => code.textContent));
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, code));
}

// -- lists and quotes

/** The marker of a list item: its columns, kind and number. */
function markerOf(line) {
  const found = RULE.test(line) ? null : MARKER.exec(line);
  if (!found) return null;
  const [whole, sign, number] = found;
  const indent = indentOf(line);
  const rest = line.slice(whole.length);
  const gap = rest.trim() ? indentOf(rest) : 1;
  return { indent, width: sign.length, content: indent + sign.length + (gap > 4 ? 1 : gap), kind: sign.at(-1), number, rest: dedent(rest, gap > 4 ? 1 : gap) };
}

function list(lines, at, depth) {
  const { kind, number } = markerOf(lines[at]);
  const node = number ? make("ol", { start: Number(number) }) : make("ul");
  let end = at;
  for (let next = at; next < lines.length; next += 1) {
    if (!lines[next].trim()) continue;
    const marker = markerOf(lines[next]);
    if (marker?.kind !== kind) break;
    const [inside, behind] = itemLines(lines, next, marker);
    const item = make("li");
    for (const [child] of parse(inside, depth + 1, true)) item.append(child);
    node.append(item);
    end = behind;
    next = behind - 1;
  }
  return [node, end];
}

/**
 * The lines of an item without their indentation, and the line behind them. Models indent less than the text of the
 * item: a line that is deeper than the marker is the item's, a marker if it is deeper by 2.
 */
function itemLines(lines, at, { indent, content, rest }) {
  const inside = [rest];
  let fence = FENCE.exec(rest)?.[1];
  let end = at + 1;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (line.trim()) {
      const within = indentOf(line) > indent + (markerOf(line) ? 1 : 0);
      if (!within && (fence || !inside.at(-1).trim() || interrupts(lines, next))) break;
      end = next + 1;
    }
    const bare = dedent(line, content);
    if (!fence) fence = FENCE.exec(bare)?.[1];
    else if (closes(bare, fence)) fence = undefined;
    inside.push(bare);
  }
  return [inside.slice(0, end - at), end];
}

function quote(lines, at, depth) {
  const inside = [];
  let end = at;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    if (QUOTE.test(lines[end])) inside.push(dedent(lines[end].replace(QUOTE, ""), 1));
    else if (inside.at(-1).trim() && !interrupts(lines, end)) inside.push(lines[end]);
    else break;
  }
  const node = make("blockquote");
  for (const [child] of parse(inside, depth + 1)) node.append(child);
  return [node, end];
}

// -- tables

/** Whether a line and the next one are the head of a table. */
function isTable(lines, at) {
  const ruler = lines[at + 1];
  if (!ruler || !lines[at].includes("|") || !ruler.includes("|") || !RULER.test(ruler)) return false;
  const under = cells(ruler);
  return under.every((cell) => /^:?-+:?$/.test(cell)) && under.length === cells(lines[at]).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (tag, line) => make("tr", {}, ...cells(line).slice(0, sides.length).map((cell, column) => inline(make(tag, { class: sides[column] }), cell)));
  const body = make("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && !interrupts(lines, end); end += 1) body.append(row("td", lines[end]));
  return [make("div", { class: "scroll" }, make("table", {}, make("thead", {}, row("th", lines[at])), body)), end];
}

/** The cells of a row; \| is a sign of a cell. */
function cells(line) {
  const found = [""];
  const text = line.trim();
  for (let at = text[0] === "|" ? 1 : 0; at < text.length; at += 1) {
    const escaped = text[at] === "\\" && text[at + 1] === "|";
    if (text[at] === "|") at + 1 < text.length && found.push("");
    else found[found.length - 1] += escaped ? "|" : text[at];
    if (escaped) at += 1;
  }
  return found.map((cell) => cell.trim());
}

// -- within a paragraph: code, bold, italics and struck text, by the rules of CommonMark

/** What may mean something: runs of delimiters, escaped punctuation, names of characters. */
const SPECIAL = /`+|\*+|_+|~~|\\[!-/:-@[-`{-~]|&(?:amp|lt|gt|quot|apos|#39|nbsp);/g;
const CHARACTERS = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&#39;": "'", "&nbsp;": "\u00a0" };
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };
/** Delimiters that may be open at a time. */
const MAX_OPEN = 32;

/** Appends a text to a node, which is returned. */
function inline(node, text) {
  const spans = new Spans();
  const closing = codeEnds(text);
  const special = new RegExp(SPECIAL);
  let at = 0;
  for (let found; (found = special.exec(text));) {
    const [token] = found;
    const behind = found.index + token.length;
    spans.add(text.slice(at, found.index));
    at = behind;
    if (token[0] === "`") {
      const end = closing(found.index, token.length);
      if (end === undefined) spans.add(token);
      else {
        spans.add(make("code", { text: bareCode(text.slice(behind, end)) }));
        special.lastIndex = at = end + token.length;
      }
    } else if (token[0] === "\\") spans.add(token[1]);
    else if (token[0] === "&") spans.add(CHARACTERS[token]);
    else spans.delimit(token, text[found.index - 1] ?? " ", text[behind] ?? " ");
  }
  spans.add(text.slice(at));
  for (const item of spans.end()) node.append(item);
  return node;
}

/** A function that finds the end of code by the place and length of the backticks before it, which only grow. */
function codeEnds(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) runs.get(run.length)?.push(index) ?? runs.set(run.length, [index]);
  for (const places of runs.values()) places.reverse();
  return (start, length) => {
    const places = runs.get(length) ?? [];
    while (places.length && places.at(-1) <= start) places.pop();
    return places.at(-1);
  };
}

function bareCode(text) {
  const line = text.replaceAll("\n", " ");
  return line.trim() && line.startsWith(" ") && line.endsWith(" ") ? line.slice(1, -1) : line;
}

const isSpace = (sign) => /\s/.test(sign);
const isPunctuation = (sign) => /[\p{P}\p{S}]/u.test(sign);

/** Texts and elements, within delimiters that may still be closed. */
class Spans {
  constructor() {
    this.stack = [{ mark: "", count: 0, items: [] }];
    /** How many of each delimiter are open. */
    this.open = { "*": 0, _: 0, "~": 0 };
  }

  add(item) {
    const { items } = this.stack.at(-1);
    if (typeof item === "string" && typeof items.at(-1) === "string") items[items.length - 1] += item;
    else if (item !== "") items.push(item);
  }

  delimit(run, before, after) {
    const mark = run[0];
    const opens = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const closes = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    let left = run.length;
    // 2*3*4 is no emphasis, nor is snake_case.
    if (closes && !(/\w/.test(after) && (mark === "_" || left === 1))) left = this.close(mark, left);
    if (left && opens && !(mark === "_" && /\w/.test(before)) && this.stack.length < MAX_OPEN) {
      this.stack.push({ mark, count: left, items: [] });
      this.open[mark] += 1;
    } else this.add(mark.repeat(left));
  }

  /** Ends what `count` delimiters can end; returns how many are left. */
  close(mark, count) {
    let left = count;
    while (left && this.open[mark]) {
      this.fold(this.stack.findLastIndex((each) => each.mark === mark));
      const frame = this.stack.at(-1);
      const used = Math.min(left, frame.count, 2);
      const node = make(TAGS[mark][used - 1]);
      for (const item of frame.items) node.append(item);
      frame.items = [node];
      frame.count -= used;
      left -= used;
      if (!frame.count) this.pop();
    }
    return left;
  }

  /** Those that were opened above a place of the stack are text. */
  fold(place) {
    for (const frame of this.stack.splice(place + 1)) {
      this.open[frame.mark] -= 1;
      this.add(frame.mark.repeat(frame.count));
      for (const item of frame.items) this.add(item);
    }
  }

  pop() {
    const { mark, items } = this.stack.pop();
    this.open[mark] -= 1;
    for (const item of items) this.add(item);
  }

  end() {
    this.fold(0);
    return this.stack[0].items;
  }
}
