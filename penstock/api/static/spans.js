// What is within a paragraph of Markdown: code, emphasis, links, by the rules of CommonMark; struck text and bare addresses as
// GitHub has them. HTML and formulas are text, in which nothing else is looked for.

import { characterOf, inlineTargetAt, labelAt, labelKey, matchAt, plainOf } from "./links.js";

/** What may mean something. */
const SPECIAL = /`+|\*+|_+|~+|!?\[|\]|\\|<|&|\n|\$|https?:\/\/|www\./g;
const NAME = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z][A-Za-z\d]{1,31}));/y;
const ADDRESS = /<([A-Za-z][A-Za-z\d+.-]{1,31}:[^\s<>\x00-\x1f]*)>/y;
const MAIL = /<([\w.!#$%&'*+/=?^`{|}~-]+@[A-Za-z\d](?:[A-Za-z\d-]{0,61}[A-Za-z\d])?(?:\.[A-Za-z\d](?:[A-Za-z\d-]{0,61}[A-Za-z\d])?)*)>/y;
const TAG = /<(?:[A-Za-z][A-Za-z\d-]*(?:\s+[A-Za-z_:][\w.:-]*(?:\s*=\s*(?:[^\s"'=<>`]+|'[^']{0,2000}'|"[^"]{0,2000}"))?){0,30}\s{0,99}\/?|\/[A-Za-z][A-Za-z\d-]*\s{0,99})>/y;
const DOLLARS = /\$\$[^$]{1,2000}\$\$|\$(?![\s$])[^$\n]{0,500}[^\s$\\]\$(?!\d)/y;
const BARE = /(?:https?:\/\/|www\.)[^\s<]+/y;
const MAX_BARE = 2000;
const MAX_FORMULA = 2000;
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

const isSpace = (sign) => /^\s?$/.test(sign);
const isPunctuation = (sign) => /[\p{P}\p{S}]/u.test(sign);

/**
 * A text as a list of its parts in order. A part is {text}, {code}, {bare} (an address), {open: tag} with the
 * `target` and `title` of tags `a` and `img`, or {close: tag}. `linkOf(key)` is the definition of a link by its name.
 */
export function spansOf(text, linkOf) {
  return new Spans(text, linkOf).parts();
}

class Spans {
  constructor(text, linkOf) {
    this.text = text;
    this.linkOf = linkOf;
    this.at = 0;
    this.found = [];
    /** Delimiters that are not paired yet, and brackets that may begin a link. */
    this.delimiters = [];
    this.brackets = [];
    this.codeEnd = codeEnds(text);
    /** The next end of a formula that began with \\( or \\[. */
    this.formulaEnds = { "(": 0, "[": 0 };
  }

  parts() {
    const special = new RegExp(SPECIAL);
    for (let found; (found = special.exec(this.text)); special.lastIndex = this.at) {
      this.say(this.text.slice(this.at, found.index));
      this.at = found.index;
      this.token(found[0]);
    }
    this.say(this.text.slice(this.at));
    pair(this.delimiters);
    return flat(this.found);
  }

  /** Adds a text. */
  say(text) {
    if (text) this.found.push({ text });
  }

  /** Takes what stands at the place, as one part. */
  take(length, part = null) {
    if (part) this.found.push(part);
    else this.say(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  token(token) {
    const { text, at } = this;
    switch (token[0]) {
      case "`": return this.code(token);
      case "*": case "_": case "~": return this.delimit(token);
      case "!": case "[": return this.bracket(token);
      case "]": return this.closeBracket();
      case "\\": return this.escaped();
      case "\n": return this.breakLine();
      case "<": return this.angle();
      case "$": return this.take(matchAt(DOLLARS, text, at)?.[0].length ?? 1);
      case "&": {
        const [whole, ...names] = matchAt(NAME, text, at) ?? [];
        if (!whole) return this.take(1);
        this.say(characterOf(whole, ...names));
        this.at += whole.length;
        return undefined;
      }
      default: return this.address(token);
    }
  }

  code(token) {
    const behind = this.at + token.length;
    const end = this.codeEnd(this.at, token.length);
    if (end === undefined) return this.take(token.length);
    const line = this.text.slice(behind, end).replaceAll("\n", " ");
    const code = line.startsWith(" ") && line.endsWith(" ") && /[^ ]/.test(line) ? line.slice(1, -1) : line;
    return this.take(end + token.length - this.at, { code });
  }

  escaped() {
    const { text, at } = this;
    const next = text[at + 1] ?? "";
    const end = next in this.formulaEnds ? this.formulaEnd(next) : Infinity;
    if (end - at < MAX_FORMULA && /[\p{L}\p{N}]/u.test(text.slice(at + 2, end))) return this.take(end + 2 - at);
    if (next === "\n") {
      this.found.push({ open: "br" });
      this.at += 2;
    } else if (/[!-/:-@[-`{-~]/.test(next)) {
      this.say(next);
      this.at += 2;
    } else this.take(1);
    return undefined;
  }

  /** The place of the \) or \] that ends a formula at the place, Infinity if there is none. */
  formulaEnd(sign) {
    if (this.formulaEnds[sign] < this.at + 2) {
      const end = this.text.indexOf(sign === "(" ? "\\)" : "\\]", this.at + 2);
      this.formulaEnds[sign] = end < 0 ? Infinity : end;
    }
    return this.formulaEnds[sign];
  }

  /** A line's end: a break behind two spaces. Spaces around it are left out. */
  breakLine() {
    const last = this.found.at(-1);
    const before = last?.text ?? "";
    let end = before.length;
    while (before[end - 1] === " " || before[end - 1] === "\t") end -= 1;
    if (last?.text !== undefined) last.text = before.slice(0, end);
    if (before.endsWith("  ")) this.found.push({ open: "br" });
    else this.say("\n");
    this.at += 1;
    while (this.text[this.at] === " " || this.text[this.at] === "\t") this.at += 1;
  }

  angle() {
    const { text, at } = this;
    const found = matchAt(ADDRESS, text, at) ?? matchAt(MAIL, text, at);
    if (!found) return this.take(matchAt(TAG, text, at)?.[0].length ?? 1);
    const [whole, name] = found;
    const target = /^[A-Za-z][A-Za-z\d+.-]+:/.test(name) ? name : `mailto:${name}`;
    this.found.push({ open: "a", target, title: "" }, { text: name }, { close: "a" });
    this.at += whole.length;
    return undefined;
  }

  /** An address without brackets around it. Signs that end a sentence, or a bracket around it, are none of it. */
  address(token) {
    const { text, at } = this;
    const [whole] = matchAt(BARE, text, at) ?? [token];
    if (/[\p{L}\p{N}_/]/u.test(text[at - 1] ?? "") || whole.length > MAX_BARE) return this.take(whole.length > MAX_BARE ? whole.length : token.length);
    const marked = whole.search(/[`*]|\\\)|\]\(/);
    let end = marked < 0 ? whole.length : marked;
    const count = (sign) => whole.slice(0, end).split(sign).length;
    let closed = count(")") - count("(");
    for (; /[?!.,:;_~'"\]]/.test(whole[end - 1]) || (whole[end - 1] === ")" && closed > 0); end -= 1) closed -= whole[end - 1] === ")" ? 1 : 0;
    return end <= token.length ? this.take(token.length) : this.take(end, { bare: whole.slice(0, end) });
  }

  // -- links

  bracket(token) {
    const part = { text: token };
    this.found.push(part);
    this.brackets.push({ part, image: token === "![", delimiters: this.delimiters.length, from: this.at + token.length, active: true });
    this.at += token.length;
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    const link = bracket?.active ? this.linkAt(bracket) : null;
    if (!link) return this.take(1);
    pair(this.delimiters.splice(bracket.delimiters));
    const tag = bracket.image ? "img" : "a";
    const { part } = bracket;
    delete part.text;
    Object.assign(part, { open: tag, target: link.target, title: link.title });
    this.found.push({ close: tag });
    this.at = link.end;
    if (!bracket.image) for (const other of this.brackets) if (!other.image) other.active = false;
    return undefined;
  }

  /** The link whose text ends at the place. */
  linkAt({ from }) {
    const { text, at } = this;
    const inline = inlineTargetAt(text, at + 1);
    if (inline) return inline;
    const named = labelAt(text, at + 1);
    const label = named?.label ?? (at - from <= 999 ? text.slice(from, at) : "");
    const own = named ? null : labelAt(text, from - 1);
    const link = label && (named || own?.end === at + 1) ? this.linkOf(labelKey(label)) : null;
    return link && { ...link, end: named?.end ?? (text.startsWith("[]", at + 1) ? at + 3 : at + 1) };
  }

  // -- emphasis

  delimit(run) {
    const { text, at } = this;
    const mark = run[0];
    const behind = at + run.length;
    const before = [...text.slice(Math.max(0, at - 2), at)].at(-1) ?? "";
    const after = [...text.slice(behind, behind + 2)][0] ?? "";
    const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const within = left && right;
    let opens = left && !(mark === "_" && within && !isPunctuation(before));
    let closes = right && !(mark === "_" && within && !isPunctuation(after));
    if (mark === "~" && run.length > 2) opens = closes = false;
    if (run === "*" && /\d/.test(before) && /\d/.test(after)) opens = closes = false; // 2*3*4 is a product
    const part = { mark, count: run.length, length: run.length, opens, closes, opened: [], closed: [] };
    this.found.push(part);
    this.delimiters.push(part);
    this.at = behind;
  }
}

/** Pairs delimiters, the inner ones first. */
function pair(delimiters) {
  const live = [];
  /** By the kind of a delimiter that closes: below which place of `live` there is none that opens for it. */
  const floors = new Map();
  for (const closer of delimiters) {
    const kind = `${closer.mark}${closer.opens}${closer.length % 3}${closer.mark === "~" ? closer.length : ""}`;
    while (closer.closes && closer.count) {
      const floor = floors.get(kind) ?? 0;
      let place = live.length - 1;
      while (place >= floor && !fits(live[place], closer)) place -= 1;
      if (place < floor) {
        floors.set(kind, live.length);
        break;
      }
      const opener = live[place];
      const used = closer.mark === "~" ? closer.count : Math.min(opener.count, closer.count, 2);
      const tag = TAGS[closer.mark][used - 1];
      opener.opened.push(tag);
      closer.closed.push(tag);
      opener.count -= used;
      closer.count -= used;
      live.length = opener.count ? place + 1 : place;
      for (const [each, least] of floors) if (least > live.length) floors.set(each, live.length);
    }
    if (closer.opens && closer.count) live.push(closer);
  }
}

function fits(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  if (closer.mark === "~") return opener.count === closer.count;
  if (!(opener.closes || closer.opens)) return true;
  return (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

/** The parts with the tags of paired delimiters, and the text of the others. */
function flat(found) {
  const parts = [];
  let text = "";
  const add = (part) => {
    if (text) parts.push({ text });
    text = "";
    parts.push(part);
  };
  for (const part of found) {
    if (part.text !== undefined) text += part.text;
    else if (part.mark === undefined) add(part);
    else {
      for (const tag of part.closed) add({ close: tag });
      text += part.mark.repeat(part.count);
      for (const tag of part.opened.reverse()) add({ open: tag });
    }
  }
  return text ? [...parts, { text }] : parts;
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
