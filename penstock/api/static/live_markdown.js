// Shows a text that grows as Markdown. What is shown stays as it is, so that a selection, or a scrolled code block, does
// too: an element changes where its text does, and only the blocks, items and rows at the end are made again.

import { become } from "./dom.js";
import { elementOf, outermost } from "./markdown.js";

export class LiveMarkdown {
  constructor(node) {
    this.node = node;
    this.text = "";
    /** Each outermost block, whose elements are the node's children, with the `names` of links that it asked for. */
    this.blocks = [];
    this.definitions = new Map();
  }

  show(text) {
    if (text === this.text) return;
    const grows = text.startsWith(this.text);
    const kept = grows ? settled(this.blocks, this.end()) : 0;
    const from = this.blocks[kept]?.start ?? 0;
    const before = this.definitions;
    this.definitions = new Map([...before].filter(([, { start }]) => start < from));
    const { blocks, rest } = outermost(text, from, this.definitions, this.blocks.slice(0, kept));
    const [last] = this.blocks.splice(kept);
    const renamed = this.renamed(before);
    this.blocks.forEach((block, place) => {
      if (asksFor(block, renamed)) become(this.node.children[place], this.elementOf(block));
    });
    const old = [...this.node.children].slice(kept);
    (rest ? [...blocks, rest] : blocks).forEach((block, place) => {
      this.blocks.push(block);
      const shown = old.shift();
      if (!shown) this.node.append(this.elementOf(block));
      else if (place || !grows || asksFor(last, renamed)) become(shown, this.elementOf(block));
      else this.grow(shown, last, block);
    });
    for (const node of old) node.remove();
    this.text = text;
  }

  elementOf(block) {
    block.names = new Set();
    return elementOf(block, this.linkOf(block));
  }

  linkOf(block) {
    return (name) => {
      block.names.add(name);
      return this.definitions.get(name);
    };
  }

  /** The names of links that are others than before. */
  renamed(before) {
    const names = new Set([...before.keys(), ...this.definitions.keys()]);
    for (const name of names) if (same(before.get(name), this.definitions.get(name))) names.delete(name);
    return names;
  }

  /** Makes the element of an outermost block that of its next reading: of its parts, those that may have changed. */
  grow(node, old, block) {
    const end = this.end();
    const linkOf = this.linkOf(block);
    const follow = (shown, before, now, tight) => {
      const kept = keptParts(before, now, end);
      if (kept === null) return become(shown, elementOf(now, linkOf, tight));
      const parent = now.kind === "table" ? shown.querySelector("tbody") : shown;
      const earlier = partsOf(before);
      const parts = partsOf(now).slice(kept);
      const shownParts = [...parent.children].slice(parent.children.length - earlier.length + kept); // behind the box of a task
      parts.forEach((part, place) => {
        const close = now.kind === "list" ? now.tight : tight && part.kind === "paragraph";
        const there = shownParts[place];
        if (!there) parent.append(elementOf(part, linkOf, close));
        else if (place) become(there, elementOf(part, linkOf, close));
        else follow(there, earlier[kept], part, close);
      });
      for (const each of shownParts.slice(parts.length)) each.remove();
      return null;
    };
    block.names = new Set(old.names);
    follow(node, old, block, false);
  }

  /** The place behind which further text may change blocks that began there: two complete lines, of a table's head. */
  end() {
    return this.text.lastIndexOf("\n", this.text.lastIndexOf("\n") - 1);
  }
}

/** How many blocks no further text can change: those before the last one that began at a place or before it. */
const settled = (blocks, end) => Math.max(0, blocks.findLastIndex(({ start }) => start <= end));

const asksFor = ({ names }, renamed) => renamed.size > 0 && [...names].some((name) => renamed.has(name));

const partsOf = (block) => (block.kind === "table" ? block.rows.map((cells) => ({ kind: "row", cells, sides: block.sides })) : block.blocks);

/** How many parts of a block are the same in its next reading, null if its element has to be made again. */
function keptParts(before, now, end) {
  const { kind } = now;
  if (before.kind !== kind || before.start !== now.start) return null;
  if (kind === "table") return before.rows.length > 1 ? before.rows.length - 1 : null; // its head is complete, and its rows are lines
  if (kind === "list") return before.tight === now.tight ? settled(before.blocks, end) : null;
  if (kind === "quote") return settled(before.blocks, end);
  return kind === "item" ? settled(before.blocks, end) || null : null; // its first part may become a task
}

const same = (one, other) => one?.target === other?.target && one?.title === other?.title;
