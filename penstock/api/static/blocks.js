// The blocks of a Markdown text, as a tree of plain objects: CommonMark's without HTML, and GitHub's tables. Each line is
// read once, from the outermost container that is open to the innermost; the time grows with the length of the text alone.

import { definitionAt, labelKey } from "./links.js";

const FENCE = /^(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)$/;
const HEADING = /^(#{1,6})(?:[ \t]+(.*))?$/;
const UNDERLINE = /^(=+|-+)[ \t]*$/;
const RULE = /^([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const MARKER = /^(?:([-*+])|(\d{1,9})([.)]))(?=[ \t]|$)/;
const RULER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
/** The first line of a formula: it stays text until its last line, or an empty one. */
const FORMULA = /^(\$\$|\\\[)[ \t]*$/;
/** Quotes, lists and items within each other. What is deeper is text. */
const DEEPEST = 40;

/** The rest of a line behind a place. A tab goes to the next multiple of 4 columns, and may be taken in parts. */
class Line {
  constructor(text, offset) {
    this.text = text;
    this.offset = offset;
    this.at = 0;
    this.column = 0;
    /** Columns of a tab that are left of it. */
    this.spare = 0;
    this.look();
  }

  /** Finds the columns of white space ahead, and the text behind them. */
  look() {
    let column = this.column + this.spare;
    let at = this.at;
    for (; this.text[at] === " " || this.text[at] === "\t"; at += 1) column += this.text[at] === " " ? 1 : 4 - (column % 4);
    this.indent = column - this.column;
    this.next = at;
    this.sign = this.text[at] ?? "";
  }

  get blank() {
    return this.sign === "";
  }

  /** The text ahead without its indentation. */
  get bare() {
    return this.text.slice(this.next);
  }

  get rest() {
    return " ".repeat(this.spare) + this.text.slice(this.at);
  }

  /** Takes columns of white space, as many as there are. */
  take(columns) {
    for (let left = Math.min(columns, this.indent); left > 0; left -= 1) {
      if (!this.spare) {
        this.spare = this.text[this.at] === "\t" ? 4 - (this.column % 4) : 1;
        this.at += 1;
      }
      this.spare -= 1;
      this.column += 1;
    }
    this.look();
  }

  /** Takes the indentation and signs behind it. */
  skip(signs) {
    this.column += this.indent + signs;
    this.at = this.next + signs;
    this.spare = 0;
    this.look();
  }
}

/**
 * The outermost blocks of a text behind `from`, the start of one. A block has `kind` and `start`, its place in the text;
 * quotes, lists (`ordered`, `first`, `tight`) and items have `blocks`; headings (`level`) and paragraphs have `text`, code has it
 * and `language`; tables have `sides`, `head` and `rows` of texts. `definitions`: filled with the targets of links by name.
 */
export function blocksOf(text, from, definitions) {
  const parser = new Parser(definitions);
  for (let start = from; start < text.length;) {
    const end = text.indexOf("\n", start);
    const behind = end < 0 ? text.length : end;
    parser.read(new Line(text.slice(start, text[behind - 1] === "\r" ? behind - 1 : behind), start));
    start = behind + 1;
  }
  return parser.end();
}

class Parser {
  constructor(definitions) {
    this.definitions = definitions;
    /** The open containers, the outermost first. */
    this.open = [{ kind: "document", blocks: [] }];
    /** The open block of text in the innermost one. */
    this.leaf = null;
    /** The containers from this one on had an empty line before. */
    this.emptyFrom = Infinity;
  }

  end() {
    this.close(1);
    return this.open[0].blocks;
  }

  read(line) {
    const [within, quoted] = this.goOn(line);
    const whole = within === this.open.length;
    if (whole && this.leaf && this.continues(line)) {
      this.emptyFrom = line.blank ? quoted : Infinity;
      return;
    }
    let depth = within;
    for (let made; (made = this.begin(line, depth)); depth = this.open.length) {
      if (made === "leaf") {
        this.emptyFrom = Infinity;
        return;
      }
    }
    if (line.blank) {
      this.close(depth);
      this.emptyFrom = depth > within ? Infinity : quoted;
      return;
    }
    if (this.leaf?.kind === "paragraph") this.leaf.lines.push(line.bare); // a lazy one, if it is within fewer containers
    else {
      this.close(depth);
      this.add({ kind: "paragraph", lines: [line.bare] }, line);
    }
    this.leaf.last = line.offset;
    this.emptyFrom = Infinity;
  }

  /** Enters the open containers that a line is in. Returns how many they are, and the first that it may be empty in. */
  goOn(line) {
    let quoted = 0;
    for (let depth = 1; depth < this.open.length; depth += 1) {
      const container = this.open[depth];
      const { kind, blocks } = container;
      if (kind === "quote") {
        if (line.indent > 3 || line.sign !== ">") return [depth, quoted];
        line.skip(1);
        line.take(1);
        quoted = depth + 1;
      } else if (kind === "item") {
        if (isOutdented(line, container)) container.content = line.indent;
        if (line.blank ? !blocks.length : line.indent < container.content) return [depth, quoted];
        line.take(container.content);
      }
    }
    return [this.open.length, quoted];
  }

  /** Whether the open leaf takes a line of its containers. */
  continues(line) {
    const { leaf } = this;
    if (leaf.kind === "code" && leaf.fence) {
      const closes = line.indent < 4 && line.sign === leaf.fence[0] && line.bare.trimEnd().length >= leaf.fence.length
        && line.bare.trimEnd() === leaf.fence[0].repeat(line.bare.trimEnd().length);
      if (closes) return this.closeLeaf();
      line.take(leaf.indent);
      leaf.lines.push(line.rest);
      return true;
    }
    if (leaf.kind === "code") {
      if (line.indent < 4 && !line.blank) return false;
      line.take(4);
      leaf.lines.push(line.rest);
      return true;
    }
    if (leaf.kind === "formula" && !line.blank) {
      leaf.lines.push(line.bare);
      if (line.bare.trimEnd().endsWith(leaf.until)) this.closeLeaf();
      return true;
    }
    if (leaf.kind === "table" && !line.blank && !this.starts(line)) {
      leaf.rows.push(cellsOf(line.bare, leaf.sides.length));
      return true;
    }
    return leaf.kind === "paragraph" && !line.blank && line.indent < 4 && (this.underlined(line) || this.ruled(line));
  }

  /** Begins what a line begins at a depth: a container, or the text of a leaf. Returns which, or nothing. */
  begin(line, depth) {
    const text = this.leaf?.kind === "paragraph";
    if (line.blank) return null;
    if (line.indent > 3) {
      if (text) return null;
      this.close(depth);
      line.take(4);
      return this.add({ kind: "code", lines: [line.rest], language: "" }, line);
    }
    const start = this.starts(line, text && depth === this.open.length);
    if (!start || (start.content && depth > DEEPEST)) return null;
    this.close(depth);
    if (start.kind === "quote") {
      this.leaveList();
      line.skip(1);
      line.take(1);
      this.enter({ kind: "quote", blocks: [] }, line);
      return "container";
    }
    if (start.kind !== "item") return this.add(start, line);
    if (this.open.at(-1).mark !== start.mark) {
      this.leaveList();
      const { ordered, mark, number } = start;
      this.enter({ kind: "list", ordered, mark, first: number, tight: true, blocks: [] }, line);
    }
    const { indent } = line;
    line.skip(start.width);
    const gap = line.blank || line.indent > 4 ? 1 : line.indent;
    line.take(gap);
    this.enter({ kind: "item", ordered: start.ordered, indent, content: indent + start.width + gap, blocks: [] }, line);
    return "container";
  }

  /** What begins with the text of a line, as a block without what is in it. `interrupts`: a paragraph would end. */
  starts(line, interrupts = false) {
    if (line.indent > 3) return null;
    const { bare, sign } = line;
    if (sign === ">") return { kind: "quote", content: true };
    if (sign === "#") {
      const [, signs, title] = HEADING.exec(bare) ?? [];
      if (signs) return { kind: "heading", level: signs.length, text: unclosed(title ?? ""), done: true };
    }
    if (sign === "`" || sign === "~") {
      const [, fence, about] = FENCE.exec(bare) ?? [];
      if (fence) return { kind: "code", fence, indent: line.indent, language: about.trim(), lines: [] };
    }
    if (sign === "$" || sign === "\\") {
      const [, mark] = FORMULA.exec(bare) ?? [];
      if (mark) return { kind: "formula", until: mark === "$$" ? "$$" : "\\]", lines: [bare] };
    }
    if (RULE.test(bare)) return { kind: "rule", done: true };
    const [marker, bullet, number, mark] = MARKER.exec(bare) ?? [];
    if (marker === undefined || (interrupts && (bare.trimEnd() === marker || (number && Number(number) !== 1)))) return null;
    return { kind: "item", content: true, ordered: !bullet, mark: bullet ?? mark, number: Number(number), width: marker.length };
  }

  /** Makes the open paragraph a heading, if a line underlines it. */
  underlined(line) {
    const [, signs] = UNDERLINE.exec(line.bare) ?? [];
    if (!signs) return false;
    const { leaf } = this;
    this.define(leaf);
    if (!leaf.text) {
      leaf.lines = [];
      return false;
    }
    Object.assign(leaf, { kind: "heading", level: signs[0] === "=" ? 1 : 2 });
    this.leaf = null;
    return true;
  }

  /** Makes the last line of the open paragraph the head of a table, if a line is the ruler below it. */
  ruled(line) {
    const { leaf } = this;
    const last = leaf.lines.at(-1);
    if (last === undefined || !RULER.test(line.bare.trimEnd()) || !(line.bare.includes("|") || last.includes("|"))) return false;
    const sides = cellsOf(line.bare).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
    const head = cellsOf(last);
    if (head.length !== sides.length) return false;
    leaf.lines.pop();
    const table = { kind: "table", sides, head, rows: [], start: leaf.last };
    const { blocks } = this.open.at(-1);
    this.closeLeaf();
    blocks.push(table);
    this.leaf = table;
    return true;
  }

  // -- opening and closing

  add(block, line) {
    this.leaveList();
    this.put(block, line);
    if (!block.done) this.leaf = block;
    return "leaf";
  }

  enter(container, line) {
    this.put(container, line);
    this.open.push(container);
  }

  put(block, line) {
    const parent = this.open.at(-1);
    if (parent.blocks.length && this.open.length - 1 >= this.emptyFrom) {
      const list = parent.kind === "item" ? this.open.at(-2) : parent;
      if (list.kind === "list") list.tight = false;
    }
    block.start = line.offset;
    parent.blocks.push(block);
  }

  /** Closes the containers from a depth on. */
  close(depth) {
    this.closeLeaf();
    this.open.length = depth;
  }

  /** Closes a list that is open without an item: what follows is none of it. */
  leaveList() {
    if (this.open.at(-1).kind === "list") this.open.pop();
  }

  closeLeaf() {
    const { leaf } = this;
    this.leaf = null;
    if (leaf?.kind === "paragraph") {
      this.define(leaf);
      if (!leaf.text) this.open.at(-1).blocks.pop();
    } else if (leaf?.lines) {
      if (leaf.kind === "code" && !leaf.fence) while (!leaf.lines.at(-1).trim()) leaf.lines.pop();
      leaf.text = leaf.lines.join("\n");
    }
    return true;
  }

  /** Takes the definitions at the start of a paragraph; what is left is its text. */
  define(leaf) {
    let text = leaf.lines.join("\n").trimEnd();
    for (let found; text[0] === "[" && (found = definitionAt(text)); text = text.slice(found.end)) {
      const key = labelKey(found.label);
      if (!this.definitions.has(key)) this.definitions.set(key, { target: found.target, title: found.title, start: leaf.start });
    }
    leaf.text = text;
  }
}

/** Models indent bullets and code in a numbered item by two columns, where its text begins at the third or fourth. */
const isOutdented = (line, { ordered, indent, content }) => ordered && line.indent >= indent + 2 && line.indent < content
  && (FENCE.test(line.bare) || (/^[-*+][ \t]/.test(line.bare) && !RULE.test(line.bare)));

/** A heading without the signs that may close it. */
function unclosed(title) {
  const bare = title.trimEnd();
  let end = bare.length;
  while (bare[end - 1] === "#") end -= 1;
  return end === 0 || /[ \t]/.test(bare[end - 1]) ? bare.slice(0, end).trim() : bare;
}

/** The cells of a row, at most so many; \| is a sign of a cell. */
function cellsOf(line, most = Infinity) {
  const text = line.trim();
  const found = [];
  let cell = "";
  for (let at = text[0] === "|" ? 1 : 0; at < text.length && found.length < most; at += 1) {
    if (text[at] === "|") {
      found.push(cell.trim());
      cell = "";
    } else if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else cell += text[at];
  }
  if (found.length < most && (cell.trim() || text.at(-1) !== "|" || text.at(-2) === "\\")) found.push(cell.trim());
  return found;
}
