// Shows a text that grows as Markdown. What is shown stays as it is, so that a selection, or a scrolled code block, does
// too: an element changes where its text does, and only the blocks at the end are made again.

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
    const kept = text.startsWith(this.text) ? this.settled() : 0;
    const from = this.blocks[kept]?.start ?? 0;
    const before = this.definitions;
    this.definitions = new Map([...before].filter(([, { start }]) => start < from));
    const { blocks, rest } = outermost(text, from, this.definitions);
    this.blocks.length = kept;
    this.follow(before);
    const old = [...this.node.children].slice(kept);
    for (const block of rest ? [...blocks, rest] : blocks) {
      const node = this.elementOf(block);
      this.blocks.push(block);
      const shown = old.shift();
      if (shown) become(shown, node);
      else this.node.append(node);
    }
    for (const node of old) node.remove();
    this.text = text;
  }

  elementOf(block) {
    block.names = new Set();
    return elementOf(block, (name) => {
      block.names.add(name);
      return this.definitions.get(name);
    });
  }

  /** Shows the blocks that ask for a link which is another one than before. */
  follow(before) {
    const names = new Set([...before.keys(), ...this.definitions.keys()]);
    for (const name of names) if (same(before.get(name), this.definitions.get(name))) names.delete(name);
    if (!names.size) return;
    this.blocks.forEach((block, place) => {
      if ([...block.names].some((name) => names.has(name))) become(this.node.children[place], this.elementOf(block));
    });
  }

  /** How many blocks no further text can change: those before the last one with two complete lines, of a table's head. */
  settled() {
    const end = this.text.lastIndexOf("\n", this.text.lastIndexOf("\n") - 1);
    return Math.max(0, this.blocks.findLastIndex(({ start }) => start <= end));
  }
}

const same = (one, other) => one?.target === other?.target && one?.title === other?.title;
