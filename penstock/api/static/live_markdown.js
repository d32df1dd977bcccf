// Shows a text that grows as Markdown. What is shown stays as it is, so that a selection, or a scrolled code block, does
// too: an element changes where its text does, and only the blocks at the end are made again.

import { become } from "./dom.js";
import { blocks } from "./markdown.js";

export class LiveMarkdown {
  constructor(node) {
    this.node = node;
    this.text = "";
    /** The start of each outermost block in the text; their elements are the node's children. */
    this.starts = [];
  }

  show(text) {
    if (text === this.text) return;
    const kept = text.startsWith(this.text) ? this.settled() : 0;
    const from = this.starts[kept] ?? 0;
    this.starts.length = kept;
    const old = [...this.node.children].slice(kept);
    for (const { node, start } of blocks(text, from)) {
      this.starts.push(start);
      const shown = old.shift();
      if (shown) become(shown, node);
      else this.node.append(node);
    }
    for (const node of old) node.remove();
    this.text = text;
  }

  /** How many blocks no further text can change: those before the last one with two complete lines, of a table's head. */
  settled() {
    const end = this.text.lastIndexOf("\n", this.text.lastIndexOf("\n") - 1);
    return Math.max(0, this.starts.findLastIndex((start) => start <= end));
  }
}
